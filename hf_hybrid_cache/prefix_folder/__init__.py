"""A folder in which prompts, each with a payload, survive the process; it knows nothing of tensors and models."""

from .errors import (
    NodeFileError,
    NodeInUseError,
    NodeNotFoundError,
    PrefixFolderFullError,
    PrefixStoreFolderError,
    TokenIdsError,
)
from .match import Match
from .node_file import NodeFile, NodeHead
from .node_folder import Entry
from .payload import PayloadWriter
from .prefix_folder import PrefixFolder
from .search import Part

__all__ = [
    "Entry",
    "Match",
    "NodeFile",
    "NodeFileError",
    "NodeHead",
    "NodeInUseError",
    "NodeNotFoundError",
    "Part",
    "PayloadWriter",
    "PrefixFolder",
    "PrefixFolderFullError",
    "PrefixStoreFolderError",
    "TokenIdsError",
]
