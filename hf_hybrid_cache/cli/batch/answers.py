"""Reading and writing the answers of a batch: lines of JSON, in a file or on standard output."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...durable_files import replaced_when_whole
from ..console import UsageError
from ..files import BYTE_ORDER_MARK, json_line, strict_json

Answer = dict[str, Any]
# Fields of an answer besides those of its question; a question must not have them.
RESULT_FIELDS = (
    "answer",
    "error",
    "finish_reason",
    "prompt_tokens",
    "answer_tokens",
    "seconds",
    "at_once",
    "document_tokens",
    "read_tokens",
    "document_digest",
    "documents",
    "left_out",
    "document_seconds",
    "model_digest",
    "settings",
)


def key_of(answer: Mapping[str, Any]) -> tuple[Any, ...]:
    """The id, the documents and the text of a question, or of the question of an answer."""
    document = answer["document"]
    return answer.get("id"), document if isinstance(document, str) else tuple(document), answer["question"]


class AnswerFile:
    """
    A file of answers, a line of JSON each.

    Args:
        path: the file, which need not exist.
    """

    def __init__(self, path: Path):
        self.path = path

    def read(self) -> list[Answer]:
        """
        Read all answers, without a last line that an interrupt cut off.

        Raises:
            UsageError: the file cannot be read, or another line is not an answer.
        """
        try:
            text = self.path.read_bytes().removeprefix(BYTE_ORDER_MARK)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UsageError(f"Cannot read {self.path}: {error.strerror}.") from error
        lines = text[: text.rfind(b"\n") + 1].splitlines()
        return [self._answer(number, line) for number, line in enumerate(lines, 1)]

    def replace(self, answers: Iterable[Answer]) -> None:
        """Replace all answers in the file, in one step."""
        try:
            with replaced_when_whole(self.path) as file:
                file.writelines(json_line(answer).encode() for answer in answers)
        except OSError as error:
            raise self._cannot_write(error) from error

    def add(self, answer: Answer) -> None:
        """Write an answer at the end of the file."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json_line(answer))
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> UsageError:
        return UsageError(f"Cannot write {self.path}: {error.strerror}.")

    def _answer(self, number: int, line: bytes) -> Answer:
        try:
            answer, why = strict_json(line.decode()), ""
        except (ValueError, RecursionError) as error:
            answer, why = None, f" ({error})"
        if isinstance(answer, dict) and _is_answer(answer):
            return answer
        raise UsageError(
            f"{self.path}, line {number}: not an answer of this command{why}. Give another --out; nothing was changed."
        )


class AnswerStream:
    """Writes answers to standard output, a line of JSON each."""

    def add(self, answer: Answer) -> None:
        line = json_line(answer)
        if sys.stdout.isatty():
            sys.stdout.write(line)  # where a bar is shown, this is written above it
        else:
            sys.stdout.buffer.write(line.encode())  # JSON is UTF-8, whatever the terminal is
        sys.stdout.flush()


def _is_answer(fields: Mapping[str, Any]) -> bool:
    """Whether an object has the fields of an answer."""
    document = fields.get("document")
    names = document if isinstance(document, list) else [document]
    is_known = all(isinstance(text, str) for text in [*names, fields.get("question")])
    return is_known and isinstance(fields.get("id"), str | int | None) and ("answer" in fields or "error" in fields)
