"""The text of a web page."""

import re
import warnings
from pathlib import PurePath

from ...console import UsageError
from ...files import plain_text

_SUFFIXES = {".html", ".htm", ".xhtml"}
_NOT_SHOWN = ["script", "style", "template", "noscript"]
_PARAGRAPHS = re.compile(
    "^(address|article|aside|blockquote|dl|fieldset|figure|footer|form|h[1-6]|header|hr|main|nav|ol|p|pre|section|table"
    "|title|ul)$"
)
_LINES = re.compile("^(br|caption|dd|details|div|dt|figcaption|legend|li|option|summary|tr)$")
# Code points that are no characters: an end of a line, an end of a paragraph, and a space and an end of a line of code.
_LINE, _PARAGRAPH, _CODE_SPACE, _CODE_LINE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"


def is_html(name: str, content: bytes) -> bool:
    """Whether a file has a suffix of HTML, or begins as HTML does."""
    start = content[:100].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return PurePath(name).suffix.lower() in _SUFFIXES or start.startswith((b"<!doctype html", b"<html"))


def html_text(name: str, content: bytes) -> str:
    """
    Extract the text that a browser would show.

    Args:
        name: for messages.
        content: the whole file.

    Raises:
        UsageError: the page is damaged, is not in the encoding that it names, or has no text.
        ImportError: Beautiful Soup is not installed.
    """
    from bs4 import BeautifulSoup
    from bs4.element import NavigableString
    from bs4.exceptions import ParserRejectedMarkup

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # says that XHTML is not HTML, or that a short text may be a name
        try:
            page = BeautifulSoup(_decoded(name, content), "html.parser")
        except ParserRejectedMarkup as error:
            raise UsageError(f"{name} is damaged HTML. Open it in a browser, and save what it shows.") from error
    for tag in page.find_all(_NOT_SHOWN):
        if not tag.decomposed:
            tag.decompose()
    for string in page.find_all(string=True):
        if type(string) is NavigableString:  # not a comment
            is_code = string.find_parent("pre") is not None
            shown = string.replace(" ", _CODE_SPACE).replace("\n", _CODE_LINE) if is_code else _one_spaced(string)
            string.replace_with(shown)
    for tag in page.find_all(["td", "th"]):
        tag.insert_before("\t")  # and not after it: where its end is left out, the next one is inside
    for tags, end in ((_PARAGRAPHS, _PARAGRAPH), (_LINES, _LINE)):
        for tag in page.find_all(tags):
            tag.insert_before(end)
            tag.append(end)
    text = re.sub(rf"[\s{_LINE}{_PARAGRAPH}{_CODE_LINE}]+", _gap, page.get_text()).strip()
    text = text.replace(_CODE_SPACE, " ").replace(_CODE_LINE, "\n")
    if not text.strip():
        raise UsageError(f"{name} is HTML without any text, as where a script fills a page. Save what a browser shows.")
    return text


def _decoded(name: str, content: bytes) -> str:
    """Decode a page with the encoding that it names, or else as UTF-8."""
    from bs4.dammit import EncodingDetector

    content, marked = EncodingDetector.strip_byte_order_mark(content)
    encoding = marked or EncodingDetector.find_declared_encoding(content, is_html=True) or "utf-8"
    if encoding.startswith("utf-16") and not marked:
        encoding = "utf-8"  # otherwise its name could not have been read
    if encoding in ("iso-8859-1", "latin-1", "us-ascii", "ascii"):
        encoding = "windows-1252"  # as browsers do
    try:
        return plain_text(name, content.decode(encoding).encode())
    except (LookupError, UnicodeError) as error:
        if encoding == "utf-8":
            return plain_text(name, content)  # which says what is wrong
        why = _one_spaced(f"says that it is in {encoding}, and is not: {error}")
        raise UsageError(f"{name} {why}. Save it in UTF-8.") from None


def _one_spaced(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def _gap(match: re.Match[str]) -> str:
    """The largest of the gaps that follow each other between two words."""
    if _PARAGRAPH in match[0]:
        return "\n\n"
    if _LINE in match[0]:
        return "\n"
    if _CODE_LINE in match[0]:
        return match[0]
    return "\t" if "\t" in match[0] else " "
