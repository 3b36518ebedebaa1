"""The text of a PDF, page by page."""

import ctypes
from collections.abc import Callable
from typing import Any

from ...console import UsageError

_END = b"%%EOF"


def pdf_text(name: str, content: bytes, remark: Callable[[str], None]) -> str:
    """
    Extract the text of all pages, with what was typed into forms and written on pages, and an empty line between them.

    Args:
        name: for messages.
        content: the whole file.
        remark: receives how many pages have no text.

    Raises:
        UsageError: the PDF has a password or no text, is damaged, or is a form that the PDF itself does not show.
        ImportError: pypdfium2 is not installed.
    """
    import pypdfium2
    from pypdfium2 import raw

    try:
        if _END not in content[-1024:]:
            raise pypdfium2.PdfiumError("its end is missing")
        with pypdfium2.PdfDocument(content) as pdf:
            kind = pdf.get_formtype()
            # Its own `init_forms` leaves out documents with notes and no form.
            settings = raw.FPDF_FORMFILLINFO(version=2)  # is used until the end
            fields = raw.FPDFDOC_InitFormFillEnvironment(pdf, settings)
            try:
                pages = [_page_text(pdf, fields, number) for number in range(len(pdf))]
            finally:
                raw.FPDFDOC_ExitFormFillEnvironment(fields)
        if kind == raw.FORMTYPE_XFA_FULL or (
            kind == raw.FORMTYPE_XFA_FOREGROUND and "".join(pages[:1]).startswith("Please wait")
        ):
            raise UsageError(
                f"{name} is a PDF whose form only Adobe's programs show (XFA). Print it to a new PDF there, and pass "
                "that."
            )
    except pypdfium2.PdfiumError as error:
        if error.err_code == raw.FPDF_ERR_PASSWORD:
            raise UsageError(
                f"{name} is an encrypted PDF. Make a copy that is not (qpdf --password=PASSWORD --decrypt FILE COPY), "
                "and pass that."
            ) from error
        raise UsageError(
            f"{name} is a damaged PDF ({error}). Get it anew, or let another program print it to a new PDF."
        ) from error
    filled = [page for page in pages if page]
    if not filled:
        raise UsageError(
            f"{name} is a PDF without any text (pages: {len(pages):,}), as a scanner makes it. Add text to a copy by "
            "character recognition (ocrmypdf), and pass that."
        )
    if len(filled) < len(pages):
        remark(f"{name}: {len(pages) - len(filled):,} of {len(pages):,} pages have no text, as where they were scanned")
    return "\n\n".join(filled)


def _page_text(pdf: Any, fields: Any, number: int) -> str:
    """The lines of a page, each with the fields and notes that are nearest to it."""
    from pypdfium2 import raw

    page = pdf[number]
    printed = page.get_textpage()
    text = printed.get_text_range()
    lines = [line.strip() for line in text.split("\n")]
    raw.FORM_OnAfterLoadPage(page, fields)  # draws the fields and notes that the file does not draw
    for index in range(raw.FPDFPage_GetAnnotCount(page)):
        note = raw.FPDFPage_GetAnnot(page, index)
        if not raw.FPDFAnnot_HasKey(note, b"AS"):
            # Without a state, flattening ends the process where the drawing of the first one is missing.
            raw.FPDFAnnot_SetStringValue(note, b"AS", (ctypes.c_ushort * 4)(*b"Off"))
        raw.FPDFPage_CloseAnnot(note)
    raw.FPDFPage_Flatten(page, raw.FLAT_NORMALDISPLAY)
    raw.FORM_OnBeforeClosePage(page, fields)
    flat = pdf[number].get_textpage()
    for index in range(printed.count_rects(), flat.count_rects()):
        place = left, bottom, _, top = flat.get_rect(index)
        added = flat.get_text_bounded(*place).removeprefix(printed.get_text_bounded(*place)).strip()
        tall, middle = top - bottom, (bottom + top) / 2
        # Beside it, or else above or below.
        near = (printed.get_index(left, middle, 2 * page.get_width(), within) for within in (tall, 4 * tall))
        line = next((text.count("\n", 0, index) for index in near if index is not None), None)
        if line is None:
            lines.append(added)
        else:
            lines[line] += f" {added}"
    return "\n".join(lines).replace("\ufffe", "-\n").replace("\r", " ").strip()  # U+FFFE: where a word is divided
