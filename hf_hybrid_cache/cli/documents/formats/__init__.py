"""Formats of documents, each with a library that reads its text."""

from collections.abc import Callable
from dataclasses import dataclass

from ...console import UsageError
from ...files import is_pdf, plain_text
from .docx import docx_text, is_docx
from .html import html_text, is_html
from .pdf import pdf_text

__all__ = ["text_of"]


@dataclass(frozen=True)
class _Format:
    """
    One format, and how its files are recognized and read.

    Attributes:
        called: its name in messages.
        package: the library that reads it.
        is_one: tells from a name and the bytes whether a file has this format.
        text: extracts the text, from a name and the bytes; the third argument receives remarks.
    """

    called: str
    package: str
    is_one: Callable[[str, bytes], bool]
    text: Callable[[str, bytes, Callable[[str], None]], str]


_FORMATS = (
    _Format("a PDF", "pypdf", lambda _, content: is_pdf(content), pdf_text),
    _Format(
        "a Word file",
        "python-docx",
        lambda _, content: is_docx(content),
        lambda name, content, _: docx_text(name, content),
    ),
    _Format("HTML", "beautifulsoup4", is_html, lambda name, content, _: html_text(name, content)),
)


def text_of(name: str, content: bytes, remark: Callable[[str], None]) -> str:
    """
    Extract the text of a document.

    Args:
        name: its file, for messages; the suffix tells HTML.
        content: the whole file.
        remark: receives what the text lacks.

    Raises:
        UsageError: the document has no text, is damaged or encrypted, or a package to read it is not installed.
    """
    for kind in _FORMATS:
        if kind.is_one(name, content):
            try:
                text = kind.text(name, content, remark)
            except ImportError as error:
                raise UsageError(
                    f'{name} is {kind.called}, which {kind.package} reads: pip install "hf_hybrid_cache[documents]".'
                ) from error
            # A font or a page can contain code points that are no characters.
            return text.encode(errors="replace").decode().replace("\0", "")
    return plain_text(name, content).removeprefix("\ufeff")
