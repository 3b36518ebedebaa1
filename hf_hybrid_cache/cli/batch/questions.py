"""Reading the questions of a batch."""

import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import HybridCacheError
from ..console import UsageError
from ..files import BYTE_ORDER_MARK, strict_json
from .answers import RESULT_FIELDS, key_of

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
    def question(self) -> str:
        return str(self.fields["question"])

    @property
    def id(self) -> str | int | None:
        given: str | int | None = self.fields.get("id")
        return given

    @property
    def key(self) -> tuple[Any, ...]:
        """The key that the answer to this question has, too."""
        return key_of(self.fields)


def read_questions(path: Path) -> list[Question]:
    """
    Read all questions in a file of lines of JSON.

    Raises:
        UsageError: lines are not questions, or repeat others; the message names them.
    """
    try:
        lines = path.read_bytes().removeprefix(BYTE_ORDER_MARK).splitlines()
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.") from error
    questions: list[Question] = []
    wrong: dict[int, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            questions.append(_question(number, line))
        except _LineError as error:
            wrong[number] = str(error)
    wrong |= _repeated(questions)
    if wrong:
        raise UsageError(_refusal(path, wrong))
    if not questions:
        raise UsageError(f"{path} has no questions. {_EXAMPLE}")
    return questions


def by_document(questions: Iterable[Question]) -> Iterator[list[Question]]:
    """Group questions by their documents, in the order of the first question of each group."""
    together: dict[tuple[str, ...], list[Question]] = {}
    for question in questions:
        together.setdefault(question.documents, []).append(question)
    yield from together.values()


class _LineError(HybridCacheError, ValueError):
    """A line is not a question; the message says why."""


def _question(number: int, line: bytes) -> Question:
    """Parse one line; raises `_LineError` if it is not a question."""
    try:
        fields = strict_json(line.decode())
    except UnicodeDecodeError as error:
        raise _LineError(f"not UTF-8 text (byte {error.start + 1:,} is {line[error.start]:#04x})") from None
    except UnicodeEncodeError:
        raise _LineError("not UTF-8 text (it has half of a pair of surrogates)") from None
    except json.JSONDecodeError as error:
        raise _LineError(f"not JSON ({error.msg}, column {error.colno:,})") from None
    except (ValueError, RecursionError) as error:
        raise _LineError(f"not JSON that can be read ({error})") from None
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
        told_by = question.key if question.id is None else question.id
        before = first.setdefault(told_by, question.line)
        if before != question.line and question.id is None:
            wrong[question.line] = f"the document and the question of line {before}; drop it, or give each its own id"
        elif before != question.line:
            wrong[question.line] = f"the id {reprlib.repr(question.id)} of line {before}; give each its own, or none"
    return wrong


def _refusal(path: Path, wrong: Mapping[int, str]) -> str:
    """The message that lists wrong lines, with the reason for each."""
    count = "1 line" if len(wrong) == 1 else f"{len(wrong):,} lines"
    named = [f"  line {number}: {wrong[number]}" for number in sorted(wrong)[:_MOST_NAMED]]
    more = [f"  and {len(wrong) - _MOST_NAMED:,} more"] if len(wrong) > _MOST_NAMED else []
    return "\n".join([f"{path} has {count} that cannot be used:", *named, *more, _EXAMPLE])
