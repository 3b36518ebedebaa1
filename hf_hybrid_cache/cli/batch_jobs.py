"""Questions of `hf-hybrid-cache batch` that are shared out to jobs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ..jobs import JobFailedError, Jobs
from .answer_sheet import AnswerSheet
from .answers import AnswerFile, key_of
from .batch_progress import BatchProgress, shown_progress
from .batch_work import BatchWork
from .console import note
from .questions import Question, by_document


def run_jobs(
    work: BatchWork,
    left: Sequence[Question],
    jobs: Jobs,
    sheet: AnswerSheet,
    progress: BatchProgress,
    notes: Console,
) -> None:
    """Share documents out to jobs, and put what they answer into the sheet."""
    documents = list(by_document(left))
    shares = [documents[first :: jobs.at_once] for first in range(min(jobs.at_once, len(documents)))]
    jobs.folder.mkdir(parents=True, exist_ok=True)
    parts = [
        _Part(work, [question for about_one in share for question in about_one], sheet.part(number).absolute())
        for number, share in enumerate(shares)
    ]
    done = progress.done
    endings: dict[int, Any] = {}
    try:
        for number, outcome in jobs.run(parts, lambda: progress.answered(done + sheet.count())):
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
                sheet.add({**question.fields, **ended})


@dataclass(frozen=True)
class _Part:
    """One job: some documents' questions, answered into a file of its own."""

    work: BatchWork
    questions: Sequence[Question]
    path: Path

    def __call__(self) -> None:
        file = AnswerFile(self.path)
        before = file.read()
        file.replace(before)  # after a job that was ended, without a line that was cut off
        answered = {key_of(answer) for answer in before}
        left = [question for question in self.questions if question.key not in answered]
        if not left:
            return
        notes = Console(stderr=True, soft_wrap=True)
        reader = self.work.reader(notes)
        with shown_progress(notes, len(self.questions), len(before)) as progress:
            for answer in reader.answers(left, progress):
                file.add(answer)
                progress.answered(progress.done + 1)
