"""The text of a PDF, page by page."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO

from ..console import UsageError

# More of them take so long to read that it is said.
_MANY_PAGES = 100


def pdf_text(name: str, content: bytes, remark: Callable[[str], None]) -> str:
    """
    The text of all pages, an empty line between them.

    Args:
        name: for messages.
        content: the whole file.
        remark: is told of pages without text, and what pypdf says of the file.

    Raises:
        UsageError: it is encrypted or damaged, or has no text.
        ImportError: pypdf is not here.
    """
    from pypdf import PdfReader
    from pypdf.errors import DependencyError

    with _warnings_of("pypdf") as warnings:
        try:
            reader = PdfReader(BytesIO(content))
            # Many are encrypted without a password, so that anybody can read them.
            if reader.is_encrypted and not reader.decrypt(""):
                raise _encrypted(name)
            if len(reader.pages) > _MANY_PAGES:
                remark(f"{name}: reading {len(reader.pages):,} pages")
            pages = [page.extract_text().strip() for page in reader.pages]
        except (UsageError, MemoryError):
            raise
        except DependencyError as error:
            raise _encrypted(name) from error
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


def _encrypted(name: str) -> UsageError:
    return UsageError(
        f"{name} is an encrypted PDF. Make a copy that is not (qpdf --password=PASSWORD --decrypt FILE COPY), and pass "
        "that."
    )


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(" ".join(record.getMessage().split()))


@contextmanager
def _warnings_of(library: str) -> Iterator[list[str]]:
    """What a library logs meanwhile, which nobody else is told."""
    logger, kept = logging.getLogger(library), _Kept()
    before = logger.propagate
    logger.addHandler(kept)
    logger.propagate = False
    try:
        yield kept.messages
    finally:
        logger.propagate = before
        logger.removeHandler(kept)
