"""Reading the questions of a batch: lines of JSON, each with a document and a question."""

import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..documents import read_bytes
from ..errors import HybridCacheError
from .console import UsageError, strict_json

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Fields of an answer beside those of its question; a question must not have them.
RESULT_FIELDS = (
    *("answer", "error", "finish_reason", "prompt_tokens", "answer_tokens", "seconds", "at_once"),
    *("document_tokens", "read_tokens", "document_digest", "documents", "left_out", "document_seconds"),
    *("model_digest", "settings"),
)
_EXAMPLE = 'A question is a line such as {"document": "report.txt", "question": "Who wrote it?"}'
# An error lists so many wrong lines, and counts the others.
_MOST_NAMED = 10


@dataclass(frozen=True)
class Question:
    """
    One line of the file of questions.

    Attributes:
        line: the number of the line.
        fields: all fields of the line, which the answer repeats. `document` names a file or a folder, or is a list of
            names, absolute or relative to the folder of the questions; `question` is text; `id` may be missing.
    """

    line: int
    fields: Mapping[str, Any]

    @property
    def documents(self) -> tuple[str, ...]:
        """The names of the documents."""
        named = self.fields["document"]
        return (named,) if isinstance(named, str) else tuple(named)

    @property
    def text(self) -> str:
        return str(self.fields["question"])

    @property
    def key(self) -> tuple[Any, ...]:
        """The key that the question has in common with its answer, and with no other."""
        return key_of(self.fields)


def key_of(fields: Mapping[str, Any]) -> tuple[Any, ...]:
    """The id, the documents and the text of a question, or of the question of an answer."""
    document = fields["document"]
    return fields.get("id"), document if isinstance(document, str) else tuple(document), fields["question"]


def read_questions(path: Path) -> list[Question]:
    """
    Read all questions in a file of lines of JSON.

    Raises:
        DocumentError: the file cannot be read.
        UsageError: lines are not questions, or repeat others; the message names them.
    """
    lines = read_bytes(path).removeprefix(BYTE_ORDER_MARK).splitlines()
    questions: list[Question] = []
    wrong: dict[int, str] = {}
    for number, line in enumerate(lines, 1):
        try:
            questions += [_question(number, line)] if line.strip() else []
        except _LineError as error:
            wrong[number] = str(error)
    wrong |= _repeated(questions)
    if wrong:
        raise UsageError(_refusal(path, wrong))
    if not questions:
        raise UsageError(f"{path} has no questions. {_EXAMPLE}")
    return questions


def by_document(questions: Iterable[Question]) -> list[list[Question]]:
    """Group questions by their documents, in the order of the first question of each group."""
    together: dict[tuple[str, ...], list[Question]] = {}
    for question in questions:
        together.setdefault(question.documents, []).append(question)
    return list(together.values())


class _LineError(HybridCacheError, ValueError):
    """A line is not a question; the message says why."""


def _question(number: int, line: bytes) -> Question:
    """Parse one line; raises `_LineError` if it is not a question."""
    try:
        fields = strict_json(line.decode())
    except json.JSONDecodeError as error:
        raise _LineError(f"not JSON ({error.msg}, column {error.colno:,})") from None
    except (ValueError, RecursionError) as error:
        raise _LineError(f"not JSON in UTF-8 that can be read ({error})") from None
    if not isinstance(fields, dict):
        raise _LineError("not an object")
    document, question = fields.get("document"), fields.get("question")
    if not _is_text(document) and not (isinstance(document, list) and document and all(map(_is_text, document))):
        raise _LineError(
            "'document' must be the name of a file or a folder, or a list of names, got " + reprlib.repr(document)
        )
    if not _is_text(question):
        raise _LineError(f"'question' must be text, got {reprlib.repr(question)}")
    given = fields.get("id", number)
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise _LineError(f"'id' must be text or an integer, got {reprlib.repr(given)}")
    if taken := [name for name in fields if name in RESULT_FIELDS]:
        raise _LineError(f"answers have a field {', '.join(map(repr, taken))} themselves; give it another name")
    return Question(number, fields)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _repeated(questions: Sequence[Question]) -> dict[int, str]:
    """The reasons why questions cannot be told from earlier ones, by line."""
    first: dict[Any, int] = {}
    wrong = {}
    for question in questions:
        given = question.fields.get("id")
        before = first.setdefault(question.key if given is None else given, question.line)
        if before != question.line and given is None:
            wrong[question.line] = f"the document and the question of line {before}; drop it, or give each its own id"
        elif before != question.line:
            wrong[question.line] = f"the id {reprlib.repr(given)} of line {before}; give each its own, or none"
    return wrong


def _refusal(path: Path, wrong: Mapping[int, str]) -> str:
    """The message that lists wrong lines, with the reason for each."""
    count = "1 line" if len(wrong) == 1 else f"{len(wrong):,} lines"
    named = [f"  line {number}: {wrong[number]}" for number in sorted(wrong)[:_MOST_NAMED]]
    more = [f"  and {len(wrong) - _MOST_NAMED:,} more"] if len(wrong) > _MOST_NAMED else []
    return "\n".join([f"{path} has {count} that cannot be used:", *named, *more, _EXAMPLE])
