"""Nodes whose checksums fit and whose descriptions are others."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def parts_of(path: Path) -> tuple[Any, bytes]:
    """Return the header of a file as JSON has it, and the data after it."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def write(path: Path, tree: Any, data: bytes) -> None:
    """Write a file with this header, whose checksum fits."""
    text = json.dumps(tree).encode()
    header = len(text).to_bytes(8, "little") + text
    path.write_bytes(header + data[:-4] + zlib.crc32(header).to_bytes(4, "little"))


def nodes_of(folder: Path) -> list[Path]:
    """Return the files of the nodes of a store, in the order of their tokens."""
    return sorted((folder / "nodes").iterdir(), key=lambda path: json.loads(_metadata(path)["node"])["start"])


def description_of(path: Path) -> Any:
    """Return the description of a node, with that of its states, as JSON has it."""
    metadata = _metadata(path)
    return json.loads(metadata["description"]) | {"states": json.loads(metadata["states"])}


def describe(path: Path, tree: Any) -> None:
    """Give a node another description, and let the database be made again."""
    header, data = parts_of(path)
    rest = {name: value for name, value in tree.items() if name != "states"} if isinstance(tree, dict) else tree
    states = tree.get("states") if isinstance(tree, dict) else tree
    header["__metadata__"] |= {"description": json.dumps(rest), "states": json.dumps(states)}
    write(path, header, data)
    (path.parents[1] / "prompts.sqlite").unlink(missing_ok=True)


def change(path: Path, act: Callable[[Any], object]) -> None:
    """Change the description of a node, as JSON has it, in place."""
    tree = description_of(path)
    act(tree)
    describe(path, tree)


def _metadata(path: Path) -> dict[str, str]:
    metadata: dict[str, str] = parts_of(path)[0]["__metadata__"]
    return metadata
