"""The text of a PDF, page by page."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO

from ...console import UsageError

# A remark announces a PDF with more pages, which takes seconds to read.
_MANY_PAGES = 100


def pdf_text(name: str, content: bytes, remark: Callable[[str], None]) -> str:
    """
    Extract the text of all pages, with an empty line between them.

    Args:
        name: for messages.
        content: the whole file.
        remark: receives how many pages have no text, and what pypdf warns of.

    Raises:
        UsageError: the PDF has a password or no text, is damaged, or is encrypted with AES without the package for it.
        ImportError: pypdf is not installed.
    """
    from pypdf import PdfReader
    from pypdf.errors import DependencyError

    with _warnings_of("pypdf") as warnings:
        try:
            reader = PdfReader(BytesIO(content))
            # Many PDFs are encrypted with an empty password, so that anybody can read them.
            if reader.is_encrypted and not reader.decrypt(""):
                raise _needs_password(name)
            if len(reader.pages) > _MANY_PAGES:
                remark(f"{name}: reading {len(reader.pages):,} pages")
            pages = [page.extract_text().strip() for page in reader.pages]
        except (UsageError, MemoryError):
            raise
        except DependencyError as error:
            raise _needs_package(name, error) from error
        except Exception as error:  # pypdf raises any kind of error for a damaged file
            raise UsageError(
                f"{name} is a damaged PDF ({' '.join(str(error).split()) or type(error).__name__}). Get it anew, or "
                "let another program print it to a new PDF."
            ) from error
    filled = [page for page in pages if page]
    if not filled:
        raise UsageError(
            f"{name} is a PDF without any text (pages: {len(pages):,}), as a scanner makes it. Add text to a copy by "
            "character recognition (ocrmypdf), and pass that."
        )
    if len(filled) < len(pages):
        remark(f"{name}: {len(pages) - len(filled):,} of {len(pages):,} pages have no text, as where they were scanned")
    if warnings:
        more = f" (and {len(warnings) - 1:,} more)" if len(warnings) > 1 else ""
        remark(f"{name}: text may be missing or wrong; pypdf says: {warnings[0]}{more}")
    return "\n\n".join(filled)


def _needs_package(name: str, error: Exception) -> UsageError:
    """The error for a PDF that pypdf reads only with another package: cryptography for AES."""
    if "AES" not in str(error):
        return UsageError(f"{name} is a PDF that pypdf cannot read: {' '.join(str(error).split())}.")
    return UsageError(
        f"{name} is a PDF that is encrypted with AES, which pypdf decrypts with the package cryptography: pip install "
        '"hf_hybrid_cache[encrypted]". It must have no password.'
    )


def _needs_password(name: str) -> UsageError:
    """The error for a PDF that its password protects."""
    return UsageError(
        f"{name} is an encrypted PDF. Make a copy that is not (qpdf --password=PASSWORD --decrypt FILE COPY), and pass "
        "that."
    )


class _MessageList(logging.Handler):
    """Keeps the messages that a library logs."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(" ".join(record.getMessage().split()))


@contextmanager
def _warnings_of(library: str) -> Iterator[list[str]]:
    """Collect what a library logs meanwhile, instead of printing it."""
    logger, handler = logging.getLogger(library), _MessageList()
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield handler.messages
    finally:
        logger.propagate = before
        logger.removeHandler(handler)
