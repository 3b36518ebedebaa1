"""Answers of `hf-hybrid-cache batch`: lines of JSON, in a file or on standard output."""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .console import UsageError

Answer = dict[str, Any]
# What answers say besides their question. A line of the file of questions has no such fields.
RESULT_FIELDS = (
    "answer",
    "error",
    "finish_reason",
    "prompt_tokens",
    "answer_tokens",
    "seconds",
    "document_tokens",
    "read_tokens",
    "documents",
    "left_out",
    "document_seconds",
    "settings",
)
# Inside of text some act on a terminal, and many programs end a line at others.
_ESCAPES = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029)}


def key_of(answer: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of the question that it answers."""
    document = answer["document"]
    return answer.get("id"), document if isinstance(document, str) else tuple(document), answer["question"]


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
        except OSError as error:
            raise self._cannot_write(error) from error
        finally:
            unfinished.unlink(missing_ok=True)

    def add(self, answer: Answer) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(answer))
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> UsageError:
        return UsageError(f"Cannot write {self.path}: {error.strerror}.")

    def _answer(self, number: int, line: bytes) -> Answer:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict) and _is_answer(found):
            return found
        raise UsageError(
            f"{self.path}, line {number}: not an answer of this command. Give another --out; nothing was changed."
        )


class AnswerStream:
    """Standard output: answers, a line of JSON each."""

    def add(self, answer: Answer) -> None:
        line = _line(answer)
        if sys.stdout.isatty():
            sys.stdout.write(line)  # where a bar is shown, this is written above it
        else:
            sys.stdout.buffer.write(line.encode())  # JSON is UTF-8, whatever the terminal is
        sys.stdout.flush()


def _is_answer(found: Mapping[str, Any]) -> bool:
    document = found.get("document")
    names = document if isinstance(document, list) else [document]
    is_known = all(isinstance(text, str) for text in [*names, found.get("question")])
    return is_known and isinstance(found.get("id"), str | int | None) and ("answer" in found or "error" in found)


def _line(answer: Answer) -> str:
    return json.dumps(answer, ensure_ascii=False).translate(_ESCAPES) + "\n"
