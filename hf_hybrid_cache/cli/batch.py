"""`hf-hybrid-cache batch`: many questions about many documents."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..jobs import EXECUTORS, JobFailedError, Jobs, job_parameters
from .console import (
    UsageError,
    cache_of_ours,
    check_choice,
    dtype_of,
    exit_codes,
    note,
    require_one_process,
)
from .device import compile_kernels, loaded
from .document_questions import BatchOptions, DocumentQuestions
from .questions import Answer, AnswerFile, Question, key_of, read_questions
from .weight_options import WeightOptions


def answer_all(
    *,
    questions: Path,
    out: Path,
    executor: str | None,
    jobs: int | None,
    job_option: Sequence[str],
    keep_caches: Path | None,
    model: str,
    cache: str | None,
    bits: int | None,
    weights: int | None,
    experts: str | None,
    expert_bits: int | None,
    max_new_tokens: int,
    context: int | None,
    prefill_chunk_size: int,
    dtype: str | None,
    device: str | None,
) -> None:
    """Do what `batch` says with these options."""
    notes = Console(stderr=True, soft_wrap=True)
    with exit_codes(notes):
        require_one_process("batch")
        name = cache_of_ours(cache, bits)
        WeightOptions(weights, experts, expert_bits)  # refuses before anything is read
        dtype_of(dtype)
        if executor is None and (jobs is not None or job_option):
            raise UsageError("--jobs and --job-option are for jobs: drop them, or pass --executor local or slurm.")
        if executor is not None:
            check_choice("--executor", executor, EXECUTORS)
        parameters = job_parameters(job_option)
        if not out.parent.is_dir():
            raise UsageError(f"There is no folder {out.parent} for --out.")
        asked = read_questions(questions)
        options = BatchOptions(
            model, name, bits, weights, experts, expert_bits, dtype, max_new_tokens, context, prefill_chunk_size
        )
        sheet = _Sheet(out, options)
        sheet.collect()
        left = sheet.settle(asked)
        work = _Work(options, device, questions.parent.absolute(), keep_caches and keep_caches.absolute())
        try:
            with _shown(notes, len(asked)) as progress:
                progress.show(len(asked) - len(left))
                if left and executor is None:
                    for answer in work.answers(left, notes):
                        sheet.add(answer)
                        progress.show(progress.done + 1)
                elif left and executor is not None:
                    started = Jobs(executor, sheet.parts / "logs", jobs or 1, parameters)
                    _run_jobs(work, left, started, sheet, progress, notes)
        except KeyboardInterrupt:
            given = len([answer for answer in sheet.answers() if "error" not in answer])
            note(notes, f"stopped; {given:,} of {len(asked):,} questions are answered, the same command goes on")
            raise
        failed = [answer for answer in sheet.answers() if "error" in answer]
        if not failed:
            sheet.clear()
        for answer in failed:
            note(notes, f"{answer['id']}: {answer['document']}: {answer['error']}")
        note(notes, f"{len(asked) - len(failed):,} of {len(asked):,} questions are answered in {out}")
        if failed:
            raise typer.Exit(1)


@dataclass(frozen=True)
class _Work:
    """What answers questions, wherever: picklable."""

    options: BatchOptions
    device: str | None
    folder: Path
    kept_caches: Path | None

    def answers(self, questions: Sequence[Question], notes: Console) -> Iterator[Answer]:
        options = self.options
        weights = WeightOptions(options.weights, options.experts, options.expert_bits)
        ready = loaded(options.model, dtype_of(options.dtype), self.device, weights, notes)
        model, tokenizer = ready.model, ready.tokenizer
        if tokenizer is None:
            raise UsageError(f"{options.model} has no tokenizer, so it takes no text.")
        compile_kernels(model, options.cache == "quantized", notes)
        reader = DocumentQuestions(model, tokenizer, options, self.folder, self.kept_caches, notes)
        for about_one in _by_document(questions):
            for answer in reader.answers(about_one):
                yield {**answer, "settings": asdict(options)}


@dataclass(frozen=True)
class _Part:
    """One job: some documents' questions, answered into a file of its own."""

    work: _Work
    questions: Sequence[Question]
    path: Path

    def __call__(self) -> None:
        file = AnswerFile(self.path)
        before = file.read()
        file.replace(before)  # after a job that was ended, without a line that was cut off
        answered = {key_of(answer) for answer in before}
        left = [question for question in self.questions if question.key not in answered]
        for answer in self.work.answers(left, Console(stderr=True, soft_wrap=True)) if left else ():
            file.add(answer)


class _Sheet:
    """
    The file of answers, and those of jobs that are still to be put into it.

    Args:
        path: of the file.
        options: those that its answers must have been given with.
    """

    def __init__(self, path: Path, options: BatchOptions):
        self._file = AnswerFile(path)
        self._settings = asdict(options)
        self.parts = path.with_name(f"{path.name}.parts")

    def answers(self) -> list[Answer]:
        return self._file.read()

    def add(self, answer: Answer) -> None:
        self._file.add(answer)

    def part(self, number: int) -> Path:
        return self.parts / f"{number:04}.jsonl"

    def collect(self) -> None:
        """Put the answers of jobs, also of those that were ended, into the file."""
        found = {key_of(answer): answer for answer in self.answers()}
        parts = sorted(self.parts.glob("*.jsonl"))
        for part in parts:
            found |= {key_of(answer): answer for answer in AnswerFile(part).read()}
        if parts:
            self._file.replace(found.values())
        for part in parts:
            part.unlink()

    def settle(self, asked: Sequence[Question]) -> list[Question]:
        """
        Keep what is answered, forget what failed; what is left to be asked.

        Raises:
            UsageError: answers were given with other options, or to other questions.
        """
        known = {question.key for question in asked}
        kept = [answer for answer in self.answers() if "error" not in answer]
        for answer in kept:
            if key_of(answer) not in known:
                raise UsageError(
                    f"{self._file.path} answers {answer['question']!r} about {answer['document']} (id "
                    f"{answer['id']!r}), which is not asked any more. Give another --out, or move that file away."
                )
            given = answer.get("settings", {})
            if other := [name for name, value in self._settings.items() if given.get(name) != value]:
                name = other[0]
                raise UsageError(
                    f"{self._file.path} has answers that were given with {name}={given.get(name)}, not "
                    f"{self._settings[name]}. Give another --out, or the same options."
                )
        self._file.replace(kept)
        answered = {key_of(answer) for answer in kept}
        return [question for question in asked if question.key not in answered]

    def count(self) -> int:
        """Answers that jobs have given so far."""
        return sum(part.read_bytes().count(b"\n") for part in self.parts.glob("*.jsonl"))

    def clear(self) -> None:
        shutil.rmtree(self.parts, ignore_errors=True)


def _run_jobs(
    work: _Work, left: Sequence[Question], jobs: Jobs, sheet: _Sheet, progress: "_Progress", notes: Console
) -> None:
    """Share documents out to jobs, and put what they answer into the sheet."""
    documents = list(_by_document(left))
    shares = [documents[first :: jobs.at_once] for first in range(min(jobs.at_once, len(documents)))]
    jobs.folder.mkdir(parents=True, exist_ok=True)
    parts = [
        _Part(work, [question for about_one in share for question in about_one], sheet.part(number).absolute())
        for number, share in enumerate(shares)
    ]
    done = progress.done
    endings: dict[int, Any] = {}
    try:
        for number, outcome in jobs.run(parts, lambda: progress.show(done + sheet.count())):
            endings[number] = outcome
    finally:
        sheet.collect()
    failures = {number: outcome for number, outcome in endings.items() if isinstance(outcome, JobFailedError)}
    answered = {key_of(answer) for answer in sheet.answers()}
    for number, failure in failures.items():
        note(notes, f"job {number}: {failure} (what it printed is in {jobs.folder})")
        for question in parts[number].questions:
            if question.key not in answered:
                ended = {"error": f"the job ended before: {failure}", "settings": asdict(work.options)}
                sheet.add({**asdict(question), **ended})


def _by_document(questions: Iterable[Question]) -> Iterator[list[Question]]:
    """Questions about the same document together, in the order of the first of them."""
    together: dict[str, list[Question]] = {}
    for question in questions:
        together.setdefault(question.document, []).append(question)
    yield from together.values()


@dataclass
class _Progress:
    """How many questions are answered: a bar on a terminal, elsewhere a line now and then."""

    bar: Progress
    notes: Console
    total: int
    done: int = 0

    def show(self, done: int) -> None:
        before, self.done = self.done, done
        self.bar.update(self.bar.task_ids[0], completed=done)
        tenth = max(1, self.total // 10)
        if not self.notes.is_interactive and done // tenth > before // tenth:
            note(self.notes, f"{done:,} of {self.total:,}")


@contextmanager
def _shown(notes: Console, total: int) -> Iterator[_Progress]:
    columns = (TextColumn("questions"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=notes, disable=not notes.is_interactive) as bar:
        bar.add_task("questions", total=total)
        yield _Progress(bar, notes, total)
