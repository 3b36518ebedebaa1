"""The answers of a batch: lines of JSON on standard output, or in a file, with which the same command goes on."""

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from ..durable_files import replaced_when_whole
from ..models.shapes import ALIASES
from .console import UsageError, json_line, strict_json
from .questions import BYTE_ORDER_MARK, RESULT_FIELDS, Question, key_of

Record = dict[str, Any]
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

    Of the answers to a question in the file the last one counts. It stays until a new one is written, and is then kept
    in another file.

    Args:
        path: of the file, which need not exist; `None` for standard output, on which no answer is found again.
        questions: that are asked.
        settings: of each new answer, which those in the file to these questions must have, too.
        folder: names of documents are relative to it.
        remark: receives where answers are kept that were given anew.
    """

    def __init__(
        self,
        path: Path | None,
        questions: Sequence[Question],
        settings: Mapping[str, Any],
        folder: Path,
        remark: Callable[[str], None],
    ):
        self.path, self._settings, self._remark = path, settings, remark
        self._asked = {question.key: question for question in questions}
        self._digest_of = cache(partial(documents_digest, folder=folder))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """
        Let no other process write into the file meanwhile, and leave one answer to each question in it.

        Raises:
            UsageError: another process does, an answer was given with other settings, a line is no answer, or the file
                cannot be written.
        """
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
            self._tidy(self.path, without_errors=True)
            try:
                self._append("")  # what cannot be written is told before a model is loaded
                yield
            finally:
                self._tidy(self.path, without_errors=False)

    def settle(self, model: str | None) -> Settled:
        """Find the questions that have no answer of the model with this digest about the documents as they are."""
        given = {} if self.path is None else {key_of(answer): answer for answer in _read(self.path)}
        changed = {key for key in given.keys() & self._asked.keys() if self._has_changed(given[key], model)}
        unanswered = [question for key, question in self._asked.items() if key in changed or key not in given]
        return Settled(unanswered, len(changed), len(given.keys() - self._asked.keys()))

    def add(self, answer: Record) -> None:
        """Write an answer, at the end of the file if there is one."""
        line = json_line(answer)
        if self.path is not None:
            self._append(line)
            return
        if sys.stdout.isatty():
            sys.stdout.write(line)  # where a bar is shown, this is written above it
        else:
            sys.stdout.buffer.write(line.encode())  # JSON is UTF-8, whatever the terminal is
        sys.stdout.flush()

    def _append(self, text: str) -> None:
        assert self.path is not None
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def _has_changed(self, answer: Record, model: str | None) -> bool:
        """Whether an answer is known to be of another model or of other documents."""
        documents = self._asked[key_of(answer)].documents
        pairs = ((answer.get("model_digest"), model), (answer.get("document_digest"), self._digest_of(documents)))
        return any(before != now for before, now in pairs if None not in (before, now))

    def _tidy(self, path: Path, without_errors: bool) -> None:
        """Leave the last answer to each question, with the fields that its question has now; keep the earlier ones."""
        kept: list[bytes] = []
        earlier: list[bytes] = []
        answered: set[tuple[Any, ...]] = set()
        for answer in reversed(_read(path)):
            key, is_error = key_of(answer), "error" in answer
            if is_error and (without_errors or key in answered):
                continue
            line = json_line(self._as_asked(answer)).encode()
            (earlier if key in answered else kept).append(line)
            answered |= set() if is_error else {key}
        aside, content = path.with_stem(f"{path.stem}.earlier"), b"".join(reversed(kept))
        try:
            if earlier:
                before = aside.read_bytes() if aside.exists() else b""
                with replaced_when_whole(aside) as file:
                    file.writelines([before, *reversed(earlier)])
                self._remark(
                    f"earlier answers to questions that have a new one: {len(earlier):,}; they are in {aside} now"
                )
            if path.exists() and path.read_bytes() != content:
                with replaced_when_whole(path) as file:
                    file.write(content)
        except OSError as error:
            raise _cannot_write(path, error) from error

    def _as_asked(self, answer: Record) -> Record:
        """Give an answer the fields of its question, which may be others by now."""
        question = self._asked.get(key_of(answer))
        if question is None:
            return answer
        given = answer.get("settings", {})
        for name, value in self._settings.items():
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
                digest.update(f"{file.relative_to(path)} {_content_digest(file)}\n".encode(errors="surrogateescape"))
    except (OSError, ValueError):
        return None
    return digest.hexdigest()[:16]


def _content_digest(file: Path) -> str:
    if not os.access(file, os.R_OK):
        return hashlib.sha256().hexdigest()
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def model_digest(name: str) -> str | None:
    """The digest of a model's file, or of those in its folder, or its commit on the Hub; `None` while none is here."""
    from huggingface_hub import try_to_load_from_cache  # takes a while

    try:
        path = Path(name).expanduser()
        if path.exists():
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            stats = [(file.name, file.stat()) for file in files if file.suffix in _MODEL_FILES]
            told = repr([(file, stat.st_size, stat.st_mtime_ns) for file, stat in stats])
            return hashlib.sha256(told.encode()).hexdigest()[:16]
        repository, _, file = name.rpartition("/") if path.suffix.lower() == ".gguf" else (name, "", "config.json")
        cached = try_to_load_from_cache(ALIASES.get(repository, repository), file)
    except (OSError, RuntimeError, ValueError):  # it cannot be loaded either, which says why
        return None
    return Path(cached).parent.name if isinstance(cached, str) else None


def _read(path: Path) -> list[Record]:
    """Read all answers, without a last line that an interrupt cut off."""
    try:
        text = path.read_bytes().removeprefix(BYTE_ORDER_MARK)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.") from error
    lines = text.splitlines()
    if lines and not text.endswith(b"\n") and _parsed(lines[-1])[0] is None:
        del lines[-1]
    return [_answer(f"{path}, line {number}", line) for number, line in enumerate(lines, 1)]


def _answer(place: str, line: bytes) -> Record:
    """Parse one line; raises `UsageError` if it is not an answer."""
    answer, why = _parsed(line)
    if not isinstance(answer, dict) or not _is_answer(answer):
        raise UsageError(f"{place}: not an answer of this command{why}. Give another --out; nothing was changed.")
    return answer


def _parsed(line: bytes) -> tuple[Any, str]:
    """The value of a line of JSON; or `None`, and why it is none."""
    try:
        return strict_json(line.decode()), ""
    except (ValueError, RecursionError) as error:
        return None, f" ({error})"


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
