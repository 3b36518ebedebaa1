"""Formats of documents, each with a library that reads its text."""

from collections.abc import Callable

from ...console import UsageError
from ...files import is_pdf
from .docx import docx_text, is_docx
from .encodings import decoded
from .html import html_text, is_html
from .pdf import pdf_text

__all__ = ["text_of"]


# The name in messages, the package that reads it, whether a name and the bytes are one, and the text of it.
_FORMATS = (
    ("a PDF", "pypdfium2", lambda _, content: is_pdf(content), pdf_text),
    ("a Word file", "lxml", lambda _, content: is_docx(content), docx_text),
    ("HTML", "inscriptis", is_html, html_text),
)


def text_of(name: str, content: bytes, remark: Callable[[str], None]) -> str:
    """
    Extract the text of a document.

    Args:
        name: its file, for messages; the suffix tells HTML.
        content: the whole file.
        remark: receives what the text lacks, and how it was guessed.

    Raises:
        UsageError: the document has no text, is damaged or encrypted, or a package to read it is not installed.
    """
    for called, package, is_one, text_in in _FORMATS:
        if is_one(name, content):
            try:
                text = text_in(name, content, remark)
            except ImportError as error:
                raise UsageError(
                    f'{name} is {called}, which {package} reads: pip install "hf_hybrid_cache[documents]".'
                ) from error
            # A font or a page can contain code points that are no characters.
            return text.encode(errors="replace").decode().replace("\0", "")
    return decoded(name, content, remark)
