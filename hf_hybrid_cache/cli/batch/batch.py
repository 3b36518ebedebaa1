"""`hf-hybrid-cache batch`: many questions about many documents."""

from collections.abc import Sequence

import typer
from rich.console import Console

from ...jobs import Jobs, job_parameters
from ..console import UsageError, note
from .answer_sheet import AnswerSheet, PrintedAnswers
from .answers import key_of
from .batch_jobs import run_jobs
from .batch_options import BatchFiles, BatchOptions, JobOptions
from .batch_progress import shown_progress
from .batch_work import BatchWork
from .questions import Question, read_questions


def answer_all(options: BatchOptions, files: BatchFiles, job_options: JobOptions, notes: Console) -> None:
    """
    Answer the questions that have no answer yet, here or in jobs.

    Args:
        options: how questions are answered.
        files: where questions come from and answers go.
        job_options: whether jobs answer.
        notes: receives remarks.

    Raises:
        UsageError: an option does not fit, or the questions or the answers there cannot be read.
        JobsError: jobs cannot be started.
        ModelLoadError: the model cannot be loaded.
        PrefixFolderError: the folder of `--keep` cannot be used.
        typer.Exit: a question was not answered; the exit code is 1.
    """
    if job_options.executor is not None and files.is_printed:
        raise UsageError(
            "--out - is standard output, and what jobs answer goes on from a file: name one, or drop --executor."
        )
    parameters = job_parameters(job_options.parameters)
    questions = read_questions(files.questions)
    folder, keep = files.questions.parent.absolute(), files.keep and files.keep.expanduser().absolute()
    num_jobs = job_options.num_jobs or 1
    work = BatchWork(options, folder, keep, num_jobs if job_options.executor == "local" else 1)
    if files.is_printed:
        _answer_all(work, None, PrintedAnswers(questions), questions, files, notes)
        return
    sheet = AnswerSheet(files.out, options.settings(), questions, folder)
    jobs = None
    if job_options.executor is not None:
        jobs = Jobs(job_options.executor, sheet.jobs_folder / "logs", num_jobs, parameters)
    with sheet.alone():
        sheet.collect()
        _answer_all(work, jobs, sheet, questions, files, notes)


def _answer_all(
    work: BatchWork,
    jobs: Jobs | None,
    sheet: AnswerSheet | PrintedAnswers,
    questions: Sequence[Question],
    files: BatchFiles,
    notes: Console,
) -> None:
    """Answer the questions that have no answer yet, and remark how many have one before and after."""
    unanswered = sheet.settle()
    _report_old_answers(sheet, questions, unanswered, notes)
    try:
        _answer(work, jobs, sheet, questions, unanswered, notes)
    except KeyboardInterrupt:
        answered = len([answer for answer in sheet.answers() if "error" not in answer])
        way_on = "a file as --out goes on where it was" if files.is_printed else "the same command goes on"
        note(notes, f"stopped; {answered:,} of {len(questions):,} questions are answered, {way_on}")
        raise
    _report_new_answers(sheet, questions, files, notes)


def _answer(
    work: BatchWork,
    jobs: Jobs | None,
    sheet: AnswerSheet | PrintedAnswers,
    questions: Sequence[Question],
    unanswered: Sequence[Question],
    notes: Console,
) -> None:
    """Answer the unanswered ones of the questions in jobs, or here where `jobs` is `None`."""
    if not unanswered:
        return
    done = len(questions) - len(unanswered)
    if jobs is not None and isinstance(sheet, AnswerSheet):
        with shown_progress(notes, len(questions), done) as progress:
            run_jobs(work, unanswered, jobs, sheet, progress, notes)
        return
    reader = work.reader(notes)
    with shown_progress(notes, len(questions), done) as progress:
        for answer in reader.answers(unanswered, progress):
            sheet.add(answer)
            progress.answered(progress.done + 1)


def _report_old_answers(
    sheet: AnswerSheet | PrintedAnswers, questions: Sequence[Question], unanswered: Sequence[Question], notes: Console
) -> None:
    """Remark how many answers the file has already."""
    if isinstance(sheet, PrintedAnswers):
        return
    if others := sheet.num_others():
        note(notes, f"answers to questions that are not asked any more: {others:,}; they stay in {sheet.path}")
    if sheet.num_changed:
        changed = f"{sheet.num_changed:,} of {len(questions):,} questions"
        note(notes, f"{changed} are asked again, because a document or the model has changed since")
    if len(unanswered) < len(questions):
        note(notes, f"{len(questions) - len(unanswered):,} of {len(questions):,} questions were answered before")


def _report_new_answers(
    sheet: AnswerSheet | PrintedAnswers, questions: Sequence[Question], files: BatchFiles, notes: Console
) -> None:
    """
    Remark how many questions are answered, and why others are not.

    Raises:
        typer.Exit: a question was not answered; the exit code is 1.
    """
    lines = {question.key: question.line for question in questions}
    failed = [answer for answer in sheet.answers() if "error" in answer]
    if not failed and isinstance(sheet, AnswerSheet):
        sheet.clear()
    for answer in failed:
        note(notes, f"{files.questions}, line {lines[key_of(answer)]}: {answer['document']}: {answer['error']}")
    where = "" if files.is_printed else f" in {files.out}"
    note(notes, f"{len(questions) - len(failed):,} of {len(questions):,} questions are answered{where}")
    if failed:
        raise typer.Exit(1)
