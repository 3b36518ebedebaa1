"""Reading documents: files, folders and standard input, in the order in which they are named."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..console import UsageError
from ..files import STANDARD_INPUT, read_bytes, shown
from .formats import text_of


@dataclass(frozen=True)
class Document:
    """The text of a file, and its name as it was given."""

    name: str
    text: str


@dataclass(frozen=True)
class Documents:
    """
    The documents that were read, at least one.

    Attributes:
        files: in the order of the prompt.
        skipped: a sentence for each file that was not read, which says why.
    """

    files: tuple[Document, ...]
    skipped: tuple[str, ...]

    @property
    def sections(self) -> list[str]:
        """The text of each document up to the next one; of several documents a line names each."""
        if len(self.files) == 1:
            return [self.files[0].text]
        return [f"Document: {document.name}\n\n{document.text.strip()}\n\n" for document in self.files]

    @property
    def text(self) -> str:
        return "".join(self.sections)

    @property
    def title(self) -> str:
        """The file name of the first document, and how many others there are."""
        first, others = Path(self.files[0].name).name, len(self.files) - 1
        return first if not others else f"{first} and {others:,} more"

    @property
    def counted(self) -> str:
        """The word for the documents, with their number if there are several."""
        return "document" if len(self.files) == 1 else f"{len(self.files):,} documents"


def read_documents(names: Sequence[str], remark: Callable[[str], None], folder: Path | None = None) -> Documents:
    """
    Read files and folders; the files of a folder are sorted by their paths.

    Args:
        names: files and folders, and `-` for standard input.
        remark: receives how many files of a folder were read, and which were skipped.
        folder: names are relative to it, and standard input is not read; `None` for the working directory.

    Raises:
        UsageError: a file cannot be read, or no file of a folder can.
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
    return Documents(tuple(collection.documents), tuple(collection.skipped))


class _Collection:
    """Reads each file once, and keeps the documents in order."""

    def __init__(self, remark: Callable[[str], None]):
        self.documents: list[Document] = []
        self.skipped: list[str] = []
        self._remark = remark
        self._places: set[str] = set()

    def add(self, path: Path, name: str) -> None:
        """
        Read a file that was not read before.

        Raises:
            UsageError: the file cannot be read.
        """
        place = os.path.realpath(path)
        if place in self._places:
            self._skip(f"{name} was read before.")
            return
        self.documents.append(Document(name, text_of(name, read_bytes(path), self._remark)))
        self._places.add(place)

    def add_folder(self, folder: Path, name: str) -> None:
        """
        Read the files of a folder, and skip those that cannot be read.

        Raises:
            UsageError: no file can be read.
        """
        num_read, num_skipped = len(self.documents), len(self.skipped)
        paths, unread = _files_in(folder)
        for path in paths:
            named = shown(str(Path(name) / path.relative_to(folder)))
            try:
                if not path.is_file():
                    raise UsageError(f"{named} is not a file, or a link to none.")
                self.add(path, named)
            except UsageError as error:
                self._skip(str(error))
        for why in unread:
            self._skip(why)
        skipped = self.skipped[num_skipped:]
        if not any(os.path.realpath(path) in self._places for path in paths):
            if not skipped:
                raise UsageError(f"The folder {shown(name)} has no files, except hidden ones.")
            raise UsageError(f"No file in {shown(name)} can be read, the first because: {skipped[0]}")
        self._remark(f"{shown(name)}: documents read: {len(self.documents) - num_read:,}; left out: {len(skipped):,}")

    def _skip(self, why: str) -> None:
        self.skipped.append(why)
        self._remark(f"left out: {why}")


def _files_in(folder: Path) -> tuple[list[Path], list[str]]:
    """All files below a folder, sorted, without hidden ones; and a sentence for each folder that cannot be read."""
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
