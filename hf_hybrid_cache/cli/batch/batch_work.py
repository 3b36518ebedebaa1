"""Loading what answers the questions of a batch, here or in a job."""

from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from ..console import UsageError, note
from ..loading.device import compile_kernels, load_model
from .at_once import QuestionsAtOnce
from .batch_options import BatchOptions
from .document_questions import DocumentQuestions
from .following_questions import can_answer_together


@dataclass(frozen=True)
class BatchWork:
    """
    All that a job needs to answer questions; can be pickled.

    Attributes:
        options: how questions are answered.
        folder: names of documents are relative to it.
        kept_caches: a folder for the caches of documents; `None` keeps none.
        num_jobs: jobs that share the memory of this machine.
    """

    options: BatchOptions
    folder: Path
    kept_caches: Path | None
    num_jobs: int = 1

    def reader(self, notes: Console) -> DocumentQuestions:
        """
        Load the model that answers.

        Raises:
            UsageError: the model takes no text, or does not fit the options or the machine.
            ModelLoadError: the model cannot be loaded.
        """
        ready = load_model(self.options.model, notes)
        if ready.tokenizer is None:
            raise UsageError(f"{self.options.model.name} has no tokenizer, so it takes no text.")
        compile_kernels(ready.model, self.options.cache == "quantized", notes)
        options = self.options
        if options.at_once != 1 and not can_answer_together(ready.model):
            note(notes, "not all layers of this model attend to all tokens: its questions are answered one at a time")
            options = replace(options, at_once=1)
        at_once = QuestionsAtOnce(ready.model, options, self.num_jobs, notes)
        return DocumentQuestions(ready.model, ready.tokenizer, options, at_once, self.folder, self.kept_caches, notes)
