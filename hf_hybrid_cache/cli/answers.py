"""The answers of a batch: lines of JSON on standard output, or in a file, with which the same command goes on."""

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from ..durable_files import replaced_when_whole
from .console import UsageError, json_line, strict_json
from .questions import BYTE_ORDER_MARK, RESULT_FIELDS, Question, key_of

Answer = dict[str, Any]
# Weights are too large to be read for a digest: their sizes and times tell of a change.
_MODEL_FILES = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".gguf")


class Settled(NamedTuple):
    """
    The questions to be asked, and what a file of answers had.

    Attributes:
        unanswered: the questions that have no answer, or one that was made from something else.
        num_changed: how many of them had an answer, but their documents or the model have changed.
        num_others: answers to other questions, which stay.
    """

    unanswered: list[Question]
    num_changed: int
    num_others: int


class Answers:
    """
    The answers to questions.

    Args:
        path: of the file, which need not exist; `None` for standard output, on which no answer is found again.
        questions: that are asked.
        made_with: fields of each new answer: `settings`, which those in the file to these questions must have, too, and
            `model_digest`, without which an answer of the file is made anew.
        folder: names of documents are relative to it.
    """

    def __init__(self, path: Path | None, questions: Sequence[Question], made_with: Mapping[str, Any], folder: Path):
        self.path, self._made_with, self._folder = path, made_with, folder
        self._asked = {question.key: question for question in questions}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let no other process write into the file meanwhile; raises `UsageError` if one does."""
        if self.path is None:
            yield
            return
        place = self.path.resolve()
        try:
            lock = FileLock(place.with_name(f".{place.name}.lock")).acquire(timeout=0)
        except Timeout:
            way_out = "wait for it, or give another --out"
            raise UsageError(f"Another batch writes into {self.path} now: {way_out}.") from None
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        with lock:
            yield

    def settle(self) -> Settled:
        """
        Remove errors and answers about what has changed, and give others the fields of their question.

        Raises:
            UsageError: an answer was given with other settings, a line is no answer, or the file cannot be written.
        """
        if self.path is None:
            return Settled(list(self._asked.values()), 0, 0)
        read = [self._as_asked(answer) for answer in _read(self.path) if "error" not in answer]
        digest_of = cache(partial(documents_digest, folder=self._folder))
        model = self._made_with["model_digest"]

        def is_current(answer: Answer) -> bool:
            question = self._asked.get(key_of(answer))
            now = {} if question is None else {"model_digest": model, "document_digest": digest_of(question.documents)}
            return all(digest in (None, answer.get(name)) for name, digest in now.items())

        kept = [answer for answer in read if is_current(answer)]
        try:
            with replaced_when_whole(self.path) as file:
                file.writelines(json_line(answer).encode() for answer in kept)
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        answered = {key_of(answer) for answer in kept}
        unanswered = [question for key, question in self._asked.items() if key not in answered]
        return Settled(unanswered, len(read) - len(kept), len(answered - self._asked.keys()))

    def add(self, answer: Answer) -> None:
        """Write an answer, at the end of the file if there is one."""
        line = json_line(answer)
        if self.path is not None:
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(line)
            except OSError as error:
                raise _cannot_write(self.path, error) from error
            return
        if sys.stdout.isatty():
            sys.stdout.write(line)  # where a bar is shown, this is written above it
        else:
            sys.stdout.buffer.write(line.encode())  # JSON is UTF-8, whatever the terminal is
        sys.stdout.flush()

    def _as_asked(self, answer: Answer) -> Answer:
        """Give an answer the fields of its question, which may be others by now."""
        question = self._asked.get(key_of(answer))
        if question is None:
            return answer
        given = answer.get("settings", {})
        for name, value in self._made_with["settings"].items():
            if given.get(name) != value:
                raise UsageError(
                    f"{self.path} has answers that were given with {name}={given.get(name)}, not {value}. Give another "
                    "--out, or the same options."
                )
        return {**question.fields, **{name: value for name, value in answer.items() if name in RESULT_FIELDS}}


def documents_digest(names: Sequence[str], folder: Path) -> str | None:
    """The digest of documents, and of all files in those that are folders; `None` where one is not there."""
    digest = hashlib.sha256()
    try:
        for path in (folder / name for name in names):
            if not path.is_file() and not path.is_dir():
                return None
            for file in _files_in(path) if path.is_dir() else [path]:
                content = hashlib.sha256(file.read_bytes() if os.access(file, os.R_OK) else b"").hexdigest()
                digest.update(f"{file.relative_to(path)} {content}\n".encode(errors="surrogateescape"))
    except (OSError, ValueError):
        return None
    return digest.hexdigest()[:16]


def model_digest(name: str) -> str | None:
    """The digest of a model's file, or of those in its folder, or its commit on the Hub; `None` where it has none."""
    from huggingface_hub import try_to_load_from_cache  # takes a while

    try:
        path = Path(name).expanduser()
        if path.exists():
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            stats = [(file.name, file.stat()) for file in files if file.suffix in _MODEL_FILES]
            told = repr([(file, stat.st_size, stat.st_mtime_ns) for file, stat in stats])
            return hashlib.sha256(told.encode()).hexdigest()[:16]
        config = try_to_load_from_cache(name, "config.json")
    except (OSError, RuntimeError, ValueError):  # it cannot be loaded either, which says why
        return None
    return Path(config).parent.name if isinstance(config, str) else None


def _read(path: Path) -> list[Answer]:
    """Read all answers, without a last line that an interrupt cut off."""
    try:
        text = path.read_bytes().removeprefix(BYTE_ORDER_MARK)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.") from error
    whole_lines = text[: text.rfind(b"\n") + 1].splitlines()
    return [_answer(f"{path}, line {number}", line) for number, line in enumerate(whole_lines, 1)]


def _answer(place: str, line: bytes) -> Answer:
    """Parse one line; raises `UsageError` if it is not an answer."""
    try:
        answer, why = strict_json(line.decode()), ""
    except (ValueError, RecursionError) as error:
        answer, why = None, f" ({error})"
    if not isinstance(answer, dict) or not _is_answer(answer):
        raise UsageError(f"{place}: not an answer of this command{why}. Give another --out; nothing was changed.")
    return answer


def _is_answer(fields: Mapping[str, Any]) -> bool:
    """Whether an object has the fields of an answer."""
    document = fields.get("document")
    names = document if isinstance(document, list) else [document]
    is_asked = all(isinstance(text, str) for text in [*names, fields.get("question")])
    is_known = isinstance(fields.get("id"), str | int | None) and isinstance(fields.get("settings", {}), dict)
    return is_asked and is_known and ("answer" in fields or "error" in fields)


def _files_in(folder: Path) -> Iterator[Path]:
    """All files below a folder, sorted, without hidden ones."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (Path(place, name) for name in sorted(names) if not name.startswith("."))
        yield from (path for path in paths if path.is_file())


def _cannot_write(path: Path, error: OSError) -> UsageError:
    return UsageError(f"Cannot write {path}: {error.strerror}.")
