"""Files that are read: their bytes, and those that are text as they are."""

import sys
from pathlib import Path

from .console import UsageError

STANDARD_INPUT = "-"


def shown(name: str) -> str:
    """A name that can be written: what is no character in it as a number."""
    return name.encode(errors="backslashreplace").decode()


def read_bytes(path: Path) -> bytes:
    """
    All of a file, or of standard input for `-`.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return sys.stdin.buffer.read() if str(path) == STANDARD_INPUT else path.read_bytes()
    except OSError as error:
        raise UsageError(f"Cannot read {shown(str(path))}: {error.strerror}.") from error
    except ValueError as error:
        raise UsageError(f"{str(path)!r} is not the name of a file: {error}.") from error


def plain_text(name: str, content: bytes) -> str:
    """
    Text as it is, each end of a line a newline.

    Raises:
        UsageError: it is not UTF-8 text, or a binary file, or there is nothing in it.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text (byte {error.start:,} is {content[error.start]:#04x}).") from None
    if "\0" in text:
        raise UsageError(f"{name} is a binary file, not text.")
    if not text.strip():
        raise UsageError(f"{name} is empty.")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def is_pdf(content: bytes) -> bool:
    """Whether it begins as a PDF does, some of which have a byte order mark or an empty line before."""
    return content[:100].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"%PDF-")


def read_text(path: Path) -> str:
    """
    A file of text, which is used as it is.

    Raises:
        UsageError: it is a PDF, or none of UTF-8 text.
    """
    content = read_bytes(path)
    if is_pdf(content):
        raise UsageError(f"{path} is a PDF, not text: pass it as --document, or a file of its text.")
    return plain_text(str(path), content)
