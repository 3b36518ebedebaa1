"""Arguments of calls that stand one after the other as marked texts: how they are found, read and forced."""

import ast
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from .forms import json_rule, json_text

_WHOLE_TAGS = r"(?:[^<\[]|[<\[][^<>\[\]]*[>\]])+"
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


class ArgumentMarks(NamedTuple):
    """
    The marks of arguments that stand one after the other, with the white space that a template writes.

    Attributes:
        begin: an argument.
        equals: between its name and its value, which is a text as it is, or JSON.
        end: after its value.
        opens: before a text with a `<`, beside that; may be empty.
        closes: after such a text, likewise.
        last: after all arguments of a call.
    """

    begin: str
    equals: str
    end: str
    opens: str
    closes: str
    last: str = ""

    @classmethod
    def of(cls, text: str, arguments: Mapping[str, Any]) -> "tuple[str, ArgumentMarks] | None":
        """
        Return what a text has of arguments, and their marks; `None` where a value has others by its type.

        Args:
            text: from a template.
            arguments: a text, a number, and a text that begins with `<`.
        """
        (first, plain), (second, number), (third, tag) = arguments.items()
        # What follows the first and the last value ends one, as whole tags, and the rest begins an argument.
        found = re.search(
            rf"{first}(?P<equals>.+?){plain}(?P<end>{_WHOLE_TAGS})(?P<begin>.+){second}(?P=equals){number}(?P=end)"
            rf"(?P=begin){third}(?P=equals)(?P<opens>.*?){tag}(?P<closes>.*?)(?P=end)",
            text,
            re.DOTALL,
        )
        marks = found and cls(*found.group("begin", "equals", "end", "opens", "closes"))
        if not found or not marks or not text[: found.start()].endswith(marks.begin):
            return None
        is_known = all(map(str.strip, marks[:3])) and bool(marks.opens) == bool(marks.closes)
        return (marks.begin + found[0], marks) if is_known else None

    def read(self, text: str, start: int, parameters: Mapping[str, Any]) -> tuple[Any, int]:
        """Return arguments that begin at a character, and their end, which is 0 before the mark after it is there."""
        begin, equals, end, *_, last = (r"\s*".join(map(re.escape, each.split())) for each in self)
        space = re.escape(self.equals[len(self.equals.rstrip()) :])
        named, arguments = re.compile(rf"\s*{begin}\s*(.*?)\s*{equals}({space})?", re.DOTALL), dict[str, Any]()
        while name := named.match(text, start):
            is_marked = bool(self.opens) and text.startswith(self.opens, name.end())
            closes = re.escape(self.closes) if is_marked else ""
            # A mark that is followed by something else is a part of a text.
            stop = re.compile(rf"{closes}{end}\s*(?={begin}|{last})").search(text, name.end())
            if not stop:
                break
            value = text[name.end() : stop.start()].removesuffix(self.end[: len(self.end) - len(self.end.lstrip())])
            schema = _inner(parameters, "properties", name[1])
            types = {"string"} if is_marked else {str(each.get("type")) for each in _alternatives(schema, parameters)}
            arguments[name[1]], start = _value(value.removeprefix(self.opens * is_marked), types), stop.end()
        return arguments, start if re.compile(rf"\s*{last}").match(text, start) else 0

    def rule(self, schema: dict[str, Any], symbols: Callable[[str], list[str]], rules: list[str]) -> str:
        """
        Return what stands in a grammar for arguments; those without a name in their schema are any texts.

        Args:
            schema: of an object.
            symbols: makes those of a text with marks.
            rules: of the grammar, to which those for texts are added.
        """
        # Before a token white space is a part of a text.
        bare = symbols(self.end.lstrip())
        first, *rest = bare if bare[0].startswith("<") else symbols(self.end)
        end, lazy = " ".join([first, *rest]), "" if first.startswith("<") else "[lazy]"
        named = {name: schema[name] for name in ("$defs", "definitions") if name in schema}

        def value(given: Any) -> str:
            """Return what stands for a value, and the mark after it."""
            ways = []
            for each in _alternatives(given, schema):
                if each.get("type") != "string":
                    ways.append(f"{json_rule(named | each)} {end}")
                elif "const" in each:
                    ways.append(f"{json_text(each['const'])} {end}")
                else:
                    name, pattern = f"text{len(rules)}", each.get("pattern", "").replace("/", r"\/")
                    size = f"(?s:.{{{each.get('minLength', 0)},{each.get('maxLength', '')}}})"
                    before, after = ("" if is_at else "(?s:.*)" for is_at in (pattern[:1] == "^", pattern[-1:] == "$"))
                    whole = f"{before}({pattern.removeprefix('^').removesuffix('$')}){after}"
                    rules.append(f"{name}{lazy}: {name.upper()} {first}\n{name.upper()}: /{size}/ & /{whole}/")
                    ways.append(" ".join([name, *rest]))
            return f"({' | '.join(ways)})"

        begin, equals = (" ".join(symbols(each)) for each in (self.begin, self.equals))
        properties, needed = schema.get("properties", {}), schema.get("required", ())
        if not properties and schema.get("additionalProperties") is not False:
            return f"({begin} {value({'type': 'string'})})*"
        given = ((name, f"{begin} {json_text(name)} {equals} {value(each)}") for name, each in properties.items())
        return " ".join(text if name in needed else f"({text})?" for name, text in given)


def _alternatives(schema: Any, whole: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the schemas, each of one value or of one type if it says any, that a schema within another stands for."""
    alternatives, waiting, known = list[dict[str, Any]](), [schema], set[str]()
    for each in waiting:
        each = each if isinstance(each, dict) else {}
        if isinstance(place := each.get("$ref"), str):
            waiting += [] if place in known else [_inner(whole, *place.split("/")[1:])]
            known.add(place)
        elif isinstance(ways := each.get("anyOf", each.get("oneOf")), list):
            waiting += ways
        elif isinstance(values := [each["const"]] if "const" in each else each.get("enum"), list):
            alternatives += [{"type": _type(value), "const": value} for value in values]
        elif isinstance(kinds := each.get("type"), list):
            waiting += [each | {"type": kind} for kind in kinds]
        else:
            alternatives.append(each)
    return alternatives or [{}]


def _inner(value: Any, *names: str) -> Any:
    """Return what a value of JSON has within objects; `None` if it has no such names."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _type(value: Any) -> str:
    return _TYPES.get(type(value), "null")


def _value(text: str, types: set[str]) -> Any:
    """Return the value that a text is, of some types: the text itself, JSON, or what Python writes in its place."""
    if types != {"string"}:
        for read in (json.loads, ast.literal_eval):
            with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                value = json.loads(json.dumps(read(text.strip()), allow_nan=False))
                kind = _type(value)
                if "string" not in types or types & {kind, "None", "number" if kind == "integer" else kind}:
                    return value
    return text
