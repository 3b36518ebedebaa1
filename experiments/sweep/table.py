"""The table that a sweep prints, a line for each cell as it comes."""

from typing import Any

from experiments.sweep.store import Cell

_WIDTHS = (21, 13, 8, 6, 10, 8, 9, 9, 9, 9, 9)
_NAMES = (
    ("", "", "", "new", "", "", "TPOT p50", "p99", "KV", "device", "host"),
    ("cache", "decode", "context", "tokens", "TTFT", "tokens/s", "ms", "ms", "MiB", "peak MiB", "peak MiB"),
)


def _line(texts: tuple[str, ...]) -> str:
    left = [text.ljust(width) for text, width in zip(texts[:2], _WIDTHS[:2], strict=True)]
    return " ".join(left + [text.rjust(width) for text, width in zip(texts[2:], _WIDTHS[2:], strict=False)])


HEADINGS = "\n".join(map(_line, _NAMES))


def row(record: dict[str, Any]) -> str:
    """Format a record as a row of the table; a cell that was not measured has the reason."""
    cell, result = Cell.from_record(record), record["result"]
    key = (cell.cache, cell.decode_device, f"{cell.context_tokens:,}", f"{cell.new_tokens:,}")
    if result["status"] != "measured":
        asked = result.get("bytes_asked")
        return f"{_line(key)}  {result['status']}" + (f", {asked / 2**30:.2f} GiB asked for" if asked else "")
    tpot, peak = result["tpot_seconds"], result["peak_bytes"]
    return _line(
        (
            *key,
            "synthetic" if result["ttft_seconds"] is None else f"{result['ttft_seconds']:.2f} s",
            f"{result['tokens_per_second']:.2f}",
            f"{tpot['p50'] * 1e3:.1f}",
            f"{tpot['p99'] * 1e3:.1f}",
            f"{result['kv_bytes'] / 2**20:,.1f}",
            _mebibytes(peak["device_reserved"]),
            _mebibytes(peak["host_over_model"]),
        )
    )


def _mebibytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**20:,.0f}"
