"""The text of a web page."""

import re
from collections.abc import Callable
from pathlib import PurePath

from ...console import UsageError
from .encodings import decoded

_SUFFIXES = {".html", ".htm", ".xhtml"}
_DECLARED = re.compile(rb"""<(?:meta|\?xml)[^>]*?(?:charset|encoding)\s*=\s*["']?\s*([\w.:-]+)""", re.IGNORECASE)
# What browsers do where a page cannot be in the encoding that it names, or names a part of another.
_MEANT = {"utf-16": "utf-8", "iso-8859-1": "cp1252", "latin-1": "cp1252", "us-ascii": "cp1252", "ascii": "cp1252"}
_STYLE = "translate(@style, 'DISPLAYVBHEN \t\r\n', 'displayvbhen')"
_NOT_SHOWN = (
    ".//script | .//style | .//template | .//noscript | .//datalist | .//dialog[not(@open)] | .//svg//title"
    f" | .//*[@hidden or contains({_STYLE}, 'display:none') or contains({_STYLE}, 'visibility:hidden')]"
    " | .//input[@type='hidden' or @type='password']"
)
_PARAGRAPHS = ("dl", "fieldset", "form", "hr", "section", "table", "title")
_LINES = ("caption", "dd", "details", "dt", "legend", "summary", "tr")
_CELL = "\ufdd0"  # the end of a cell: a code point that is no character


def is_html(name: str, content: bytes) -> bool:
    """Whether a file has a suffix of HTML, or begins as HTML does."""
    start = content[:100].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return PurePath(name).suffix.lower() in _SUFFIXES or start.startswith((b"<!doctype html", b"<html"))


def html_text(name: str, content: bytes, remark: Callable[[str], None]) -> str:
    """
    Extract the text that a browser would show, with the values of fields.

    Args:
        name: for messages.
        content: the whole file.
        remark: receives that the style sheet of the page hides parts of it, which are read all the same.

    Raises:
        UsageError: the page is not in the encoding that it names, is nested too deeply, or has no text.
        ImportError: inscriptis is not installed.
    """
    from inscriptis import Inscriptis
    from inscriptis.css_profiles import STRICT_CSS_PROFILE
    from inscriptis.html_properties import Display
    from inscriptis.model.config import ParserConfig
    from inscriptis.model.html_element import HtmlElement
    from lxml import etree, html

    named = _DECLARED.search(content[:4096])
    encoding = named[1].decode().lower() if named else "utf-8"
    parser = html.HTMLParser(encoding="utf-8", remove_comments=True, remove_pis=True, huge_tree=True)
    page = etree.fromstring(decoded(name, content, remark, _MEANT.get(encoding, encoding)).encode(), parser)
    if page is None:
        page = html.Element("html")
    if any(re.search(r"display\s*:\s*none", style.text or "") for style in page.iter("style")):
        remark(f"{name}: its style sheet hides parts of it, which were read all the same")
    for tag in page.xpath(_NOT_SHOWN):
        tag.drop_tree()
    for select in page.iter("select"):
        options = list(select.iter("option"))
        first = options[:1] if "multiple" not in select.attrib else []
        chosen = [option for option in options if "selected" in option.attrib] or first
        for option in set(options).difference(chosen):
            option.drop_tree()
    for field in page.iter("input", "textarea", "option", "button"):
        value = field.get("value") or ""
        if field.get("type") in ("checkbox", "radio"):
            value = "☐" if field.get("checked") is None else "☒"
        field.text = f" {value if field.tag == 'input' else field.text or ''}"
        field.tail = f" {field.tail or ''}"
    for item in page.xpath(".//ol[@start]/li[1][not(@value)]"):
        item.set("value", item.getparent().get("start"))
    for code in page.iter("pre"):
        for end in code.iter("br"):
            end.text = "\n"
        etree.strip_tags(code, "*")  # whose spaces and lines would be lost
    for cell in page.iter("td", "th"):
        cell.tag = "span"
        if cell.getnext() is not None:
            cell.tail = _CELL + (cell.tail or "")
    for kind, tags in (("section", _PARAGRAPHS), ("div", _LINES)):
        for tag in page.iter(*tags):
            tag.tag = kind
    # Not after it, too: the lines in it would take that as theirs.
    section = HtmlElement(tag="section", display=Display.block, margin_before=1)
    shown = {**STRICT_CSS_PROFILE, "head": HtmlElement(tag="head"), "section": section}
    try:
        text = Inscriptis(page, ParserConfig(css=shown)).get_text()
    except RecursionError:
        raise UsageError(f"{name} is HTML that is nested too deeply. Save what a browser shows as text.") from None
    text = re.sub(rf" *{_CELL} *", "\t", text).strip("\n")
    if not text.strip():
        raise UsageError(f"{name} is HTML without any text, as where a script fills a page. Save what a browser shows.")
    return text
