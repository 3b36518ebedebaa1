"""Nodes whose checksums fit and whose descriptions are others."""

import json
from pathlib import Path
from typing import Any

from files.forged import parts_of, write

from hf_hybrid_cache.prefix_store.node_files import VERSION, Nodes


def nodes_of(folder: Path) -> list[Path]:
    """Return the files of the nodes of a store, in the order of their tokens."""
    nodes = Nodes(folder / f"nodes-{VERSION}")
    return [node.path for node in sorted(nodes, key=lambda node: len(nodes.way_to(node)))]


def description_of(path: Path) -> Any:
    """Return the description of a node, with that of its states, as JSON has it."""
    metadata = _metadata(path)
    return json.loads(metadata["description"]) | {"states": json.loads(metadata["states"])}


def describe(path: Path, tree: Any) -> None:
    """Give a node another description, as JSON has it or as text."""
    header, data = parts_of(path)
    rest = {name: value for name, value in tree.items() if name != "states"} if isinstance(tree, dict) else tree
    states = tree.get("states") if isinstance(tree, dict) else tree
    header["__metadata__"] |= {"description": _text(rest), "states": _text(states)}
    write(path, header, data)


def _text(tree: Any) -> str:
    return tree if isinstance(tree, str) else json.dumps(tree)


def _metadata(path: Path) -> dict[str, str]:
    metadata: dict[str, str] = parts_of(path)[0]["__metadata__"]
    return metadata
