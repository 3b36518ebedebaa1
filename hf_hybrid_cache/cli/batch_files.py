"""
The files of a batch: questions, lines of JSON, and their answers, with which the same command goes on.

Answers go to standard output, or into a file.
"""

import hashlib
import json
import os
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from ..chat.forms import FORMS, Form
from ..chat.settings import AnswerSettings
from ..documents import files_in, is_on_the_web, read_bytes
from ..models.shapes import ALIASES
from ..system.durable_files import replaced_when_whole
from .console import UsageError, json_line, strict_json
from .task import as_options

Record = dict[str, Any]
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Fields of an answer beside those of its question; a question must not have them.
RESULT_FIELDS = (
    *("answer", "thinking", "error", "finish_reason", "prompt_tokens", "answer_tokens", "thinking_tokens"),
    *("drafted_tokens", "accepted_tokens", "seconds", "at_once"),
    *("document_tokens", "read_tokens", "document_digest", "documents", "left_out", "document_seconds"),
    *("model_digest", "settings"),
)
# Fields of a question that are the form of its answer.
_FORM_FIELDS = ("schema", "choices", "regex")
# The setting that changes no answer about a document that is read whole.
_CONTEXT = "context"
# Weights are too large to be read for a digest: their sizes and times tell of a change.
_MODEL_FILES = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".gguf")
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
        form: of the answer, see `AnswerSettings.form`.
    """

    line: int
    fields: Mapping[str, Any]
    form: Mapping[str, Form] = field(default_factory=dict)

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


def read_questions(path: Path, form: Mapping[str, Form] = {}, documents: Sequence[str] = ()) -> list[Question]:
    """
    Read all questions in a file of lines of JSON.

    Args:
        path: of the file.
        form: of the answers to lines that have no form of their own.
        documents: each of which lines without one are asked about.

    Raises:
        DocumentError: the file cannot be read.
        UsageError: lines are not questions, or repeat others; the message names them. Or each line has a document
            itself, where there are others.
    """
    lines = read_bytes(path).removeprefix(_BYTE_ORDER_MARK).splitlines()
    named = [name if is_on_the_web(name) else os.path.relpath(name, path.parent) for name in dict.fromkeys(documents)]
    questions: list[Question] = []
    wrong: dict[int, str] = {}
    for number, line in enumerate(lines, 1):
        try:
            questions += _questions(number, line, path.parent, form, named) if line.strip() else []
        except ValueError as error:
            wrong[number] = str(error)
    wrong |= _repeated(questions)
    if wrong:
        raise UsageError(_refusal(path, wrong))
    if not questions:
        raise UsageError(f"{path} has no questions. {_EXAMPLE}")
    if named and not any(question.documents == (named[0],) for question in questions):
        raise UsageError(f"Each line of {path} has a document of its own: drop --document, or those of the lines.")
    return questions


def by_document(questions: Iterable[Question]) -> list[list[Question]]:
    """Group questions by their documents, in the order of the first question of each group."""
    together: dict[tuple[str, ...], list[Question]] = {}
    for question in questions:
        together.setdefault(question.documents, []).append(question)
    return list(together.values())


class Left(NamedTuple):
    """
    The questions without an answer, and how many answers are to others or to what has changed.

    Attributes:
        questions: without an answer.
        num_changed: so many of them have an answer of another model or form, or about other documents.
        num_others: so many answers are to other questions, and stay.
    """

    questions: list[Question]
    num_changed: int
    num_others: int


class Answers:
    """
    The answers to questions.

    Of the answers to a question in the file the last one counts. It stays until a new one is written, and is then kept
    in another file. An answer has a digest of its settings, which a file beside spells out; on standard output it has
    the settings themselves.

    Args:
        path: of the file, which need not exist; `None` for standard output, on which no answer is found again.
        questions: that are asked.
        settings: of each new answer, beside the form that its question asks for.
        folder: names of documents are relative to it.
        remark: receives where answers are kept that were given anew.
        again: ask again what was answered with other settings, which is refused otherwise.
    """

    def __init__(
        self,
        path: Path | None,
        questions: Sequence[Question],
        settings: Mapping[str, Any],
        folder: Path,
        remark: Callable[[str], None],
        again: bool = False,
    ):
        self.path, self._settings, self._remark, self._again = path, settings, remark, again
        self._asked = {question.key: question for question in questions}
        self._model_digest: str | None = None
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
            self._require_alike(self.path)
            self._tidy(self.path, without_errors=True)
            try:
                self._append("")  # what cannot be written is told before a model is loaded
                yield
            finally:
                self._tidy(self.path, without_errors=False)

    def left(self, model: str) -> Left:
        """Find the questions that have no answer of the model as it is now about the documents as they are."""
        self._model_digest = model_digest(model)
        given = self.given()
        changed = {key for key in given.keys() & self._asked.keys() if self._has_changed(given[key])}
        unanswered = [question for key, question in self._asked.items() if key in changed or key not in given]
        return Left(unanswered, len(changed), len(given.keys() - self._asked.keys()))

    def given(self) -> dict[tuple[Any, ...], Record]:
        """Read the answers in the file, by the keys of their questions."""
        return {} if self.path is None else {key_of(answer): answer for answer in _read(self.path)}

    def add(self, question: Question, fields: Mapping[str, Any]) -> None:
        """Write the answer to a question, with these fields, at the end of the file if there is one."""
        settings: Any = self._settings_of(question)
        if self.path is not None:
            settings = self._noted(self.path, settings, _is_cut(fields))
        line = json_line({**question.fields, **fields, "model_digest": self._model_digest, "settings": settings})
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

    def _require_alike(self, path: Path) -> None:
        """Raise `UsageError` if answers to the questions have other settings, unless they are asked again."""
        others = [] if self._again else [each for each in _read(path) if "error" not in each and self._differs(each)]
        if not others:
            return
        settings = _noted_settings(path).get(str(others[0]["settings"]), {})
        wanted = self._settings_of(self._asked[key_of(others[0])])
        different = [name for name in (*FORMS, *wanted) if settings.get(name) != wanted.get(name)]
        what = "with other settings"
        if settings and different:
            theirs, ours = (as_options(different[:1], each) for each in (settings, wanted))
            what = f"{theirs}, not {ours}"
        raise UsageError(
            f"{path} has {len(others):,} answers that were given {what}. Add --again to ask these questions "
            "again, give another --out, or the same options."
        )

    def _differs(self, answer: Record) -> bool:
        """Whether an answer to one of the questions has other settings."""
        question = self._asked.get(key_of(answer))
        if question is None:
            return False
        most = self._settings.get(_CONTEXT)
        cuts = _is_cut(answer) or (most is not None and most < answer.get("read_tokens", 0))
        return bool(answer["settings"] != settings_digest(self._settings_of(question), cuts))

    def _settings_of(self, question: Question) -> dict[str, Any]:
        """The settings of a new answer to a question."""
        form = {name: list(form) if isinstance(form, tuple) else form for name, form in question.form.items()}
        return {**self._settings, **form}

    def _noted(self, path: Path, settings: Mapping[str, Any], is_cut: bool) -> str:
        """The digest of the settings of an answer, which a file beside the answers spells out."""
        digest, noted = settings_digest(settings, is_cut), _noted_settings(path)
        if digest not in noted:
            lines = [json_line({"digest": of, "settings": each}) for of, each in {**noted, digest: settings}.items()]
            try:
                with replaced_when_whole(_settings_path(path)) as file:
                    file.write("".join(lines).encode())
            except OSError as error:
                raise _cannot_write(_settings_path(path), error) from error
        return digest

    def _has_changed(self, answer: Record) -> bool:
        """Whether an answer is known to be of another model, of other documents, or of other settings."""
        if self._differs(answer):
            return True
        documents = self._digest_of(self._asked[key_of(answer)].documents)
        pairs = (("model_digest", self._model_digest), ("document_digest", documents))
        return any(answer.get(name) not in (None, now) for name, now in pairs if now is not None)

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
        return {**question.fields, **{name: value for name, value in answer.items() if name in RESULT_FIELDS}}


def settings_digest(settings: Mapping[str, Any], is_cut: bool) -> str:
    """The digest of settings that are given, of an answer; how much is read counts where its document was cut."""
    counted = {name: value for name, value in settings.items() if value is not None and (is_cut or name != _CONTEXT)}
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:16]


def _is_cut(answer: Mapping[str, Any]) -> bool:
    return bool(answer.get("read_tokens") != answer.get("document_tokens"))


def _settings_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}.settings.jsonl")


def _noted_settings(path: Path) -> dict[str, Mapping[str, Any]]:
    """The settings beside a file of answers, by digest; none where they are not there, or are something else."""
    try:
        lines = [strict_json(line) for line in _settings_path(path).read_bytes().decode().splitlines()]
        return {str(line["digest"]): dict(line["settings"]) for line in lines}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def documents_digest(names: Sequence[str], folder: Path) -> str | None:
    """The digest of documents, and of all files in those that are folders; `None` where one is not there."""
    digest = hashlib.sha256()
    try:
        for path in (folder / name for name in names):
            if not path.is_file() and not path.is_dir():
                return None
            for file in filter(Path.is_file, files_in(path)) if path.is_dir() else [path]:
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


def _questions(
    number: int, line: bytes, folder: Path, form: Mapping[str, Form], documents: Sequence[str]
) -> list[Question]:
    """Parse one line, a question about each document if it names none; raises `ValueError` if it is no question."""
    try:
        fields = strict_json(line.decode())
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg}, column {error.colno:,})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON in UTF-8 that can be read ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError("not an object")
    if "document" in fields:
        return [_question(number, fields, folder, form)]
    if not documents:
        raise ValueError("no 'document'; give it one, or --document for all lines without")
    return [_question(number, {"document": name} | fields, folder, form) for name in documents]


def _question(number: int, fields: dict[str, Any], folder: Path, form: Mapping[str, Form]) -> Question:
    """Check the fields of a question; raises `ValueError`, which says why, if it is none."""
    document, question = fields.get("document"), fields.get("question")
    if not _is_text(document) and not (isinstance(document, list) and document and all(map(_is_text, document))):
        raise ValueError(
            "'document' must be the name of a file or a folder, or a list of names, got " + reprlib.repr(document)
        )
    if not _is_text(question):
        raise ValueError(f"'question' must be text, got {reprlib.repr(question)}")
    given = fields.get("id", number)
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise ValueError(f"'id' must be text or an integer, got {reprlib.repr(given)}")
    if taken := [name for name in fields if name in RESULT_FIELDS]:
        raise ValueError(f"answers have a field {', '.join(map(repr, taken))} themselves; give it another name")
    own = {name: fields[name] for name in _FORM_FIELDS if fields.get(name) is not None}
    if isinstance(own.get("schema"), str):
        own["schema"] = folder / own["schema"]
    return Question(number, fields, AnswerSettings(**own).form if own else form)


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


def _read(path: Path) -> list[Record]:
    """Read all answers, without a last line that an interrupt cut off."""
    try:
        text = path.read_bytes().removeprefix(_BYTE_ORDER_MARK)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.") from error
    lines, answers, why = text.splitlines(), [], ""
    for number, line in enumerate(lines, 1):
        try:
            answer = strict_json(line.decode())
        except (ValueError, RecursionError) as error:
            if number == len(lines) and not text.endswith(b"\n"):
                break
            answer, why = None, f" ({error})"
        if not isinstance(answer, dict) or not _is_answer(answer):
            raise UsageError(
                f"{path}, line {number}: not an answer of this command{why}. Give another --out; nothing was changed."
            )
        answers.append(answer)
    return answers


def _is_answer(fields: Mapping[str, Any]) -> bool:
    """Whether an object has the fields of an answer."""
    document = fields.get("document")
    names = document if isinstance(document, list) else [document]
    is_asked = all(isinstance(text, str) for text in [*names, fields.get("question")])
    is_known = isinstance(fields.get("id"), str | int | None) and "settings" in fields
    return is_asked and is_known and ("answer" in fields or "error" in fields)


def _cannot_write(path: Path, error: OSError) -> UsageError:
    return UsageError(f"Cannot write {path}: {error.strerror}.")
