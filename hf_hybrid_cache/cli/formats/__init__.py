"""Formats of documents, each with a library that reads its text."""

from collections.abc import Callable
from dataclasses import dataclass

from ..console import UsageError
from ..files import is_pdf, plain_text
from .docx import docx_text, is_docx
from .html import html_text, is_html
from .pdf import pdf_text

__all__ = ["text_of"]


@dataclass(frozen=True)
class _Format:
    """
    What files of a kind are called, how they are known, and how they are read.

    Attributes:
        called: in messages.
        package: reads them.
        is_one: says so of a name and the bytes.
        text: of a name and the bytes; remarks go to the third argument.
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
    The text of a document.

    Args:
        name: of its file, for messages; its suffix tells HTML.
        content: the whole file.
        remark: is told what is missing of the text.

    Raises:
        UsageError: there is no text in it, it is damaged or encrypted, or the package that reads it is not here.
    """
    for kind in _FORMATS:
        if kind.is_one(name, content):
            try:
                text = kind.text(name, content, remark)
            except ImportError as error:
                raise UsageError(
                    f'{name} is {kind.called}, which {kind.package} reads: pip install "hf_hybrid_cache[documents]".'
                ) from error
            # What a font or a page calls a character need not be one.
            return text.encode(errors="replace").decode().replace("\0", "")
    return plain_text(name, content).removeprefix("\ufeff")
