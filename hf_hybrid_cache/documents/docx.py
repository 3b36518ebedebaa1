"""The text of a Word file, as it shows it: with the numbers of lists, without what is hidden or was deleted."""

import re
from collections.abc import Callable
from io import BytesIO
from string import ascii_letters
from xml.etree.ElementTree import Element, TreeBuilder, XMLParser
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

# Some programs put a number after the names of parts.
_PART = re.compile(r"word/(document|styles|numbering|footnotes|endnotes)\d*\.xml")
# Tab stops, and text that tracked changes deleted or moved.
_SKIPPED = {"pPr", "del", "moveFrom"}
_CHARACTERS = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}
# What fonts show for some of their codes; of any other the text has its font and its code.
_SYMBOLS = {
    "Symbol": dict(zip(ascii_letters, "αβχδεφγηιϕκλμνοπθρστυϖωξψζΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ", strict=True))
    | dict(zip("\xa3\xae\xb0\xb1\xb3\xb4\xb7", "≤→°±≥\xd7•", strict=True)),
    "Wingdings": dict(zip("o\xa8\xfb\xfc\xfd\xfe", "☐☐✗✓☒☑", strict=True)),
}
_SYMBOL_CODES = range(0xF000, 0xF100)
# Where a paragraph, a run and a style name the style that they take properties from.
_STYLES = ("pPr/pStyle", "rPr/rStyle", "basedOn")
_MOST_STYLES = 20  # styles can be based on each other in a circle
_ROMAN = {"m": 1000, "cm": 900, "d": 500, "cd": 400, "c": 100, "xc": 90, "l": 50, "xl": 40, "x": 10}
_ROMAN |= {"ix": 9, "v": 5, "iv": 4, "i": 1}
# What a file may unpack to: Word's own are seldom beyond 30 times as large. Elements take 250 bytes of memory each.
_MOST_TIMES, _ALWAYS_BYTES, _MOST_ELEMENTS = 100, 2 * 2**20, 4_000_000
_MOST_LETTERS = 4000  # a larger number in letters or Roman numerals is a mistake, and could fill the memory


def is_docx(content: bytes) -> bool:
    """Whether a file is a zip with the text of a Word file in it, perhaps cut off."""
    return content.startswith(b"PK\x03\x04") and re.search(rb"word/document\d*\.xml", content) is not None


def docx_text(name: str, content: bytes, remark: Callable[[str], None]) -> str:
    """Extract a line for each paragraph or row of a table, then notes; a damaged file raises any kind of error."""
    with ZipFile(BytesIO(content)) as file:
        found = [(match[1], info) for info in file.infolist() if (match := _PART.fullmatch(info.filename))]
        # Python unpacks no more than a part declares; of other ways to pack than Word's it would unpack it all at once.
        size, most = sum(info.file_size for _, info in found), _ALWAYS_BYTES + _MOST_TIMES * len(content)
        if size > most or any(info.compress_type not in (ZIP_STORED, ZIP_DEFLATED) for _, info in found):
            raise ValueError(f"its {len(content):,} bytes unpack to {size:,}, and those of Word to {most:,} at most")
        parts = {}
        for part, info in found:
            parser = XMLParser(target=_Tree())
            with file.open(info) as packed:
                while piece := packed.read(2**16):
                    parser.feed(piece)
            parts[part] = parser.close()
    word = _Word(parts)
    text = [word.text_of(parts[part]).strip("\n") for part in ("document", "footnotes", "endnotes") if part in parts]
    if parts["document"].find(".//altChunk") is not None:
        remark(f"{name}: left out of it: documents inside it. Open and save it in Word, which makes them its text")
    return "\n".join(text).strip("\n")


class _Word:
    """The styles and lists of a Word file, and how far its lists have counted."""

    def __init__(self, parts: dict[str, Element]):
        styles, numbering = (parts.get(part, Element(part)) for part in ("styles", "numbering"))
        self._styles = {style.get("styleId"): style for style in styles.iter("style")}
        self._lists = {used.get("numId"): used for used in numbering.iter("num")}
        self._kinds = {kind.get("abstractNumId"): kind for kind in numbering.iter("abstractNum")}
        self._counts: dict[str | None, dict[int, int]] = {}

    def text_of(self, element: Element, is_hidden: bool = False) -> str:
        """The text of what is below an element of a paragraph, which may be hidden, or above all paragraphs."""
        texts = []
        for child in element:
            kind = child.tag
            if kind in _SKIPPED or (kind == "r" and self._is_hidden(child, is_hidden)):
                continue
            if kind == "t":
                texts.append(child.text or "")
            elif kind in _CHARACTERS:
                texts.append(_CHARACTERS[kind])
            elif kind == "p":
                text = self.text_of(child, _is_on(self._inherited(child, "rPr/vanish")))
                if text or child.find("pPr/rPr/vanish") is None:
                    texts.append(f"{self._number(child)}{text}\n")
            elif kind == "tc":
                texts.append(" ".join(self.text_of(child).split()) + "\t")
            elif kind == "tr":
                texts.append(self.text_of(child).removesuffix("\t") + "\n")
            elif kind == "sym":
                texts.append(_symbol(child.get("font", ""), int(child.get("char", ""), 16)))
            elif kind == "AlternateContent":  # the same for several programs
                ways = (self.text_of(way, is_hidden) for way in child)
                texts.append(next((text for text in ways if text.strip()), ""))
            elif kind == "ddList":
                chosen = int(_value(child, "result") or 0)
                texts += [entry.get("val", "") for entry in child.findall("listEntry")[chosen : chosen + 1]]
            elif kind == "checkBox":
                texts.append("☒" if _is_on(_value(child, "checked") or _value(child, "default")) else "☐")
            else:
                texts.append(self.text_of(child, is_hidden))
        return "".join(texts)

    def _inherited(self, element: Element | None, path: str) -> str | None:
        """A property of a paragraph or a run, or else of its style and of those that this is based on."""
        for _ in range(_MOST_STYLES):
            if element is None:
                break
            if value := _value(element, path):
                return value
            element = self._styles.get(next(filter(None, (_value(element, link) for link in _STYLES)), None))
        return None

    def _is_hidden(self, run: Element, is_paragraph_hidden: bool) -> bool:
        value = self._inherited(run, "rPr/vanish")
        return is_paragraph_hidden if value is None else _is_on(value)

    def _number(self, paragraph: Element) -> str:
        """Return the number that a list shows before a paragraph, and count it."""
        counted_as, levels, starts = self._levels(self._inherited(paragraph, "pPr/numPr/numId"))
        at = int(self._inherited(paragraph, "pPr/numPr/ilvl") or 0)
        if at not in levels:
            return ""
        counts = {level: count for level, count in self._counts.get(counted_as, {}).items() if level <= at}
        counts[at] = counts.get(at, starts[at] - 1) + 1
        self._counts[counted_as] = counts

        def numeral(match: re.Match[str]) -> str:
            level = int(match[1]) - 1
            if level not in levels:
                return ""
            shape = None if _is_on(_value(levels[at], "isLgl")) else _value(levels[level], "numFmt")
            return _numeral(counts.get(level, starts[level]), shape)

        shown = re.sub(r"%(\d)", numeral, _value(levels[at], "lvlText") or "")
        return "• " if _value(levels[at], "numFmt") == "bullet" else shown and f"{shown} "

    def _levels(self, name: str | None) -> tuple[str | None, dict[int, Element], dict[int, int]]:
        """Return what a list counts together with, its levels, and where each begins."""
        if (used := self._lists.get(name)) is None:
            return None, {}, {}
        kind = _value(used, "abstractNumId")
        if kind in self._kinds and (style := self._styles.get(_value(self._kinds[kind], "numStyleLink"))) is not None:
            kind = _value(self._lists[_value(style, "pPr/numPr/numId")], "abstractNumId")
        levels = {int(level.get("ilvl", 0)): level for level in self._kinds.get(kind, Element("none")).findall("lvl")}
        changes = {int(change.get("ilvl", 0)): change for change in used.findall("lvlOverride")}
        levels |= {at: level for at, change in changes.items() if (level := change.find("lvl")) is not None}
        starts = {at: int(_value(level, "start") or 1) for at, level in levels.items()}
        begun = {at: int(start) for at, change in changes.items() if (start := _value(change, "startOverride"))}
        # A list that begins anew counts for itself, and others of its kind go on from each other.
        return f"list {name}" if begun else kind, levels, starts | begun


def _value(element: Element, path: str) -> str | None:
    """The value of an element below another, "1" for one that has none; `None` where there is no such element."""
    found = element.find(path)
    return None if found is None else found.get("val", "1")


def _is_on(value: str | None) -> bool:
    return value not in (None, "0", "false", "off")


def _symbol(font: str, code: int) -> str:
    """The character that a symbol of a font looks like, or its name."""
    if code not in _SYMBOL_CODES:
        return chr(code)
    code -= _SYMBOL_CODES.start
    return _SYMBOLS.get(font, {}).get(chr(code), f"[{font} {code}]")


def _numeral(count: int, shape: str | None) -> str:
    text = "" if shape == "none" else f"{count:02}" if shape == "decimalZero" else str(count)
    if shape in ("lowerLetter", "upperLetter") and 0 < count < _MOST_LETTERS:
        text = chr(ord("a") + (count - 1) % 26) * ((count + 25) // 26)
    elif shape in ("lowerRoman", "upperRoman") and 0 < count < _MOST_LETTERS:
        text = ""
        for sign, worth in _ROMAN.items():
            text += sign * (count // worth)
            count %= worth
    return text.upper() if shape and shape.startswith("upper") else text


class _Tree(TreeBuilder):
    """The elements of a part without their namespaces: those of strict files are others."""

    def __init__(self) -> None:
        super().__init__()
        self._num_elements = 0

    def start(self, tag: str, attributes: dict[str, str]) -> Element:
        self._num_elements += 1
        if self._num_elements > _MOST_ELEMENTS:
            raise ValueError(f"it has more than {_MOST_ELEMENTS:,} elements")
        return super().start(_local(tag), {_local(key): value for key, value in attributes.items()})

    def end(self, tag: str) -> Element:
        return super().end(_local(tag))

    def doctype(self, *_: str | None) -> None:
        raise ValueError("it defines entities, which Word does not")  # a few of them could make any amount of text


def _local(name: str) -> str:
    return name.rpartition("}")[2]
