"""`hf-hybrid-cache batch`: many questions about many documents."""

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from ..jobs import EXECUTORS, Jobs, job_parameters
from .answer_sheet import AnswerSheet, PrintedAnswers
from .answers import key_of
from .batch_jobs import run_jobs
from .batch_progress import shown_progress
from .batch_work import BatchWork
from .console import UsageError, cache_of_ours, check_choice, dtype_of, exit_codes, note, require_one_process
from .document_questions import BatchOptions
from .questions import Question, read_questions
from .sampling import Sampling
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
    system: str | None,
    temperature: float,
    top_p: float | None,
    repetition_penalty: float | None,
    seed: int | None,
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
        is_printed = str(out) == "-"
        if executor is not None and is_printed:
            raise UsageError(
                "--out - is standard output, and what jobs answer goes on from a file: name one, or drop --executor."
            )
        parameters = job_parameters(job_option)
        if not out.parent.is_dir():
            raise UsageError(f"There is no folder {out.parent} for --out.")
        asked = read_questions(questions)
        options = BatchOptions(
            model,
            name,
            bits,
            weights,
            experts,
            expert_bits,
            dtype,
            max_new_tokens,
            context,
            prefill_chunk_size,
            system,
            Sampling(temperature, top_p, repetition_penalty, seed),
        )
        sheet = PrintedAnswers(asked) if is_printed else AnswerSheet(out, options, asked)
        if isinstance(sheet, AnswerSheet):
            sheet.collect()
        left = sheet.settle()
        _tell_what_is_there(sheet, asked, left, notes)
        work = BatchWork(options, device, questions.parent.absolute(), keep_caches and keep_caches.absolute())
        done = len(asked) - len(left)
        try:
            if left and executor is not None and isinstance(sheet, AnswerSheet):
                started = Jobs(executor, sheet.parts / "logs", jobs or 1, parameters)
                with shown_progress(notes, len(asked), done) as progress:
                    run_jobs(work, left, started, sheet, progress, notes)
            elif left:
                reader = work.reader(notes)
                with shown_progress(notes, len(asked), done) as progress:
                    for answer in reader.answers(left, progress):
                        sheet.add(answer)
                        progress.answered(progress.done + 1)
        except KeyboardInterrupt:
            given = len([answer for answer in sheet.answers() if "error" not in answer])
            way_on = "a file as --out goes on where it was" if is_printed else "the same command goes on"
            note(notes, f"stopped; {given:,} of {len(asked):,} questions are answered, {way_on}")
            raise
        _tell_how_it_ended(sheet, asked, questions, out, notes)


def _tell_what_is_there(
    sheet: AnswerSheet | PrintedAnswers, asked: Sequence[Question], left: Sequence[Question], notes: Console
) -> None:
    if isinstance(sheet, PrintedAnswers):
        return
    if others := sheet.num_others():
        note(notes, f"answers to questions that are not asked any more: {others:,}; they stay in {sheet.path}")
    if len(left) < len(asked):
        note(notes, f"{len(asked) - len(left):,} of {len(asked):,} questions were answered before")


def _tell_how_it_ended(
    sheet: AnswerSheet | PrintedAnswers, asked: Sequence[Question], questions: Path, out: Path, notes: Console
) -> None:
    """
    Say what was answered and what was not.

    Raises:
        typer.Exit: with 1, if a question was not answered.
    """
    lines = {question.key: question.line for question in asked}
    failed = [answer for answer in sheet.answers() if "error" in answer]
    if not failed and isinstance(sheet, AnswerSheet):
        sheet.clear()
    for answer in failed:
        note(notes, f"{questions}, line {lines[key_of(answer)]}: {answer['document']}: {answer['error']}")
    where = "" if isinstance(sheet, PrintedAnswers) else f" in {out}"
    note(notes, f"{len(asked) - len(failed):,} of {len(asked):,} questions are answered{where}")
    if failed:
        raise typer.Exit(1)
