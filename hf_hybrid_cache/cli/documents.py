"""Documents to ask about: files, folders of them and standard input, in the order in which they are named."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .console import UsageError
from .files import STANDARD_INPUT, read_bytes, shown
from .formats import text_of


@dataclass(frozen=True)
class Document:
    """The text of a file, and its name as it was given."""

    name: str
    text: str


@dataclass(frozen=True)
class Documents:
    """
    All that were read, at least one.

    Attributes:
        files: in order.
        left_out: of files that were not read, a sentence each that says why.
    """

    files: tuple[Document, ...]
    left_out: tuple[str, ...]

    @property
    def sections(self) -> list[str]:
        """The text of each up to the next; where there are several, a line before each names it."""
        if len(self.files) == 1:
            return [self.files[0].text]
        return [f"Document: {document.name}\n\n{document.text.strip()}\n\n" for document in self.files]

    @property
    def text(self) -> str:
        return "".join(self.sections)

    @property
    def counted(self) -> str:
        return "document" if len(self.files) == 1 else f"{len(self.files):,} documents"


def read_documents(names: Sequence[str], remark: Callable[[str], None], folder: Path | None = None) -> Documents:
    """
    Read all of them, those in a folder sorted by their paths.

    Args:
        names: of files and folders, and `-` for standard input.
        remark: is told how many were read in a folder and what was left out.
        folder: that names are relative to; there is no standard input then.

    Raises:
        UsageError: one that is named cannot be read, or none in a folder that is named.
    """
    collection = _Collection(remark)
    for name in names:
        path = Path(name) if folder is None else folder.absolute() / name
        if not name.strip():
            raise UsageError(f"{name!r} is not the name of a document: give that of a file or a folder.")
        if folder is None and name == STANDARD_INPUT:
            collection.add(path, "standard input")
        elif os.path.isdir(path):
            collection.add_folder(path, name)
        else:
            collection.add(path, shown(name))
    return Documents(tuple(collection.documents), tuple(collection.left_out))


class _Collection:
    """What was read so far, each file once."""

    def __init__(self, remark: Callable[[str], None]):
        self.documents: list[Document] = []
        self.left_out: list[str] = []
        self._remark = remark
        self._places: set[str] = set()

    def add(self, path: Path, name: str) -> None:
        """
        Read a file, unless it is there already.

        Raises:
            UsageError: it cannot be read.
        """
        place = os.path.realpath(path)
        if place in self._places:
            self._leave_out(f"{name} was read before.")
            return
        self.documents.append(Document(name, text_of(name, read_bytes(path), self._remark)))
        self._places.add(place)

    def add_folder(self, folder: Path, name: str) -> None:
        """
        Read what can be read in a folder.

        Raises:
            UsageError: that is nothing.
        """
        num_read, num_left_out = len(self.documents), len(self.left_out)
        paths, unread = _files_in(folder)
        for path in paths:
            named = shown(str(Path(name) / path.relative_to(folder)))
            try:
                if not path.is_file():
                    raise UsageError(f"{named} is not a file, or a link to none.")
                self.add(path, named)
            except UsageError as error:
                self._leave_out(str(error))
        for why in unread:
            self._leave_out(why)
        left_out = self.left_out[num_left_out:]
        if not any(os.path.realpath(path) in self._places for path in paths):
            if not left_out:
                raise UsageError(f"The folder {shown(name)} has no files, except hidden ones.")
            raise UsageError(f"No file in {shown(name)} can be read, the first because: {left_out[0]}")
        self._remark(f"{shown(name)}: documents read: {len(self.documents) - num_read:,}; left out: {len(left_out):,}")

    def _leave_out(self, why: str) -> None:
        self.left_out.append(why)
        self._remark(f"left out: {why}")


def _files_in(folder: Path) -> tuple[list[Path], list[str]]:
    """All that are not hidden, sorted, also in folders in it; and of those folders that are not read, why."""
    paths: list[Path] = []
    unread: list[str] = []

    def failed(error: OSError) -> None:
        unread.append(f"Cannot read {shown(str(error.filename))}: {error.strerror}.")

    for place, folders, names in os.walk(folder, onerror=failed):
        folders[:] = [name for name in folders if not name.startswith(".")]
        linked = [Path(place, name) for name in folders if Path(place, name).is_symlink()]
        unread += [f"{shown(str(path))} is a link to a folder: give it as --document, too." for path in linked]
        paths += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(paths), unread
