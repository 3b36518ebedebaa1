"""Where answers of `hf-hybrid-cache batch` go, and which of them are there already."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .answers import RESULT_FIELDS, Answer, AnswerFile, AnswerStream, key_of
from .console import UsageError
from .document_questions import BatchOptions
from .questions import Question


class AnswerSheet:
    """
    A file of answers, and those of jobs that are still to be put into it.

    Args:
        path: of the file.
        options: those that the answers must have been given with.
        asked: the questions. Answers to others stay in the file.
    """

    def __init__(self, path: Path, options: BatchOptions, asked: Sequence[Question]):
        self.path = path
        self._file = AnswerFile(path)
        self._settings = asdict(options)
        self._asked = {question.key: question for question in asked}
        self.parts = path.with_name(f"{path.name}.parts")

    def answers(self) -> list[Answer]:
        """To the questions that are asked."""
        return [answer for answer in self._file.read() if key_of(answer) in self._asked]

    def num_others(self) -> int:
        """Answers to questions that are not asked any more."""
        return sum(key_of(answer) not in self._asked for answer in self._file.read())

    def add(self, answer: Answer) -> None:
        self._file.add(answer)

    def part(self, number: int) -> Path:
        return self.parts / f"{number:04}.jsonl"

    def collect(self) -> None:
        """Put the answers of jobs, also of those that were ended, into the file."""
        found = {key_of(answer): answer for answer in self._file.read()}
        parts = sorted(self.parts.glob("*.jsonl"))
        for part in parts:
            found |= {key_of(answer): answer for answer in AnswerFile(part).read()}
        if parts:
            self._file.replace(found.values())
        for part in parts:
            part.unlink()

    def settle(self) -> list[Question]:
        """
        Keep what is answered, with what its line says now, and forget what failed; what is left to be asked.

        Raises:
            UsageError: answers were given with other options.
        """
        kept = [self._as_asked(answer) for answer in self._file.read() if "error" not in answer]
        self._file.replace(kept)
        answered = {key_of(answer) for answer in kept}
        return [question for key, question in self._asked.items() if key not in answered]

    def _as_asked(self, answer: Answer) -> Answer:
        question = self._asked.get(key_of(answer))
        if question is None:
            return answer
        given = answer.get("settings", {})
        if other := [name for name, value in self._settings.items() if given.get(name) != value]:
            name = other[0]
            raise UsageError(
                f"{self.path} has answers that were given with {name}={given.get(name)}, not "
                f"{self._settings[name]}. Give another --out, or the same options."
            )
        return {**question.fields, **{name: value for name, value in answer.items() if name in RESULT_FIELDS}}

    def count(self) -> int:
        """Answers that jobs have given so far."""
        return sum(part.read_bytes().count(b"\n") for part in self.parts.glob("*.jsonl"))

    def clear(self) -> None:
        shutil.rmtree(self.parts, ignore_errors=True)


class PrintedAnswers:
    """
    Answers on standard output, where none are found again.

    Args:
        asked: the questions.
    """

    def __init__(self, asked: Sequence[Question]):
        self._stream = AnswerStream()
        self._asked = asked
        self._given: list[Answer] = []

    def answers(self) -> list[Answer]:
        return list(self._given)

    def add(self, answer: Answer) -> None:
        self._stream.add(answer)
        self._given.append(answer)

    def settle(self) -> list[Question]:
        """All are left to be asked."""
        return list(self._asked)
