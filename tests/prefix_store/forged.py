"""Nodes whose checksums fit and whose descriptions are others."""

import json
from pathlib import Path
from typing import Any

from files.forged import parts_of, write


def nodes_of(folder: Path) -> list[Path]:
    """Return the files of the nodes of a store, in the order of their tokens."""
    return sorted((folder / "nodes").iterdir(), key=lambda path: json.loads(_metadata(path)["node"])["start"])


def description_of(path: Path) -> Any:
    """Return the description of a node, with that of its states, as JSON has it."""
    metadata = _metadata(path)
    return json.loads(metadata["description"]) | {"states": json.loads(metadata["states"])}


def describe(path: Path, tree: Any) -> None:
    """Give a node another description, as JSON has it or as text, and let the database be made again."""
    header, data = parts_of(path)
    rest = {name: value for name, value in tree.items() if name != "states"} if isinstance(tree, dict) else tree
    states = tree.get("states") if isinstance(tree, dict) else tree
    header["__metadata__"] |= {"description": _text(rest), "states": _text(states)}
    write(path, header, data)
    (path.parents[1] / "prompts.sqlite").unlink(missing_ok=True)


def _text(tree: Any) -> str:
    return tree if isinstance(tree, str) else json.dumps(tree)


def _metadata(path: Path) -> dict[str, str]:
    metadata: dict[str, str] = parts_of(path)[0]["__metadata__"]
    return metadata
