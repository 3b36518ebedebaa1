"""The text of a Word file."""

import posixpath
import re
from collections import defaultdict
from collections.abc import Callable
from io import BytesIO
from typing import Any
from zipfile import BadZipFile, ZipFile

from ...console import UsageError
from .html import html_text, is_html

_BODY, _LINKS = "word/document.xml", "word/_rels/document.xml.rels"
# Tab stops, text that tracked changes deleted or moved, and copies of text boxes for old programs.
_SKIPPED = {"pPr", "del", "moveFrom", "Fallback"}
_CHARACTERS = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}
# Where a paragraph, a run and a style name the style that they take properties from.
_STYLES = ("pPr/pStyle", "rPr/rStyle", "basedOn")
_MOST_STYLES = 20  # styles can be based on each other in a circle
_OFF = ("0", "false", "off")
_ROMAN = {"m": 1000, "cm": 900, "d": 500, "cd": 400, "c": 100, "xc": 90, "l": 50, "xl": 40, "x": 10}
_ROMAN |= {"ix": 9, "v": 5, "iv": 4, "i": 1}


def is_docx(content: bytes) -> bool:
    """Whether a file is a zip with the text of a Word file in it."""
    if not content.startswith(b"PK\x03\x04"):
        return False
    try:
        return _BODY in ZipFile(BytesIO(content)).namelist()
    except (BadZipFile, NotImplementedError, OSError, ValueError):
        return _BODY.encode() in content  # damaged or cut off: the list of names is at the end


def docx_text(name: str, content: bytes, remark: Callable[[str], None]) -> str:
    """
    Extract the text: a line for each paragraph or row of a table, then notes; no headers, footers or comments.

    Args:
        name: for messages.
        content: the whole file.
        remark: receives which documents inside it are left out.

    Raises:
        UsageError: the file is damaged, or has no text.
        ImportError: lxml is not installed.
    """
    try:
        text = _Word(name, content, remark).whole_text()
    except (ImportError, MemoryError, UsageError):
        raise
    except Exception as error:  # libraries for zip and XML raise any kind of error for a damaged file
        raise UsageError(
            f"{name} is a damaged Word file ({' '.join(str(error).split()) or type(error).__name__}). Get it anew, or "
            "let a word processor repair and save it."
        ) from error
    if not text.strip():
        raise UsageError(f"{name} is a Word file without any text. Pass one with text.")
    return text.strip("\n")


class _Word:
    """The parts of a Word file, and how far its lists have counted."""

    def __init__(self, name: str, content: bytes, remark: Callable[[str], None]):
        self._name, self._remark = name, remark
        self._zip = ZipFile(BytesIO(content))
        links = self._part(_LINKS) if _LINKS in self._zip.namelist() else ()
        self._targets = {link.get("Id"): posixpath.join("/word", link.get("Target"))[1:] for link in links}
        self._parts = {link.get("Type").rpartition("/")[2]: self._targets[link.get("Id")] for link in links}
        self._styles = self._by_id("styles", "style", "styleId")
        self._lists = self._by_id("numbering", "num", "numId")
        self._kinds = self._by_id("numbering", "abstractNum", "abstractNumId")
        self._levels: dict[str, tuple[str, dict[int, Any], dict[int, int]]] = {}
        self._counts: dict[str, dict[int, int]] = defaultdict(dict)

    def whole_text(self) -> str:
        notes = [self._parts[kind] for kind in ("footnotes", "endnotes") if kind in self._parts]
        return "\n".join(self._text(self._part(place)).strip("\n") for place in (_BODY, *notes))

    def _part(self, place: str) -> Any:
        """An XML file in it, without namespaces: those of strict files are others."""
        from lxml import etree

        parser = etree.XMLParser(resolve_entities=False, remove_comments=True, remove_pis=True, huge_tree=True)
        root = etree.fromstring(self._zip.read(place), parser)
        for element in root.iter("*"):
            element.tag = element.tag.rpartition("}")[2]
            for key, value in element.items():
                element.set(key.rpartition("}")[2], value)
        return root

    def _by_id(self, part: str, tag: str, key: str) -> dict[str, Any]:
        found = self._part(self._parts[part]).findall(tag) if part in self._parts else ()
        return {element.get(key): element for element in found}

    def _text(self, element: Any) -> str:
        parts = []
        for child in element.iterchildren("*"):
            kind = child.tag
            if kind in _SKIPPED or (kind == "r" and self._is_hidden(child)):
                continue
            if kind == "t":
                parts.append(child.text or "")
            elif kind in _CHARACTERS:
                parts.append(_CHARACTERS[kind])
            elif kind == "p":
                text = self._text(child)
                if text or child.find("pPr/rPr/vanish") is None:
                    parts.append(f"{self._number(child)}{text}\n")
            elif kind == "tc":
                parts.append(" ".join(self._text(child).split()) + "\t")
            elif kind == "tr":
                parts.append(self._text(child).removesuffix("\t") + "\n")
            elif kind == "ddList":
                parts += [entry.get("val") for entry in child.findall("listEntry")][int(_value(child, "result", 0)) :][
                    :1
                ]
            elif kind == "checkBox":
                checked = (
                    _value(child, "default", "0") if child.find("checked") is None else _value(child, "checked", "1")
                )
                parts.append("☐" if checked in _OFF else "☒")
            elif kind == "altChunk":
                parts.append(f"{self._inner(self._targets[child.get('id')])}\n")
            else:
                parts.append(self._text(child))
        return "".join(parts)

    def _inner(self, place: str) -> str:
        """The text of a document inside this one."""
        content = self._zip.read(place)
        try:
            if is_docx(content):
                return docx_text(place, content, self._remark)
            if is_html(place, content):
                return html_text(place, content, self._remark)
            raise UsageError(f"{place} is neither HTML nor a Word file.")
        except UsageError as error:
            self._remark(f"{self._name}: left out of it: {error}")
            return ""

    def _inherited(self, element: Any, path: str) -> str | None:
        """A property of a paragraph or a run, or else of its style and of those that this is based on."""
        for _ in range(_MOST_STYLES):
            if element is None:
                break
            if element.find(path) is not None:
                return _value(element, path, "1")
            element = self._styles.get(next(filter(None, (_value(element, link) for link in _STYLES)), ""))
        return None

    def _is_hidden(self, run: Any) -> bool:
        paragraph = next(run.iterancestors("p"), None)
        own = self._inherited(run, "rPr/vanish") or self._inherited(paragraph, "rPr/vanish")
        return own is not None and own not in _OFF

    def _number(self, paragraph: Any) -> str:
        """Return the number that a list shows before a paragraph, and count it."""
        name = self._inherited(paragraph, "pPr/numPr/numId") or ""
        if name not in self._levels:
            self._levels[name] = self._levels_of(name)
        key, levels, starts = self._levels[name]
        if (at := int(self._inherited(paragraph, "pPr/numPr/ilvl") or 0)) not in levels:
            return ""
        counts = self._counts[key]
        counts[at] = counts.get(at, starts[at] - 1) + 1
        for deeper in [index for index in counts if index > at]:
            del counts[deeper]

        def numeral(match: re.Match[str]) -> str:
            if (index := int(match[1]) - 1) not in levels:
                return ""
            shape = "decimal" if levels[at].find("isLgl") is not None else _value(levels[index], "numFmt")
            return _numeral(counts.get(index, starts[index]), shape)

        shown = re.sub(r"%(\d)", numeral, _value(levels[at], "lvlText", ""))
        return "• " if _value(levels[at], "numFmt") == "bullet" else shown and f"{shown} "

    def _levels_of(self, name: str) -> tuple[str, dict[int, Any], dict[int, int]]:
        """Return the key of the counts that a list goes on from, its levels, and where each begins."""
        used = self._lists.get(name)
        if used is None or (kind := _value(used, "abstractNumId")) not in self._kinds:
            return "", {}, {}
        if (style := _value(self._kinds[kind], "numStyleLink")) in self._styles:
            kind = _value(self._lists[_value(self._styles[style], "pPr/numPr/numId")], "abstractNumId")
        own = {int(level.get("ilvl")): level for level in used.findall("lvlOverride")}
        levels = {int(level.get("ilvl")): level for level in self._kinds[kind].findall("lvl")}
        levels |= {index: level.find("lvl") for index, level in own.items() if level.find("lvl") is not None}
        starts = {index: int(_value(level, "start", 1)) for index, level in levels.items()}
        begun = {at: int(_value(level, "startOverride")) for at, level in own.items() if _value(level, "startOverride")}
        # A list that begins anew counts for itself, and others of its kind go on from each other.
        return f"of {name}" if begun else kind, levels, starts | begun


def _value(element: Any, path: str, default: Any = None) -> Any:
    """The value of an element below another; the default where there is no such element, or it has no value."""
    found = element.find(path)
    return default if found is None else found.get("val", default)


def _numeral(count: int, shape: str | None) -> str:
    if shape in ("lowerLetter", "upperLetter"):
        text = chr(ord("a") + (count - 1) % 26) * ((count + 25) // 26)
    elif shape in ("lowerRoman", "upperRoman"):
        text = ""
        for sign, worth in _ROMAN.items():
            text += sign * (count // worth)
            count %= worth
    else:
        text = {"none": "", "decimalZero": f"{count:02}"}.get(shape or "", str(count))
    return text.upper() if shape and shape.startswith("upper") else text
