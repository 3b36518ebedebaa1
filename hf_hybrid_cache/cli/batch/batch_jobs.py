"""Jobs that answer the questions of a batch, each those about some of the documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ...jobs import JobFailedError, Jobs
from ..console import note
from .answer_sheet import AnswerSheet
from .answers import AnswerFile, key_of
from .batch_progress import BatchProgress, shown_progress
from .batch_work import BatchWork
from .questions import Question, by_document


def run_jobs(
    work: BatchWork,
    unanswered: Sequence[Question],
    jobs: Jobs,
    sheet: AnswerSheet,
    progress: BatchProgress,
    notes: Console,
) -> None:
    """
    Divide documents among jobs, and put their answers into the sheet.

    Args:
        work: what a job needs to answer.
        unanswered: the questions.
        jobs: start the jobs.
        sheet: receives answers, and errors of jobs that failed.
        progress: shows how many questions are answered.
        notes: receives remarks on jobs that failed.
    """
    documents = list(by_document(unanswered))
    num_jobs = min(jobs.at_once, len(documents))
    jobs.folder.mkdir(parents=True, exist_ok=True)
    all_work = [
        _JobWork(
            work,
            [question for about_one in documents[number :: jobs.at_once] for question in about_one],
            sheet.job_file(number).absolute(),
        )
        for number in range(num_jobs)
    ]
    done = progress.done
    failures: dict[int, JobFailedError] = {}
    try:
        for number, outcome in jobs.run(all_work, lambda: progress.answered(done + sheet.count())):
            if isinstance(outcome, JobFailedError):
                failures[number] = outcome
    finally:
        sheet.collect()
    answered = {key_of(answer) for answer in sheet.answers()}
    for number, failure in failures.items():
        note(notes, f"job {number}: {failure} (what it printed is in {jobs.folder})")
        for question in all_work[number].questions:
            if question.key not in answered:
                error = {"error": f"the job ended before: {failure}", "settings": work.options.settings()}
                sheet.add({**question.fields, **error})


@dataclass(frozen=True)
class _JobWork:
    """Answers the questions about some documents, in one job."""

    work: BatchWork
    questions: Sequence[Question]
    path: Path

    def __call__(self) -> None:
        """Write the answers that the job's file lacks."""
        file = AnswerFile(self.path)
        before = file.read()
        file.replace(before)  # a job that was ended before may have left half of a line
        answered = {key_of(answer) for answer in before}
        unanswered = [question for question in self.questions if question.key not in answered]
        if not unanswered:
            return
        notes = Console(stderr=True, soft_wrap=True)
        reader = self.work.reader(notes)
        with shown_progress(notes, len(self.questions), len(before)) as progress:
            for answer in reader.answers(unanswered, progress):
                file.add(answer)
                progress.answered(progress.done + 1)
