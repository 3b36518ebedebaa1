"""Nodes whose checksums fit and whose descriptions are others."""

import json
import os
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_hybrid_cache.prefix_folder.node_file import NodeHead, write_node


def nodes_of(folder: Path) -> list[Path]:
    """Return the files of the nodes of a store, in the order of their tokens."""

    def start(path: Path) -> int:
        with path.open("rb", buffering=0) as file:
            return NodeHead.read(path, file).start

    return sorted((folder / "nodes").iterdir(), key=start)


def description_of(path: Path) -> Any:
    """Return the description of a node as JSON has it."""
    with path.open("rb", buffering=0) as file:
        return json.loads(zlib.decompress(NodeHead.read(path, file).description))


def describe(path: Path, tree: Any, sparse_bytes: int | None = None) -> None:
    """
    Give a node another description, with the right checksums, and let the index be made again.

    Args:
        path: of the node.
        tree: the description.
        sparse_bytes: size of the payload, if it is to have no content.
    """
    with path.open("rb", buffering=0) as file:
        head = NodeHead.read(path, file)
        payload = file.read()
    description = tree if isinstance(tree, bytes) else zlib.compress(json.dumps(tree).encode())
    head = replace(head, description=description)
    with path.open("wb+", buffering=0) as file:
        if sparse_bytes is None:
            write_node(file, head, lambda writer: writer.write(payload))
        else:
            head = replace(head, payload_bytes=sparse_bytes)
            file.write(head.to_bytes())
            os.truncate(path, head.file_bytes)
    (path.parents[1] / "index").unlink(missing_ok=True)


def change(path: Path, act: Callable[[Any], object]) -> None:
    """Change the description of a node, as JSON has it, in place."""
    tree = description_of(path)
    act(tree)
    describe(path, tree)
