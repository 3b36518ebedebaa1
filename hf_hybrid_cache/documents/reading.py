"""Files, folders, pages of the web and standard input, in the order in which they are named."""

import os
import re
import select
import stat
import sys
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError

from .._version import __version__
from .formats import MOST_TEXT, DocumentError, text_of

_STANDARD_INPUT, _SHOWN_STANDARD_INPUT = "-", "standard input"
_MOST_BYTES = 256 * 2**20  # of a file: it is held in memory
_ADDRESS = re.compile(r"(\w[\w+.-]*)://|https?:/", re.IGNORECASE)
# A server that says nothing for so long has failed.
_SILENT_SECONDS = 30


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
        """The text of all documents."""
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


def require_documents(names: Sequence[str], folder: Path | None = None) -> None:
    """
    Check that documents are there and may be read, without reading them.

    Args:
        names: as in `read_documents`.
        folder: as in `read_documents`.

    Raises:
        DocumentError: a file or a folder is missing or protected, a name is of something else, such as a pipe, or
            standard input is closed.
    """
    for name in names:
        path = Path(folder or "", name)
        if not name.strip():
            raise DocumentError(f"{name!r} is not the name of a document: give that of a file or a folder.")
        if address := _ADDRESS.match(name):
            if not is_on_the_web(name):
                why = f"not of {address[1]}" if address[1] else f"and they begin with {address[0]}/"
                raise DocumentError(f"{name}: of addresses those of http and https are read, {why}.")
            continue
        if folder is None and name == _STANDARD_INPUT:
            if sys.stdin is None:
                raise DocumentError("Standard input is closed: let it come from a file or a pipe.")
        elif not os.path.exists(path):
            raise DocumentError(f"Cannot read {_printable(path)}: No such file or folder.")
        elif not os.access(path, os.R_OK):
            raise DocumentError(f"Cannot read {_printable(path)}: Permission denied.")
        elif not path.is_file() and not path.is_dir():
            way_out = "Give a file, or pass it on standard input, as the document -."
            raise DocumentError(f"{_printable(path)} is a device, a pipe or a socket, which may have no end. {way_out}")


def is_on_the_web(name: str) -> bool:
    """Whether the name of a document is an address that is fetched."""
    address = _ADDRESS.match(name)
    return address is not None and (address[1] or "").lower() in ("http", "https")


def piped_documents(remark: Callable[[str], None]) -> Documents | None:
    """
    Read what another program or a file gives on standard input.

    Args:
        remark: is told before it is waited for.

    Returns:
        `None` where standard input is a terminal, a device such as /dev/null, closed or empty.

    Raises:
        DocumentError: it cannot be read.
    """
    if _has_no_pipe():
        return None
    remark("the document is standard input, as no --document names another")
    content = read_bytes(None)
    return Documents((_document(_SHOWN_STANDARD_INPUT, content, 0, remark),), ()) if content.strip() else None


def require_nothing_piped() -> None:
    """
    Check that nothing has come on standard input, where it is not read; nothing is waited for.

    Raises:
        DocumentError: text has come.
    """
    if _has_no_pipe():
        return
    with suppress(OSError):  # it has no number
        if not select.select([sys.stdin], [], [], 0)[0]:
            return
    if sys.stdin.buffer.read(1):
        raise DocumentError(
            "What comes on standard input would not be read: name it as a document, --document -, or keep it away "
            "with < /dev/null."
        )


def _has_no_pipe() -> bool:
    """Return whether standard input is closed, a terminal, or a device such as /dev/null."""
    if sys.stdin is None:
        return True
    with suppress(OSError):  # it has no number
        return stat.S_ISCHR(os.fstat(sys.stdin.fileno()).st_mode)
    return False


def read_documents(names: Sequence[str], remark: Callable[[str], None], folder: Path | None = None) -> Documents:
    """
    Read files and folders; the files of a folder are sorted by their paths, and each file is read once.

    Args:
        names: files, folders and addresses (http, https), and `-` for standard input.
        remark: receives how many files of a folder were read, and which were skipped.
        folder: names are relative to it, and standard input is not read; `None` for the working directory.

    Raises:
        DocumentError: a file that is named cannot be read, or no document can; a file has more than 256 MiB, or all
            of them together 64 Mi characters of text; an address gives nothing.
    """
    require_documents(names, folder)
    documents: dict[str, Document] = {}  # by real path
    skipped: list[str] = []

    def skip(why: str) -> None:
        skipped.append(why)
        remark(f"left out: {why}")

    def read(place: str, name: str, content: Callable[[], bytes]) -> None:
        if place in documents:
            skip(f"{name} was read before.")
        else:
            before = sum(len(document.text) for document in documents.values())
            documents[place] = _document(name, content(), before, remark)

    def read_file(path: Path, name: str) -> None:
        read(os.path.realpath(path), name, partial(read_bytes, path))

    for name in names:
        path = Path(folder or "", name)
        if is_on_the_web(name):
            read(name, name, partial(_fetched, name))
        elif folder is None and name == _STANDARD_INPUT:
            read(name, _SHOWN_STANDARD_INPUT, partial(read_bytes, None))
        elif not path.is_dir():
            read_file(path, _printable(name))
        else:
            num_read, num_skipped = len(documents), len(skipped)
            for file in files_in(path):
                shown = _printable(Path(name, file.relative_to(path)))
                if os.path.isdir(file):
                    skip(f"{shown} is a linked or protected folder: give it as a document, too.")
                elif not os.path.isfile(file):
                    skip(f"{shown} is not a file, or a link to none.")
                else:
                    try:
                        read_file(file, shown)
                    except DocumentError as error:
                        skip(str(error))
            counts = f"{len(documents) - num_read:,}; left out: {len(skipped) - num_skipped:,}"
            remark(f"{_printable(name)}: documents read: {counts}")
    if not documents:
        why = f"the first because: {skipped[0]}" if skipped else "as there are none, except hidden ones."
        raise DocumentError(f"No file in {' and '.join(map(_printable, names))} can be read, {why}")
    return Documents(tuple(documents.values()), tuple(skipped))


def files_in(folder: Path) -> list[Path]:
    """All files below a folder, sorted, without hidden ones; and the folders that are links or cannot be read."""
    found: list[Path] = []

    def unreadable(error: OSError) -> None:
        found.append(Path(error.filename))

    for place, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names += [name for name in folders if os.path.islink(os.path.join(place, name))]
        found += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(found)


def read_bytes(path: Path | None) -> bytes:
    """
    Read a file, or standard input for `None`.

    Raises:
        DocumentError: it cannot be read, or has more than 256 MiB.
    """
    shown = _printable(path or _SHOWN_STANDARD_INPUT)
    try:
        with nullcontext(sys.stdin.buffer) if path is None else path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # no file can have a name with a null character
        why = getattr(error, "strerror", error)
        raise DocumentError(f"Cannot read {shown}: {why}.") from error
    return _small_enough(shown, content)


def _fetched(address: str) -> bytes:
    """Fetch a page or a file; text begins with a mark of UTF-8 where the server names another encoding."""
    try:
        request = urllib.request.Request(address, headers={"User-Agent": f"hf_hybrid_cache/{__version__}"})
        with urllib.request.urlopen(request, timeout=_SILENT_SECONDS) as answer:
            content, headers = answer.read(_MOST_BYTES + 1), answer.headers
    except HTTPError as error:
        error.close()
        raise DocumentError(f"Cannot read {address}: {error}.") from error
    except (OSError, HTTPException, ValueError) as error:
        raise DocumentError(f"Cannot read {address}: {getattr(error, 'reason', error)}.") from error
    content = _small_enough(address, content)
    charset = headers.get_content_charset("utf-8")
    if headers.get_content_maintype() == "text" and charset != "utf-8":
        with suppress(LookupError, UnicodeError):
            content = content.decode(charset).encode("utf-8-sig")
    if headers.get_content_type() == "text/html" and not content.startswith(b"\xff\xfe"):
        mark = b"\xef\xbb\xbf" * content.startswith(b"\xef\xbb\xbf")
        content = mark + b"<!doctype html>" + content.removeprefix(mark)
    return content


def _small_enough(shown: str, content: bytes) -> bytes:
    if len(content) > _MOST_BYTES:
        raise DocumentError(
            f"{shown} has more than {_MOST_BYTES // 2**20} MiB, which are read at most: give parts of it."
        )
    return content


def _document(name: str, content: bytes, before: int, remark: Callable[[str], None]) -> Document:
    """The document of some bytes; raises `DocumentError` if it has too much text after so many characters."""
    text = text_of(name, content, remark)
    if (total := before + len(text)) > MOST_TEXT:
        limit = f"at most {MOST_TEXT:,} characters are read: give a part of it, or fewer documents"
        raise DocumentError(f"With {name} there are {total:,} characters of text, and {limit}.")
    return Document(name, text)


def _printable(name: str | Path) -> str:
    """A name of a file in which bytes that are not UTF-8 became escapes."""
    return str(name).encode(errors="backslashreplace").decode()
