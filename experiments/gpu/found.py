"""Records of machines with a GPU."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.common.records import RESULTS

FOLDER = RESULTS / "gpu"
MachineRecords = Mapping[str, dict[str, Any]]  # records of one machine, by the names of their steps


def found_in(folder: Path, machine: str) -> MachineRecords:
    """Load the records of one machine."""
    paths = {path.parent.name: path for path in sorted(folder.glob(f"*/{machine}.json")) if path.parent.name != "steps"}
    return {name: json.loads(path.read_text()) for name, path in paths.items()}


def committed_records() -> dict[str, MachineRecords]:
    """Load the committed records, by machine."""
    machines = sorted({path.stem for path in FOLDER.glob("*/*.json") if path.parent.name != "steps"})
    found = {machine: found_in(FOLDER, machine) for machine in machines}
    assert not any(record["rehearsal"] for records in found.values() for record in records.values())
    return found


def decode_steps(found: MachineRecords) -> list[dict[str, Any]]:
    """Return the records of whole decode steps, contexts ascending."""
    return sorted(
        (record for record in found.values() if "median_seconds" in record), key=lambda record: record["context_tokens"]
    )
