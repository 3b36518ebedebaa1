"""
The bytes that attention to a mapped file reads from the disk, and its seconds.

One layer of Llama-3.2-1B (8 KV heads with 4 queries each, head_dim 64), with pages that matter as in `selection_speed`.
It is saved, the system is asked to forget the file, and it is mapped, without checking its checksums. Then two tokens
are attended to. Bytes are those that the system has fetched for this process. Linux only; on a disk that is a part of
memory, or where the system forgets nothing, there is nothing to count.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from experiments.common import records
from experiments.common.options import experiment_parser
from experiments.common.synthetic import llama_1b_config, random_states
from experiments.common.timing import seconds_of
from experiments.selection.turned_keys import turned_towards_queries
from hf_hybrid_cache import DynamicHybridCache, HybridCache, QuantizedHybridCache, Selection

ALL, PART = "all", "part"


def bytes_fetched() -> int:
    """Return the bytes that the system has read from disks for this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def forget(path: Path) -> None:
    """Ask the system to forget what it holds of a file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(num_tokens: int, bits: int, share: float, folder: Path, top_p: float) -> dict[str, Any]:
    """Bytes and seconds of two tokens, where all is read and where a part is."""
    torch.manual_seed(0)
    config = llama_1b_config(num_layers=1)
    keys, values = (random_states(config, num_tokens, torch.bfloat16) for _ in range(2))
    query = turned_towards_queries(config, keys, share)
    selection, path = Selection(top_p, most=1), folder / "cache.kv"
    cache: HybridCache = DynamicHybridCache(config, cpu_decode=True, selection=selection)
    if bits < 16:
        cache = QuantizedHybridCache(config, bits=bits, selection=selection)
    cache.update(keys, values, 0)
    new_key, new_value = (states[:, :, :1].clone() for states in (keys, values))

    def attend(cache: HybridCache) -> None:
        keys, values = cache.update(new_key, new_value, 0)
        scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    attend(cache)  # the codec is chosen, and kernels are compiled
    cache.save(path)
    rows: dict[str, Any] = {"file_bytes": path.stat().st_size}
    for name, wanted in ((ALL, None), (PART, selection)):
        forget(path)
        before, steps = bytes_fetched(), []
        loaded = HybridCache.load(path, config, mmap=True, verify=False, selection=wanted, dtype=torch.bfloat16)
        of_load = bytes_fetched() - before
        for _ in range(2):
            before = bytes_fetched()
            seconds = seconds_of(lambda loaded=loaded: attend(loaded))  # type: ignore[misc]
            steps.append({"seconds": seconds, "bytes": bytes_fetched() - before})
        rows[name] = {"bytes_to_load": of_load, "steps": steps, "read": loaded.stats.share_read.get(0, 1.0)}
        del loaded
    return rows


def table(cells: list[dict[str, Any]]) -> list[str]:
    """Lines of Markdown: what the first token reads of the file."""
    lines = ["| stored in | pages that matter | file | all: read, time | a part: read, time |", "|---|---|---|---|---|"]
    for cell in cells:
        first = [cell[name]["steps"][0] for name in (ALL, PART)]
        read = [f"{step['bytes'] / 2**20:.0f} MiB, {step['seconds'] * 1e3:.0f} ms" for step in first]
        stored = "bfloat16" if cell["bits"] == 16 else f"{cell['bits']} bits"
        lines.append(f"| {stored} | {cell['share']:.1%} | {cell['file_bytes'] / 2**20:.0f} MiB | {' | '.join(read)} |")
    return lines


def main() -> None:
    parser = experiment_parser("mapped_reads", __doc__)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--bits", type=int, nargs="+", choices=[16, 8, 4, 2], default=[16, 4])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.001, 0.01, 0.1], help="of pages that matter")
    parser.add_argument("--top-p", type=float, default=0.99)
    parser.add_argument("--folder", type=Path, help="on the disk to be tried (default: that of temporary files)")
    arguments = parser.parse_args()
    if not sys.platform.startswith("linux"):
        sys.exit("What a process has read is counted on Linux only.")
    cells = []
    for bits in arguments.bits:
        for share in arguments.shares:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                cell = measure(arguments.tokens, bits, share, Path(folder), arguments.top_p)
            cells.append({"bits": bits, "share": share, **cell})
            for name in (ALL, PART):
                steps = ", ".join(
                    f"{step['bytes'] / 2**20:.1f} MiB in {step['seconds'] * 1e3:.1f} ms" for step in cell[name]["steps"]
                )
                print(
                    f"{bits:>2} bits, {share:.1%} matter, {name:>4}: {cell[name]['bytes_to_load'] / 2**20:.1f} MiB to "
                    f"load, then {steps}; file {cell['file_bytes'] / 2**20:.1f} MiB",
                    flush=True,
                )
    print(f"record: {records.save('mapped_reads', {'tokens': arguments.tokens, 'cells': cells}, arguments.out)}")
    answer = {f"{cell['bits']} bits, {cell['share']}": cell[PART]["steps"][0]["bytes"] for cell in cells}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
