"""The place where a batch puts its answers: a file that keeps them, or standard output."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..console import UsageError
from .answers import RESULT_FIELDS, Answer, AnswerFile, AnswerStream, key_of
from .digests import documents_digest, model_digest
from .questions import Question


class AnswerSheet:
    """
    A file of answers, and a folder in which each job has a file of its own.

    Args:
        path: the file; answers in it to other questions stay there.
        settings: how questions are answered; all answers in the file must have the same.
        asked: the questions.
        folder: names of documents are relative to it.

    Attributes:
        num_changed: answers that `settle` removed because their documents or the model have changed.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], asked: Sequence[Question], folder: Path):
        self.path = path
        self.num_changed = 0
        self._folder = folder
        self._file = AnswerFile(path)
        self._settings = settings
        self._asked = {question.key: question for question in asked}
        self.jobs_folder = path.with_name(f"{path.name}.parts")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """
        Let no other process write into the file meanwhile.

        Raises:
            UsageError: another one does, or the file cannot be written.
        """
        place = self.path.resolve()
        lock = FileLock(place.with_name(f".{place.name}.lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UsageError(
                f"Another batch writes into {self.path} now: wait for it, or give another --out."
            ) from None
        except OSError as error:
            raise UsageError(f"Cannot write {self.path}: {error.strerror}.") from error
        try:
            yield
        finally:
            lock.release()

    def answers(self) -> list[Answer]:
        """The answers in the file to the questions that are asked."""
        return [answer for answer in self._file.read() if key_of(answer) in self._asked]

    def num_others(self) -> int:
        """The number of answers in the file to other questions."""
        return sum(key_of(answer) not in self._asked for answer in self._file.read())

    def add(self, answer: Answer) -> None:
        self._file.add(answer)

    def job_file(self, number: int) -> Path:
        """The file in which a job puts its answers."""
        return self.jobs_folder / f"{number:04}.jsonl"

    def collect(self) -> None:
        """Move the answers from the files of jobs, also of jobs that were ended, into the file of all answers."""
        answers = {key_of(answer): answer for answer in self._file.read()}
        job_files = sorted(self.jobs_folder.glob("*.jsonl"))
        for job_file in job_files:
            answers |= {key_of(answer): answer for answer in AnswerFile(job_file).read()}
        if job_files:
            self._file.replace(answers.values())
        for job_file in job_files:
            job_file.unlink()

    def settle(self) -> list[Question]:
        """
        Remove errors and answers about what has changed from the file, and give others the fields of their question.

        Returns:
            The questions that have no answer.

        Raises:
            UsageError: an answer was given with other settings.
        """
        answers = [self._as_asked(answer) for answer in self._file.read() if "error" not in answer]
        has_changed = self._changes()
        kept = [answer for answer in answers if key_of(answer) not in self._asked or not has_changed(answer)]
        self.num_changed = len(answers) - len(kept)
        self._file.replace(kept)
        answered = {key_of(answer) for answer in kept}
        return [question for key, question in self._asked.items() if key not in answered]

    def _changes(self) -> Callable[[Answer], bool]:
        """Return a function that tells whether what an answer was made from has changed, as far as it is here."""
        model, of_documents = (
            model_digest(self._settings["model"]),
            cache(partial(documents_digest, folder=self._folder)),
        )

        def has_changed(answer: Answer) -> bool:
            documents = self._asked[key_of(answer)].documents
            now = {"model_digest": model, "document_digest": of_documents(documents)}
            return any(digest is not None and digest != answer.get(name) for name, digest in now.items())

        return has_changed

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
        """The number of answers in the files of jobs."""
        return sum(job_file.read_bytes().count(b"\n") for job_file in self.jobs_folder.glob("*.jsonl"))

    def clear(self) -> None:
        """Remove the folder of the jobs."""
        shutil.rmtree(self.jobs_folder, ignore_errors=True)


class PrintedAnswers:
    """
    Answers on standard output; the next run does not know them.

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
        """All questions, none of which has an answer."""
        return list(self._asked)
