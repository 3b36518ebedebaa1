"""The file of questions of `hf-hybrid-cache batch`."""

import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .answers import RESULT_FIELDS, key_of
from .console import UsageError
from .terminal import is_encodable

_EXAMPLE = 'A question is a line such as {"document": "report.txt", "question": "Who wrote it?"}'
# Wrong lines that are named; of others it is said how many there are.
_MOST_NAMED = 10


@dataclass(frozen=True)
class Question:
    """
    One line of the file of questions.

    Attributes:
        line: its number.
        fields: all that it says, which the answer says too: `document`, of a file or a folder, or a list of them,
            absolute or from the folder of the file; `question`, and where they were given `id` and what else there is.
    """

    line: int
    fields: Mapping[str, Any]

    @property
    def documents(self) -> tuple[str, ...]:
        """Names of all that it is about."""
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
        """What makes a stored answer one to this question, wherever its line is."""
        return key_of(self.fields)


def read_questions(path: Path) -> list[Question]:
    """
    All questions in a file of lines of JSON.

    Raises:
        UsageError: lines are not questions, or are the same as others; it names them.
    """
    try:
        lines = path.read_bytes().splitlines()
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
    """Questions about the same document together, in the order of the first of them."""
    together: dict[tuple[str, ...], list[Question]] = {}
    for question in questions:
        together.setdefault(question.documents, []).append(question)
    yield from together.values()


class _LineError(ValueError):
    """A line is not a question; the message says why."""


def _question(number: int, line: bytes) -> Question:
    try:
        found = json.loads(line.decode())
        is_text = is_encodable(json.dumps(found, ensure_ascii=False))
    except UnicodeDecodeError as error:
        raise _LineError(f"not UTF-8 text (byte {error.start + 1:,} is {line[error.start]:#04x})") from None
    except json.JSONDecodeError as error:
        raise _LineError(f"not JSON ({error.msg}, column {error.colno:,})") from None
    except (ValueError, RecursionError) as error:
        raise _LineError(f"not JSON that can be read ({error})") from None
    if not isinstance(found, dict):
        raise _LineError("not an object")
    if not is_text:
        raise _LineError("not UTF-8 text (it has half of a pair of surrogates)")
    document, question = found.get("document"), found.get("question")
    if not _is_text(document) and not (isinstance(document, list) and document and all(map(_is_text, document))):
        raise _LineError(
            "'document' must be the name of a file or a folder, or a list of names, got " + reprlib.repr(document)
        )
    if not _is_text(question):
        raise _LineError(f"'question' must be text, got {reprlib.repr(question)}")
    given = found.get("id", number)
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise _LineError(f"'id' must be text or an integer, got {reprlib.repr(given)}")
    if taken := [name for name in found if name in RESULT_FIELDS]:
        raise _LineError(f"answers have a field {', '.join(map(repr, taken))} themselves; give it another name")
    return Question(number, found)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _repeated(questions: Sequence[Question]) -> dict[int, str]:
    """Why lines that say the same as ones before cannot be told apart from these."""
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
    count = "1 line" if len(wrong) == 1 else f"{len(wrong):,} lines"
    named = [f"  line {number}: {wrong[number]}" for number in sorted(wrong)[:_MOST_NAMED]]
    more = [f"  and {len(wrong) - _MOST_NAMED:,} more"] if len(wrong) > _MOST_NAMED else []
    return "\n".join([f"{path} has {count} that cannot be used:", *named, *more, _EXAMPLE])
