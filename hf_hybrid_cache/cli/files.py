"""Reading files: their bytes, or their text."""

import sys
from pathlib import Path

from .console import UsageError
from .console import json_line as json_line
from .console import strict_json as strict_json

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
STANDARD_INPUT = STANDARD_OUTPUT = "-"


def shown(name: str) -> str:
    """A name of a file that can be printed: bytes that are not UTF-8 become escapes."""
    return name.encode(errors="backslashreplace").decode()


def require_standard_input() -> None:
    """
    Check that standard input can be read.

    Raises:
        UsageError: it is closed.
    """
    if sys.stdin is None:
        raise UsageError("Standard input is closed: let it come from a terminal, a file or a pipe.")


def read_bytes(path: Path) -> bytes:
    """
    Read a file, or standard input for `-`.

    Raises:
        UsageError: the file cannot be read.
    """
    is_input = str(path) == STANDARD_INPUT
    if is_input:
        require_standard_input()
    try:
        return sys.stdin.buffer.read() if is_input else path.read_bytes()
    except OSError as error:
        raise UsageError(f"Cannot read {shown(str(path))}: {error.strerror}.") from error
    except ValueError as error:
        raise UsageError(f"{str(path)!r} is not the name of a file: {error}.") from error


def plain_text(name: str, content: bytes) -> str:
    """
    Decode UTF-8 text without its byte order mark, and let a newline end each line.

    Args:
        name: of the file, for messages.
        content: the whole file.

    Raises:
        UsageError: the content is binary, is not UTF-8, or is empty.
    """
    try:
        text = content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text (byte {error.start:,} is {content[error.start]:#04x}).") from None
    if "\0" in text:
        raise UsageError(f"{name} is a binary file, not text.")
    if not text.strip():
        raise UsageError(f"{name} is empty.")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def is_pdf(content: bytes) -> bool:
    """Whether a file begins as a PDF does, perhaps after a byte order mark or empty lines."""
    return content[:100].lstrip(BYTE_ORDER_MARK + b" \t\r\n").startswith(b"%PDF-")


def read_text(path: Path) -> str:
    """
    Read a file of UTF-8 text.

    Raises:
        UsageError: the file cannot be read, is a PDF, or is not UTF-8 text.
    """
    content = read_bytes(path)
    if is_pdf(content):
        raise UsageError(f"{path} is a PDF, not text: pass it as --document, or a file of its text.")
    return plain_text(str(path), content)
