"""Records of the sweep on disk: written whole, read only if they are what they should be."""

import csv
import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from experiments.common import records

EXPERIMENT = "context_sweep"
FOLDER = records.RESULTS / EXPERIMENT
SCHEMA_VERSION = 1
SCHEMA = json.loads((Path(__file__).parent / "schema.json").read_text())
SUMMARY = "summary.csv"
_SHOWN = 200


@dataclass(frozen=True, order=True)
class Cell:
    """
    One measurement; equal cells are the same one, and it is measured once.

    Attributes:
        model: a name that `hf_hybrid_cache.models.load` knows.
        cache: a key of `caches.CACHES`.
        decode_device: `gpu`; `cpu-attention`, the model on the GPU and attention on the CPU; or `cpu`, the whole decode
            phase on the CPU.
        context_tokens: prompt and new tokens together.
        new_tokens: of these, generated.
        prefill: `real`, or `synthetic` for random keys and values in place of all of the prompt but its last token.
        repeat: counts from 0.
    """

    model: str
    cache: str
    decode_device: str
    context_tokens: int
    new_tokens: int
    prefill: str
    repeat: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.new_tokens < self.context_tokens:
            raise ValueError(
                f"{self.new_tokens:,} new tokens in a context of {self.context_tokens:,}: there must be at least two, "
                "and room for a prompt."
            )

    @property
    def name(self) -> str:
        """The name of its file."""
        return "--".join(str(value).replace("/", "-") for value in asdict(self).values())

    @property
    def prompt_tokens(self) -> int:
        return self.context_tokens - self.new_tokens

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Cell":
        return cls(**{field.name: record["cell"][field.name] for field in fields(cls)})


class DamagedRecordError(ValueError):
    """A file that is not the record it should be; the message says why."""


@dataclass
class Stored:
    """
    The records of a folder, and its damaged files.

    Attributes:
        records: by cell.
        damaged: why a file was not believed, by path.
    """

    records: dict[Cell, dict[str, Any]] = field(default_factory=dict)
    damaged: dict[Path, str] = field(default_factory=dict)


def read(folder: Path) -> Stored:
    """Read all records in a folder; damaged files are named instead."""
    stored = Stored()
    for path in sorted(folder.glob("*.json")):
        try:
            record = checked(path)
        except DamagedRecordError as error:
            stored.damaged[path] = str(error)
        else:
            stored.records[Cell.from_record(record)] = record
    return stored


def checked(path: Path) -> dict[str, Any]:
    """
    The record in a file.

    Raises:
        DamagedRecordError: it is cut off, of another form or version, or contradicts itself.
    """
    try:
        record: dict[str, Any] = json.loads(path.read_bytes(), parse_constant=_refuse, parse_float=_finite)
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedRecordError(f"not JSON: {error}") from error
    if flaw := best_match(Draft202012Validator(SCHEMA).iter_errors(record)):
        raise DamagedRecordError(f"{flaw.json_path}: {flaw.message.splitlines()[0][:_SHOWN]}")
    try:
        cell = Cell.from_record(record)
    except ValueError as error:
        raise DamagedRecordError(str(error)) from error
    if path.stem != cell.name:
        raise DamagedRecordError(f"it is about another cell, {cell.name}")
    result = record["result"]
    if result["status"] == "measured" and len(result["step_seconds"]) != cell.new_tokens - 1:
        raise DamagedRecordError(f"{len(result['step_seconds']):,} steps for {cell.new_tokens:,} new tokens")
    return record


def write(folder: Path, record: dict[str, Any]) -> Path:
    """Write one record; returns its path."""
    path = folder / f"{Cell.from_record(record).name}.json"
    content = {"experiment": EXPERIMENT, "schema_version": SCHEMA_VERSION, **record}
    with records.written_whole(path) as file:
        file.write(json.dumps(content, indent=1) + "\n")
    return path


def write_summary(folder: Path) -> None:
    """A line for each record in a folder, without the raw samples."""
    rows = [summary_row(record) for record in read(folder).records.values()]
    if not rows:
        return
    with records.written_whole(folder / SUMMARY) as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def summary_row(record: dict[str, Any]) -> dict[str, Any]:
    result, environment = record["result"], record["environment"]
    tpot, peak, moved = (result.get(key) or {} for key in ("tpot_seconds", "peak_bytes", "moved"))
    return {
        **asdict(Cell.from_record(record)),
        "status": result["status"],
        "message": result.get("message"),
        "ttft_seconds": result.get("ttft_seconds"),
        "tokens_per_second": result.get("tokens_per_second"),
        **{f"tpot_{name}_seconds": tpot.get(name) for name in ("mean", "p50", "p95", "p99")},
        "kv_bytes": result.get("kv_bytes"),
        "weight_bytes": result.get("weight_bytes"),
        **{f"peak_{name}_bytes": peak.get(name) for name in ("host_over_model", "device_allocated", "device_reserved")},
        **{name: moved.get(name) for name in ("bytes_to_device", "bytes_to_host", "kernel_seconds")},
        **{name: environment.get(name) for name in ("read_bytes_per_second", "bus_bytes_per_second")},
        **{name: environment.get(name) for name in ("gpu_memory_limit_bytes", "git_revision", "date")},
    }


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        _refuse(number)
    return value
