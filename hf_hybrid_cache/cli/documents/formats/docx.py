"""The text of a Word file."""

from io import BytesIO
from typing import Any
from zipfile import BadZipFile, ZipFile

from ...console import UsageError

_BODY = "word/document.xml"
# Tab stops, text that tracked changes deleted or moved, and copies of text boxes for old programs.
_SKIPPED = {"pPr", "del", "moveFrom", "Fallback"}
_CHARACTERS = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}


def is_docx(content: bytes) -> bool:
    """Whether a file is a zip with the text of a Word file in it."""
    if not content.startswith(b"PK\x03\x04"):
        return False
    try:
        return _BODY in ZipFile(BytesIO(content)).namelist()
    except (BadZipFile, NotImplementedError, OSError, ValueError):
        return _BODY.encode() in content  # damaged or cut off: the list of names is at the end


def docx_text(name: str, content: bytes) -> str:
    """
    Extract the text: a line for each paragraph or row of a table, then notes; no headers, footers or comments.

    Args:
        name: for messages.
        content: the whole file.

    Raises:
        UsageError: the file is damaged, or has no text.
        ImportError: python-docx is not installed.
    """
    from docx.opc.package import OpcPackage
    from docx.oxml import parse_xml

    try:
        body = OpcPackage.open(BytesIO(content)).main_document_part
        notes = [rel.target_part for rel in body.rels.values() if rel.reltype.endswith(("/footnotes", "/endnotes"))]
        # Its own `text` of a paragraph lacks tracked insertions, text boxes and fields that can be filled in.
        text = "\n".join(_text(parse_xml(part.blob)).strip("\n") for part in (body, *notes))
    except MemoryError:
        raise
    except Exception as error:  # libraries for zip and XML raise any kind of error for a damaged file
        raise UsageError(
            f"{name} is a damaged Word file ({' '.join(str(error).split()) or type(error).__name__}). Get it anew, or "
            "let a word processor repair and save it."
        ) from error
    if not text.strip():
        raise UsageError(f"{name} is a Word file without any text. Pass one with text.")
    return text.strip("\n")


def _text(element: Any) -> str:
    parts = []
    for child in element.iterchildren("*"):
        kind = child.tag.rpartition("}")[2]
        if kind in _SKIPPED:
            continue
        if kind == "t":
            parts.append(child.text or "")
        elif kind in _CHARACTERS:
            parts.append(_CHARACTERS[kind])
        elif kind == "p":
            parts.append(f"{_text(child)}\n")
        elif kind == "tc":
            parts.append(" ".join(_text(child).split()) + "\t")
        elif kind == "tr":
            parts.append(_text(child).removesuffix("\t") + "\n")
        else:
            parts.append(_text(child))
    return "".join(parts)
