"""The text of PDF, Word files, HTML and plain text."""

import codecs
import re
from collections.abc import Callable
from email import message_from_bytes
from email.policy import default as default_policy
from html import escape
from pathlib import PurePath
from typing import Any

from ..errors import HybridCacheError
from .docx import docx_text, is_docx

MOST_TEXT = 64 * 2**20  # characters of all documents of a prompt, more than any context has
_MOST_HTML = 32 * 2**20  # bytes: each takes 40 of memory
_MARK = b"\xef\xbb\xbf"
_MARKS = {_MARK: "utf-8", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_NOT_IN_TEXT = re.compile("[\0-\b\x0e-\x1f\x7f\ufffd]")
# A comment, or the encoding that a page names.
_DECLARED = re.compile(
    rb"""<!--.*?(?:-->|\Z)|<(?:meta|\?xml)[^>]*?(?:charset|encoding)\s*=\s*["']?\s*([\w.:-]+)""",
    re.IGNORECASE | re.DOTALL,
)
# What browsers read where a page, which cannot be in UTF-16, names an encoding that is a part of another one.
_MEANT = {"ascii": "cp1252", "iso8859-1": "cp1252", "iso8859-9": "cp1254", "iso8859-11": "cp874", "tis-620": "cp874"}
_MEANT |= {"shift_jis": "cp932", "euc_kr": "cp949", "gb2312": "gb18030", "gbk": "gb18030", "big5": "big5hkscs"}
_MEANT |= {"utf-16": "utf-8", "utf-16-le": "utf-8", "utf-16-be": "utf-8"}
_HEADERS = re.compile(rb"(?:[!-9;-~]+:[^\n]*\n(?:[ \t][^\n]*\n)*)*?MIME-Version:", re.IGNORECASE)  # of a mail
_JAPANESE = re.compile(rb"\x1b\$[@B]")  # the escapes of ISO-2022-JP
# Text that an XHTML page shows, beside scripts and comments, in which it would be none.
_CDATA = re.compile(
    r"<(script|style)\b.*?(?:</\1|\Z)|<!--.*?(?:-->|\Z)|<!\[CDATA\[(.*?)(?:\]\]>|\Z)", re.IGNORECASE | re.DOTALL
)
# Suffixes of formats that are told by their content.
_OTHERWISE = {".pdf": "a PDF", ".docx": "a Word file"}
_SUFFIXES = {".html", ".htm", ".xhtml"}
_STYLE = "translate(@style, 'DISPLAYVBHEN \t\r\n', 'displayvbhen')"
_NOT_SHOWN = (
    ".//script | .//style | .//template[not(@shadowrootmode)] | .//noscript | .//datalist | .//dialog[not(@open)]"
    " | .//svg//title"
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
    if (suffix := PurePath(name).suffix.lower()) in _OTHERWISE and kind != _OTHERWISE[suffix]:
        remark(f"{name}: not {_OTHERWISE[suffix]}, in spite of its name, so read as {kind}")
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


def decoded(name: str, content: bytes, remark: Callable[[str], None], encoding: str = "utf-8") -> str:
    """Decode text by its first bytes, or else as it says, or else as cp1252 if it has no control characters."""
    if encoding == "utf-8" and _JAPANESE.search(content):
        encoding = "iso2022_jp"
    encoding = _marked(content) or encoding
    try:
        text = content.decode(encoding)
    except LookupError:
        raise DocumentError(
            f"{name} says that it is in {encoding}, which Python does not know. Save it in UTF-8."
        ) from None
    except UnicodeError as error:
        if encoding != "utf-8":
            why = " ".join(f"says that it is in {encoding}, and is not: {error}".split())
            raise DocumentError(f"{name} {why}. Save it in UTF-8.") from None
        text, wrong = content.decode("cp1252", errors="replace"), getattr(error, "start", 0)
        if _NOT_IN_TEXT.search(text):
            raise DocumentError(f"{name} is not UTF-8 text (byte {wrong:,} is {content[wrong]:#04x}).") from None
        remark(f"{name}: not UTF-8, so read as cp1252 (Western European): if letters are wrong, save it in UTF-8")
    if "\0" in text:
        raise DocumentError(f"{name} is a binary file, not text.")
    if not text.strip():
        raise DocumentError(f"{name} is empty.")
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _marked(content: bytes) -> str | None:
    """The encoding that the first bytes of a text tell."""
    return next((encoding for mark, encoding in _MARKS.items() if content.startswith(mark)), None)


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
            while len(pages) < len(pdf) and room >= 0:  # what has more is refused
                pages.append(_page_text(pdf, len(pages)))
                room -= len(pages[-1])
            attached = pdf.count_attachments()
    except pypdfium2.PdfiumError as error:
        if error.err_code != raw.FPDF_ERR_PASSWORD:
            raise
        copy = "qpdf --password=PASSWORD --decrypt FILE COPY"
        raise DocumentError(f"{name} is an encrypted PDF. Make a copy that is not ({copy}), and pass that.") from error
    if is_xfa and pages[0].startswith("Please wait"):
        raise DocumentError(f"{name} is a PDF that only Adobe's programs show (XFA). Print it to a new PDF there.")
    if "" in pages and any(pages):
        remark(f"{name}: {pages.count(''):,} of {len(pages):,} pages have no text, as where they were scanned")
    if attached:
        remark(f"{name}: left out of it: files inside it, {attached:,}. Save them, and give them as documents, too")
    return "\n\n".join(filter(None, pages))


def _page_text(pdf: Any, number: int) -> str:
    """The lines of a page, each with what was typed into fields and written on the page nearest to it."""
    from pypdfium2 import raw

    page = pdf[number]
    printed = page.get_textpage()
    text = printed.get_text_range()
    lines = [line.strip() for line in text.split("\n")]
    written: list[tuple[tuple[float, float, float, float], str]] = []
    for index in reversed(range(raw.FPDFPage_GetAnnotCount(page))):
        note = raw.FPDFPage_GetAnnot(page, index)
        size = raw.FPDFAnnot_GetAP(note, raw.FPDF_ANNOT_APPEARANCEMODE_NORMAL, None, 0)
        written += _written_text(note)
        raw.FPDFPage_CloseAnnot(note)
        if size <= 2:  # the bytes of no drawing: flattening it would end the process
            raw.FPDFPage_RemoveAnnot(page, index)
    raw.FPDFPage_Flatten(page, raw.FLAT_NORMALDISPLAY)
    flat = pdf[number].get_textpage()
    notes = [
        (place, flat.get_text_bounded(*place).removeprefix(printed.get_text_bounded(*place)).strip())
        for place in map(flat.get_rect, range(printed.count_rects(), flat.count_rects()))
    ]
    notes += [(place, text) for place, text in reversed(written) if not _has(flat.get_text_bounded(*place), text)]
    for (left, bottom, _, top), added in notes:
        # Beside it, or else above or below.
        reaches = (top - bottom, 4 * (top - bottom))
        near = (printed.get_index(left, (bottom + top) / 2, 2 * page.get_width(), reach) for reach in reaches)
        found = next((place for place in near if place is not None), None)
        if found is None:
            lines.append(added)
        else:
            lines[text.count("\n", 0, found)] += f" {added}"
    return "\n".join(lines).replace("\ufffe", "-\n").replace("\r", " ").strip()  # U+FFFE: where a word is divided


def _has(shown: str, text: str) -> bool:
    """Whether a text has all of another, but for how lines are broken."""
    return "".join(text.split()) in "".join(shown.split())


def _written_text(note: Any) -> list[tuple[tuple[float, float, float, float], str]]:
    """The text of a note that is written on the page, with its place; what was drawn of it may lack the text."""
    from pypdfium2 import raw

    hidden = raw.FPDF_ANNOT_FLAG_HIDDEN | raw.FPDF_ANNOT_FLAG_NOVIEW
    if raw.FPDFAnnot_GetSubtype(note) != raw.FPDF_ANNOT_FREETEXT or raw.FPDFAnnot_GetFlags(note) & hidden:
        return []
    rect, size = raw.FS_RECTF(), raw.FPDFAnnot_GetStringValue(note, b"Contents", None, 0)
    raw.FPDFAnnot_GetRect(note, rect)
    characters = (raw.FPDF_WCHAR * (size // 2))()
    raw.FPDFAnnot_GetStringValue(note, b"Contents", characters, size)
    text = bytes(characters).decode("utf-16-le", errors="replace").rstrip("\0")
    return [((rect.left, rect.bottom, rect.right, rect.top), " ".join(text.split()))]


def _is_html(name: str, content: bytes) -> bool:
    """Whether a file has a suffix of HTML, or begins as HTML does, perhaps after the line of XML."""
    start = content[:200].decode(_marked(content) or "utf-8", errors="ignore").lstrip("\ufeff \t\r\n").lower()
    if start.startswith("<?xml"):
        start = start.partition("?>")[2].lstrip()
    return PurePath(name).suffix.lower() in _SUFFIXES or start.startswith(("<!doctype html", "<html"))


def _refuse_rtf(name: str, content: bytes, remark: Callable[[str], None]) -> str:
    raise DocumentError(
        f"{name} is RTF, which is not read. Save it as a PDF, or as a Word file (.docx), and pass that."
    )


def _mail_text(name: str, content: bytes, remark: Callable[[str], None]) -> str:
    """The text of a mail, or of a page that a browser saved as one, after who wrote it, to whom and when."""
    mail = message_from_bytes(content, policy=default_policy)
    lines = [f"{header}: {mail[header]}" for header in ("From", "To", "Cc", "Date", "Subject") if mail[header]]
    if attached := sum(1 for _ in mail.iter_attachments()):
        remark(f"{name}: left out of it: files inside it, {attached:,}. Save them, and give them as documents, too")
    if (body := mail.get_body(("plain", "html"))) is not None:
        text = body.get_payload(decode=True)
        assert isinstance(text, bytes)
        if body.get_content_subtype() == "html":
            lines += ["", _html_text(name, text, remark, body.get_content_charset("utf-8"))]
        else:
            lines += ["", decoded(name, text, remark, _known(body.get_content_charset("utf-8")))]
    return "\n".join(lines)


def _html_text(name: str, content: bytes, remark: Callable[[str], None], encoding: str = "utf-8") -> str:
    """The text that a browser would show of a page, in the encoding that it names, or else in this one."""
    from inscriptis import Inscriptis
    from inscriptis.css_profiles import STRICT_CSS_PROFILE
    from inscriptis.model.config import ParserConfig
    from lxml import etree, html

    if len(content) > _MOST_HTML:
        limit = f"{len(content):,} bytes, and HTML of {_MOST_HTML:,} is read at most: save it as text, or in parts"
        raise DocumentError(f"{name} has {limit}.")
    declared = next(filter(None, (found[1] for found in _DECLARED.finditer(content[:4096]))), encoding.encode())
    text = decoded(name, content, remark, _known(declared.decode()))
    text = _CDATA.sub(lambda found: found[0] if found[2] is None else escape(found[2]), text)
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
    text = re.sub(rf" *{_CELL} *", "\t", f"{title}\n\n{text}").strip("\n")
    return text.replace("\xad", "")  # where a word may be divided


def _known(encoding: str) -> str:
    """The encoding that is read for one of that name, which may be that of a browser."""
    name = re.sub("^x-|-[ei]$", "", encoding.lower()).replace("windows-31j", "cp932").replace("windows-", "cp")
    try:
        return _MEANT.get(codecs.lookup(name).name, name)
    except LookupError:
        return encoding


# What tells a format, its name, the package that reads it, why one may have no text, and the function that reads it.
_FORMATS: tuple[tuple[Callable[[str, bytes], bool], str, str, str, Callable[..., str]], ...] = (
    (lambda _, content: is_pdf(content), "a PDF", "pypdfium2", _SCANNED, _pdf_text),
    (lambda _, content: is_docx(content), "a Word file", "", "", docx_text),
    (lambda _, content: content.startswith(b"{\\rtf"), "RTF", "", "", _refuse_rtf),
    (lambda _, content: _HEADERS.match(content[: 2**14]) is not None, "a mail", "", "", _mail_text),
    (_is_html, "HTML", "inscriptis", _FILLED_BY_SCRIPT, _html_text),
    (lambda *_: True, "text", "", "", decoded),
)
