"""Files of `hf-hybrid-cache batch`: the questions, and the answers as they come."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .console import UsageError

Answer = dict[str, Any]
# What makes a stored answer one to a question.
_KEY = ("id", "document", "question")


@dataclass(frozen=True)
class Question:
    """
    One line of the file of questions.

    Attributes:
        id: as it was given, or the number of the line.
        document: as it was given: absolute, or from the folder of the file of questions.
        question: the text.
    """

    id: str | int
    document: str
    question: str

    @property
    def key(self) -> tuple[Any, ...]:
        return self.id, self.document, self.question


def read_questions(path: Path) -> list[Question]:
    """
    All questions in a file of lines of JSON.

    Raises:
        UsageError: a line is not a question, or has the id of another one.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Cannot read {path}: {error}.") from error
    questions = [_question(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise UsageError(f"{path} has no questions.")
    seen: dict[str | int, Question] = {}
    for question in questions:
        if question.id in seen:
            raise UsageError(f"{path}: two questions have the id {question.id!r}; give each its own, or none.")
        seen[question.id] = question
    return questions


def _question(path: Path, number: int, line: str) -> Question:
    example = 'a question is a line such as {"document": "report.txt", "question": "Who wrote it?"}'
    try:
        found = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{path}, line {number}: not JSON ({error}); {example}.") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path}, line {number}: not an object; {example}.")
    if unknown := sorted(set(found).difference(_KEY)):
        raise UsageError(f"{path}, line {number}: does not know {', '.join(map(repr, unknown))}; {example}.")
    for name in ("document", "question"):
        value = found.get(name)
        if not isinstance(value, str) or not value.strip():
            raise UsageError(f"{path}, line {number}: {name!r} must be text, got {value!r}; {example}.")
    given = found.get("id", number)
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise UsageError(f"{path}, line {number}: 'id' must be text or an integer, got {given!r}.")
    return Question(given, found["document"], found["question"])


class AnswerFile:
    """
    Answers, a line of JSON each, which are there as soon as they are added.

    Args:
        path: of the file, which need not exist.
    """

    def __init__(self, path: Path):
        self.path = path

    def read(self) -> list[Answer]:
        """
        All answers; a last line that was cut off when a process was ended is none.

        Raises:
            UsageError: another line is not an answer.
        """
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UsageError(f"Cannot read {self.path}: {error.strerror}.") from error
        lines = text[: text.rfind(b"\n") + 1].splitlines()
        return [self._answer(number, line) for number, line in enumerate(lines, 1)]

    def replace(self, answers: Iterable[Answer]) -> None:
        """Let the file hold these answers, at once."""
        unfinished = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        try:
            with unfinished.open("w", encoding="utf-8") as file:
                file.writelines(_line(answer) for answer in answers)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(self.path)
        finally:
            unfinished.unlink(missing_ok=True)

    def add(self, answer: Answer) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(answer))

    def _answer(self, number: int, line: bytes) -> Answer:
        try:
            found: Answer = json.loads(line)
            if all(key in found for key in _KEY) and ("answer" in found or "error" in found):
                return found
        except (ValueError, TypeError):
            pass
        raise UsageError(
            f"{self.path}, line {number}: not an answer of this command. Give another --out; nothing was changed."
        )


def key_of(answer: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of the question that it answers."""
    return tuple(answer[name] for name in _KEY)


def _line(answer: Answer) -> str:
    return json.dumps(answer, ensure_ascii=False) + "\n"
