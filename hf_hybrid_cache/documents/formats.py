"""The text of PDF, Word files, HTML and plain text."""

import re
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from ..errors import HybridCacheError
from .docx import docx_text, is_docx

MOST_TEXT = 64 * 2**20  # characters of all documents of a prompt, more than any context has
_MOST_HTML = 32 * 2**20  # bytes: each takes 40 of memory
_MARK = b"\xef\xbb\xbf"
_MARKS = {_MARK: "utf-8", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_NOT_IN_TEXT = re.compile("[\0-\b\x0e-\x1f\x7f\ufffd]")
_DECLARED = re.compile(rb"""<(?:meta|\?xml)[^>]*?(?:charset|encoding)\s*=\s*["']?\s*([\w.:-]+)""", re.IGNORECASE)
# What browsers do where a page cannot be in the encoding that it names, or names a part of another.
_MEANT = {"utf-16": "utf-8", "iso-8859-1": "cp1252", "latin-1": "cp1252", "us-ascii": "cp1252", "ascii": "cp1252"}
_SUFFIXES = {".html", ".htm", ".xhtml"}
_STYLE = "translate(@style, 'DISPLAYVBHEN \t\r\n', 'displayvbhen')"
_NOT_SHOWN = (
    ".//script | .//style | .//template | .//noscript | .//datalist | .//dialog[not(@open)] | .//svg//title"
    f" | .//*[@hidden or contains({_STYLE}, 'display:none') or contains({_STYLE}, 'visibility:hidden')]"
    " | .//input[@type='hidden' or @type='password']"
    # Of the entries of a list those that are chosen, or else the first one.
    " | .//select[.//option[@selected]]//option[not(@selected)]"
    " | .//select[not(@multiple or .//option[@selected])]//option[preceding-sibling::option]"
)
_LINES = ("caption", "dd", "details", "dl", "dt", "fieldset", "form", "hr", "legend", "section", "summary")
_SCANNED = ", as a scanner makes it. Add text to a copy by character recognition (ocrmypdf), and pass that"
_FILLED_BY_SCRIPT = ", as where a script fills a page. Save what a browser shows"
_CELL = "\ufdd0"  # the end of a cell: a code point that is no character


class DocumentError(HybridCacheError, ValueError):
    """A document that cannot be read; the message says why and the way out."""


def text_of(name: str, content: bytes, remark: Callable[[str], None]) -> str:
    """Extract the text that a reader of the document sees; remarks say what it lacks, and how it was guessed."""
    kind, package, advice, extract = next(entry[1:] for entry in _FORMATS if entry[0](name, content))
    try:
        text = extract(name, content, remark)
    except ImportError as error:
        way_out = 'pip install "hf_hybrid_cache[documents]"'
        raise DocumentError(f"{name} is {kind}, which {package} reads: {way_out}.") from error
    except (DocumentError, MemoryError):
        raise
    except Exception as error:  # libraries raise any kind of error for a damaged file
        why = " ".join(str(error).split()) or type(error).__name__
        way_out = "Get it anew, or let another program save it as a PDF."
        raise DocumentError(f"{name} is {kind} that is damaged ({why}). {way_out}") from error
    # A font or a page can contain code points that are no characters.
    text = text.encode(errors="replace").decode().replace("\0", "")
    if not text.strip():
        raise DocumentError(f"{name} is {kind} without any text{advice}.")
    return text


def is_pdf(content: bytes) -> bool:
    """Whether a file begins as a PDF does, perhaps after a byte order mark or empty lines."""
    return content[:100].lstrip(_MARK + b" \t\r\n").startswith(b"%PDF-")


def decoded(name: str, content: bytes, remark: Callable[[str], None] | None, encoding: str = "utf-8") -> str:
    """Decode text by its first bytes, or else as it says; with a remark, what has no control characters is cp1252."""
    encoding = next((marked for mark, marked in _MARKS.items() if content.startswith(mark)), encoding)
    try:
        text = content.decode(encoding)
    except (LookupError, UnicodeError) as error:
        if encoding != "utf-8":
            why = " ".join(f"says that it is in {encoding}, and is not: {error}".split())
            raise DocumentError(f"{name} {why}. Save it in UTF-8.") from None
        text, wrong = content.decode("cp1252", errors="replace"), getattr(error, "start", 0)
        if remark is None or _NOT_IN_TEXT.search(text):
            raise DocumentError(f"{name} is not UTF-8 text (byte {wrong:,} is {content[wrong]:#04x}).") from None
        remark(f"{name}: not UTF-8, so read as cp1252 (Western European): if letters are wrong, save it in UTF-8")
    if "\0" in text:
        raise DocumentError(f"{name} is a binary file, not text.")
    if not text.strip():
        raise DocumentError(f"{name} is empty.")
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _pdf_text(name: str, content: bytes, remark: Callable[[str], None]) -> str:
    """The text of all pages, with an empty line between them."""
    import pypdfium2
    from pypdfium2 import raw

    if b"%%EOF" not in content[-1024:]:
        raise ValueError("its end is missing")
    try:
        with pypdfium2.PdfDocument(content) as pdf:
            # Its own `init_forms` leaves out documents with notes and no form.
            settings = raw.FPDF_FORMFILLINFO(version=2)
            pdf.formenv = pypdfium2.PdfFormEnv(raw.FPDFDOC_InitFormFillEnvironment(pdf, settings), settings)
            is_xfa = pdf.get_formtype() in (raw.FORMTYPE_XFA_FULL, raw.FORMTYPE_XFA_FOREGROUND)
            pages: list[str] = []
            room = MOST_TEXT
            for number in range(len(pdf)):
                pages.append(_page_text(pdf, number))
                room -= len(pages[-1])
                if room < 0:
                    raise DocumentError(f"{name} has more than {MOST_TEXT:,} characters of text: give parts of it.")
    except pypdfium2.PdfiumError as error:
        if error.err_code != raw.FPDF_ERR_PASSWORD:
            raise
        copy = "qpdf --password=PASSWORD --decrypt FILE COPY"
        raise DocumentError(f"{name} is an encrypted PDF. Make a copy that is not ({copy}), and pass that.") from error
    if is_xfa and pages[0].startswith("Please wait"):
        raise DocumentError(f"{name} is a PDF that only Adobe's programs show (XFA). Print it to a new PDF there.")
    if "" in pages and any(pages):
        remark(f"{name}: {pages.count(''):,} of {len(pages):,} pages have no text, as where they were scanned")
    return "\n\n".join(filter(None, pages))


def _page_text(pdf: Any, number: int) -> str:
    """The lines of a page, each with what was typed into fields and written on the page nearest to it."""
    from pypdfium2 import raw

    page = pdf[number]
    printed = page.get_textpage()
    text = printed.get_text_range()
    lines = [line.strip() for line in text.split("\n")]
    for index in reversed(range(raw.FPDFPage_GetAnnotCount(page))):
        note = raw.FPDFPage_GetAnnot(page, index)
        size = raw.FPDFAnnot_GetAP(note, raw.FPDF_ANNOT_APPEARANCEMODE_NORMAL, None, 0)
        raw.FPDFPage_CloseAnnot(note)
        if size <= 2:  # the bytes of no drawing: flattening it would end the process
            raw.FPDFPage_RemoveAnnot(page, index)
    raw.FPDFPage_Flatten(page, raw.FLAT_NORMALDISPLAY)
    flat = pdf[number].get_textpage()
    for index in range(printed.count_rects(), flat.count_rects()):
        place = left, bottom, _, top = flat.get_rect(index)
        added = flat.get_text_bounded(*place).removeprefix(printed.get_text_bounded(*place)).strip()
        # Beside it, or else above or below.
        reaches = (top - bottom, 4 * (top - bottom))
        near = (printed.get_index(left, (bottom + top) / 2, 2 * page.get_width(), reach) for reach in reaches)
        found = next((place for place in near if place is not None), None)
        if found is None:
            lines.append(added)
        else:
            lines[text.count("\n", 0, found)] += f" {added}"
    return "\n".join(lines).replace("\ufffe", "-\n").replace("\r", " ").strip()  # U+FFFE: where a word is divided


def _is_html(name: str, content: bytes) -> bool:
    """Whether a file has a suffix of HTML, or begins as HTML does."""
    start = content[:100].lstrip(_MARK + b" \t\r\n").lower()
    return PurePath(name).suffix.lower() in _SUFFIXES or start.startswith((b"<!doctype html", b"<html"))


def _html_text(name: str, content: bytes, remark: Callable[[str], None]) -> str:
    """The text that a browser would show."""
    from inscriptis import Inscriptis
    from inscriptis.css_profiles import STRICT_CSS_PROFILE
    from inscriptis.model.config import ParserConfig
    from lxml import etree, html

    if len(content) > _MOST_HTML:
        limit = f"{len(content):,} bytes, and HTML of {_MOST_HTML:,} is read at most: save it as text, or in parts"
        raise DocumentError(f"{name} has {limit}.")
    declared = _DECLARED.search(content[:4096])
    encoding = declared[1].decode().lower() if declared else "utf-8"
    text = decoded(name, content, remark, _MEANT.get(encoding, encoding))
    parser = html.HTMLParser(encoding="utf-8", remove_comments=True, remove_pis=True, huge_tree=True)
    page = etree.fromstring(text.encode(), parser)
    if page is None:
        return ""
    for tag in page.xpath(_NOT_SHOWN):
        tag.drop_tree()
    for field in page.iter("input", "textarea", "option", "button"):
        value = field.get("value", "") if field.tag == "input" else field.text or ""
        if field.get("type") in ("checkbox", "radio"):
            value = "☐" if field.get("checked") is None else "☒"
        field.text, field.tail = f" {value}", f" {field.tail or ''}"
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
    for block in page.iter("table", "tr", *_LINES):  # columns would be made with spaces, and other lines not at all
        block.tag = "div"
    title = " ".join(page.findtext(".//title", "").split())
    text = Inscriptis(page, ParserConfig(css=STRICT_CSS_PROFILE)).get_text().strip("\n")
    return re.sub(rf" *{_CELL} *", "\t", f"{title}\n\n{text}").strip("\n")


# What tells a format, its name, the package that reads it, why one may have no text, and the function that reads it.
_FORMATS: tuple[tuple[Callable[[str, bytes], bool], str, str, str, Callable[..., str]], ...] = (
    (lambda _, content: is_pdf(content), "a PDF", "pypdfium2", _SCANNED, _pdf_text),
    (lambda _, content: is_docx(content), "a Word file", "", "", docx_text),
    (_is_html, "HTML", "inscriptis", _FILLED_BY_SCRIPT, _html_text),
    (lambda *_: True, "text", "", "", decoded),
)
