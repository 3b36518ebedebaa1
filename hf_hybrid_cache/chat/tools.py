"""Calls of functions in answers: the form that a chat template gives them, and how they are read and forced."""

import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from .arguments import ArgumentMarks
from .forms import checked_form, json_rule, json_text
from .settings import AnswerSettings, SettingError
from .thinking import Thought, ThoughtForm, overlap

# As many as Mistral's templates want an id to have; others take any.
_ID_CHARACTERS = 9
# Marks are divided at tags.
_TAG = re.compile(r"(<[^<>\s]+>|\[[^\[\]\s]+\])")
# A message of gpt-oss has a header, with its parts in more than one order (openai/harmony on GitHub, docs/format.md).
_CHANNEL, _MESSAGE = "<|channel|>", "<|message|>"
_CHANNELS = tuple(f"{_CHANNEL}{name}" for name in ("analysis", "commentary", "final"))
_HEADER = (*_CHANNELS, "<|start|>assistant", _MESSAGE, "<|end|>")
_DECODER = json.JSONDecoder()


class Message(NamedTuple):
    """A message: who says it, its text, the thought before an answer, and what else a chat template takes of it."""

    role: str
    content: str
    thought: str = ""
    more: Mapping[str, Any] = {}


class Conversation(NamedTuple):
    """
    Messages, and the functions that the answer to them may call.

    Attributes:
        messages: the messages.
        functions: as OpenAI's API has them, with parameters.
        choice: "auto", "none", "required", or the name of the function that must be called.
        strict: names of those whose arguments have the form of their parameters, even if none must be called.
        is_parallel: whether an answer may have several calls.
    """

    messages: tuple[Message, ...]
    functions: tuple[dict[str, Any], ...] = ()
    choice: str = "auto"
    strict: frozenset[str] = frozenset()
    is_parallel: bool = True

    @property
    def parameters(self) -> dict[str, Any]:
        """The schemas of the functions' arguments, by their names."""
        return {each["function"]["name"]: each["function"]["parameters"] for each in self.functions}


@dataclass(frozen=True)
class Call:
    """
    A call of a function in an answer.

    Attributes:
        index: of the call in the answer, from 0.
        id: by which the function's result is told.
        name: of the function.
        arguments: an object, as JSON.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class CallForm:
    """
    The form of calls in answers.

    Attributes:
        begin: what is written before the first function's name.
        middle: between the name and the arguments.
        between: from the arguments to the next function's name; `None` where an answer has one call.
        end: after the last call's arguments.
        answer: mark that begins an answer without a call; may be empty.
        keys: of name and arguments, where an object of JSON follows the mark; `None` where the name does.
        argument: marks of each argument; `None` where arguments are an object of JSON.
        marks: begin a call. An empty one stands for the beginning of an answer.
        closes: marks that may follow a call.
        skipped: marks that are of no text.
        made_up: the id in these texts.
        tokens: that are added to the tokenizer's vocabulary, by their texts.
        hidden_ids: special tokens that are of no mark up to the end of a call's arguments.
    """

    begin: str
    middle: str
    between: str | None
    end: str
    answer: str
    keys: tuple[str, str] | None
    argument: ArgumentMarks | None
    marks: frozenset[str]
    closes: frozenset[str]
    skipped: frozenset[str]
    made_up: str
    tokens: Mapping[str, int]
    hidden_ids: frozenset[int]

    def after(self, thought: ThoughtForm | None) -> ThoughtForm:
        """Return the form of a thought, or of none, that a call may follow as well as an answer."""
        if thought is None:
            return ThoughtForm("", "", "", False, (), (), (), self.hidden_ids)
        size = len(thought.answer_ids)
        cuts = size and thought.end_ids[-size:] == thought.answer_ids
        return replace(
            thought,
            end=thought.close,
            end_ids=thought.end_ids[:-size] if cuts else thought.end_ids,
            answer="",
            answer_ids=(),
            hidden_ids=thought.hidden_ids & self.hidden_ids,
        )

    def held(self, settings: AnswerSettings, asked: Conversation) -> AnswerSettings:
        """
        Return settings that hold an answer to the calls that it must have, to none, or to those of a strict function.

        Raises:
            SettingError: answers cannot be held to the parameters of a function.
        """
        if asked.choice == "none":
            return settings if settings.form else replace(settings, grammar=self._no_calls())
        is_forced = asked.choice != "auto"
        if not (is_forced or settings.schema or asked.strict):
            return settings
        rules, texts = list[str](), list[str]()
        for function in (each["function"] for each in asked.functions):
            if asked.choice in ("auto", "required", function["name"]):
                is_held = is_forced or function["name"] in asked.strict
                name = " ".join(self._symbols(function["name"] + self.middle))
                schema = {"type": "object"} | (function["parameters"] if is_held else {})
                try:
                    checked_form("schema", schema)
                except ValueError as error:
                    raise SettingError(f"tools has {function['name']!r}, whose schema {error}") from error
                arguments = self.argument.rule(schema, self._symbols, texts) if self.argument else json_rule(schema)
                rules.append(f"call{len(rules)}: {name} {arguments}")
        call = f"({' | '.join(f'call{number}' for number in range(len(rules)))})"
        if asked.is_parallel and self.between is not None:
            call += f" ({' '.join(self._symbols(self.between))} {call})*"
        bare = self.begin.lstrip()
        before, [first, *begin] = json_text(self.begin.removesuffix(bare)), self._symbols(bare)
        *end, last = ["", *self._symbols(self.end)]
        # The last token may be one that ends an answer, too, but for the one that ends arguments.
        may_lack = last.startswith("<") and not (self.argument and self.argument.last == self.end.strip())
        calls = " ".join([*begin, call, *end, last + "?" * may_lack])
        answer = f"({' '.join(self._symbols(self.answer))})?" if self.answer else ""
        if is_forced:
            rules.append(f"start: {before} {first} {calls}")
        elif settings.schema:
            rules.append(
                f"start: {answer} form | {before} {first} {calls}\nform: {json_rule(json.loads(settings.schema))}"
            )
        else:
            lazy = "" if first.startswith("<") else "[lazy]"
            rules.append(f"start: {answer} (TEXT | head {calls} TEXT)\nhead{lazy}: TEXT {first}\nTEXT: /(?s:.*)/")
        return replace(settings, schema=None, grammar="\n".join(rules + texts))

    def parts(self, pieces: Iterable[str], parameters: Mapping[str, Any]) -> Iterator[str | Call]:
        """Yield the text of an answer in pieces, and the calls of functions in it; what may begin one waits."""
        held, index, has_text, is_after = "", 0, False, False
        for piece, is_last in chain(((piece, False) for piece in pieces), [("", True)]):
            if isinstance(piece, Thought):
                yield piece
                continue
            held += piece
            while held:
                told, done, calls = self._step(held, is_last, has_text, is_after, parameters)
                text = held[:told].lstrip() if is_after else held[:told]
                yield text
                for name, arguments in calls:
                    yield Call(index, uuid.uuid4().hex[:_ID_CHARACTERS], name, arguments)
                    index += 1
                if not done:
                    break
                held, has_text = held[done:], has_text or bool(text.strip())
                is_after = bool(calls) or (is_after and not text)

    def _step(
        self, held: str, is_last: bool, has_text: bool, is_after: bool, parameters: Mapping[str, Any]
    ) -> tuple[int, int, list[tuple[str, str]]]:
        """Return how many first characters of a text are told, and done with, and the calls after what is told."""
        marks = {*self.marks, *self.skipped, *(self.closes if is_after else ())}
        places = [(start, -len(mark), mark) for mark in marks - {""} if (start := held.find(mark)) >= 0]
        if "" in self.marks and not has_text and held.strip():
            places.append((0, 0, ""))
        if not places:
            waiting = 0 if is_last else max((overlap(held, mark) for mark in marks), default=0)
            size = len(held) if is_last else len(held[: len(held) - waiting].rstrip())
            return size, size, []
        start, _, mark = min(places)
        text, after = len(held[:start].rstrip()), start + len(mark)
        if mark not in self.marks:
            return start, after, []
        calls, end = self._calls(held, after, parameters)
        if calls:
            return text, end, calls
        if calls is None and not is_last:
            return text, text, []
        return max(1, after), max(1, after), []

    def _calls(self, text: str, start: int, parameters: Mapping[str, Any]) -> tuple[list[tuple[str, str]] | None, int]:
        """Return names and arguments of the calls after a mark, and their end; `None` if more will tell."""
        start = len(text) - len(text[start:].lstrip())
        found = None
        if self.keys is None:
            known = "|".join(sorted(map(re.escape, parameters), key=len, reverse=True))
            found = re.compile(rf"({known})(?![\w-]){self._header()}").match(text, start)
            if not found:
                # What arguments begin or end with may be between a name and them, too.
                ends = (self.argument.begin, self.argument.last) if self.argument else ("{",)
                return ([] if any(text.count(each, start) > self.middle.count(each) for each in ends) else None), 0
            start = found.end()
        if found and self.argument:
            value, end = self.argument.read(text, start, parameters[found[1]])
        elif text[start : start + 1] not in ("", "{", "["):
            return [], 0
        else:
            value, end = _decoded(text, start)
        if not end:
            return None, 0
        values = value if isinstance(value, list) else [value]
        given = [(found[1], each) if found else self._named(each) for each in values]
        calls = [
            (name, told) for name, arguments in given if name in parameters and (told := arguments_text(arguments))
        ]
        return (calls if len(calls) == len(given) else []), end

    def _named(self, value: Any) -> tuple[str, Any]:
        """Return the name and the arguments of a call that is an object; an empty name if it is none."""
        name, arguments = self.keys or ("", "")
        return (str(value.get(name)), value.get(arguments, {})) if isinstance(value, dict) else ("", None)

    def _header(self) -> str:
        """Return the expression of what is between a name and the arguments."""
        if _CHANNEL in self.middle:
            return rf"[^{{]*{re.escape(_MESSAGE)}\s*"
        parts = re.split(rf"({self.made_up}|\d+|\s+)", self.middle)
        kinds = (
            r"[\w-]+" if part == self.made_up else r"\d+" if part.isdigit() else re.escape(part)
            for part in map(str.strip, parts)
        )
        return r"\s*".join(kinds) + r"\s*"

    def _symbols(self, text: str) -> list[str]:
        """Return the symbols of a grammar for a text; only by its number a token is one that is added."""
        known = sorted([*self.tokens, self.made_up], key=len, reverse=True)
        parts = filter(None, re.split(f"({'|'.join(map(re.escape, known))})", text))
        an_id = f"/[a-zA-Z0-9]{{{_ID_CHARACTERS}}}/"
        return [
            f"<[{self.tokens[part]}]>" if part in self.tokens else an_id if part == self.made_up else json_text(part)
            for part in parts
        ]

    def _no_calls(self) -> str:
        """Return the grammar of any text without tokens that are added, and without other marks of calls."""
        marks = {each.split()[0] for each in (self.begin, *self.marks) if each.strip()}
        plain = [
            re.escape(mark).replace("/", r"\/") for mark in sorted(marks) if self._symbols(mark) == [json_text(mark)]
        ]
        without = "".join(f" & ~/(?s:.*){mark}(?s:.*)/" for mark in plain)
        return f"start: TEXT\nTEXT: /(?s:.*)/{without}"


def call_form(
    written: Callable[..., str], thought: ThoughtForm | None, tokens: Mapping[str, int], special: Mapping[str, int]
) -> CallForm | None:
    """
    Find the form of calls, by made-up ones.

    Args:
        written: makes text of messages and functions, and of whether an answer is asked for; an empty one where the
            chat template refuses them.
        thought: form of the thought before an answer.
        tokens: that are added to the tokenizer's vocabulary, by their texts.
        special: those of them that texts are without.

    Returns:
        `None` where the template takes no functions, or writes their arguments neither as JSON nor one after the other,
        each with the same marks around its value.
    """
    name, other, content, place, text, *fields = (f"f{uuid.uuid4().hex}" for _ in range(8))
    made_up, number = uuid.uuid4().hex[:_ID_CHARACTERS], uuid.uuid4().fields[0]
    arguments = dict(zip(fields, (f"a{text}", number, f"<{text}"), strict=True))
    kinds = ("string", "integer", "string")
    properties = {field: {"type": kind, "description": "Made up."} for field, kind in zip(fields, kinds, strict=True)}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    tools = [{"type": "function", "function": {"name": name, "description": "Made up.", "parameters": schema}}]
    asked = Message("user", place)

    def turn(content: str, *names: str) -> str:
        functions = [{"name": each, "arguments": arguments} for each in names]
        calls = [{"id": made_up, "type": "function", "function": each} for each in functions]
        answer = Message("assistant", content, "", {"tool_calls": calls} if calls else {})
        return written([asked, answer], tools).rpartition(place)[2]

    prompt = written([asked], tools, True)
    whole = turn("", name)
    shown, argument = _shown(whole, arguments)
    found = _around(whole, [name], shown)
    before = prompt.rpartition(place)[2]
    if thought and thought.is_open:
        before = before.rstrip().removesuffix(thought.begin)
    if name not in prompt or not found or not found[0].startswith(before.rstrip()):
        return None
    head, middle, after = found
    begin = head.removeprefix(before if head.startswith(before) else before.rstrip())
    if thought and thought.close in begin:
        begin = begin.partition(thought.close)[2].lstrip()
    if not begin.strip():
        return None
    several = _around(turn("", name, other), [name, other], shown)
    between = several[2] if several else None
    # The rest of the turn is as after an answer without calls.
    end, plain = _parts(after), _parts(turn(content).rpartition(content)[2])
    while end and plain and end[-1] == plain[-1]:
        end, plain = end[:-1], plain[:-1]
    if argument:
        argument = argument._replace(last=next(filter(str.strip, end), "").strip())
    if name in middle or (argument and not argument.last):
        return None
    whole, answer = begin + whole[len(head) : len(whole) - len(after)] + "".join(end), thought.answer if thought else ""
    marks, closes, keys = {begin.strip()}, end, None
    for bracket in re.finditer(r"[\[{]", begin):
        item, stop = _decoded(whole, bracket.start())
        item = item[0] if isinstance(item, list) and item else item
        by_value = {json_text(each): key for key, each in item.items()} if isinstance(item, dict) else {}
        if by_value.keys() >= {json_text(name), json_text(arguments)}:
            keys = by_value[json_text(name)], by_value[json_text(arguments)]
            marks, closes = {begin[: bracket.start()].strip()}, _parts(whole[stop:])
            break
    if keys is None and between is not None:
        # Of several marks before the first call the next ones have the last.
        again = _parts(begin)
        while not between.endswith("".join(again)):
            del again[0]
        mark = "".join(again).strip()
        if mark:
            marks, closes = {*marks, mark}, closes + _parts(between.rpartition(mark)[0])
        else:
            between = None
    if any(made_up in mark for mark in marks):
        return None
    skipped = {answer, *(_HEADER if _CHANNEL in middle else ())} - {""}
    shown = "".join((begin, middle, *skipped, *(argument or ())))
    return CallForm(
        begin=begin,
        middle=middle,
        between=between,
        end="".join(end),
        answer=answer,
        keys=keys,
        argument=argument,
        marks=frozenset(marks),
        closes=frozenset(filter(None, map(str.strip, closes))),
        skipped=frozenset(skipped),
        made_up=made_up,
        tokens=tokens,
        hidden_ids=frozenset(id for text, id in special.items() if text not in shown),
    )


def _shown(text: str, arguments: dict[str, Any]) -> tuple[str, ArgumentMarks | None]:
    """Return what a text has of arguments, and their marks where it is no JSON; nothing if it has none."""
    for found in re.finditer("{", text):
        given, end = _decoded(text, found.start())
        if given == arguments:
            return text[found.start() : end], None
    return ArgumentMarks.of(text, arguments) or ("", None)


def _around(text: str, names: Sequence[str], shown: str) -> list[str]:
    """Return what a text has around names and the arguments that follow each; nothing if it has none."""
    around = []
    for name in names:
        before, _, text = text.partition(name)
        middle, arguments, text = text.partition(shown or name)
        if not arguments:
            return []
        around += [before, middle]
    return [*around, text]


def _decoded(text: str, start: int) -> tuple[Any, int]:
    """Return the value of JSON that begins at a character, and its end, which is 0 if there is none."""
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, 0


def arguments_text(arguments: object) -> str:
    """Return arguments as JSON; empty if they are no object of it, and no text of one."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError):
        return ""
    return text if isinstance(value, dict) else ""


def _parts(text: str) -> list[str]:
    """Divide a text at its tags."""
    return [part for part in _TAG.split(text) if part]
