"""Loading what answers the questions of a batch, here or in a job."""

from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from ...prefix_store import PrefixStore
from ..console import UsageError, note
from ..loading import compile_kernels, load_model
from ..runs.prompt_store import PromptStore
from ..runs.prompts import chat_text
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
        keep: the folder that documents are looked for in, and kept in; `None` for no such folder.
        num_jobs: jobs that share the memory of this machine.
    """

    options: BatchOptions
    folder: Path
    keep: Path | None
    num_jobs: int = 1

    def reader(self, notes: Console) -> DocumentQuestions:
        """
        Load the model that answers.

        Raises:
            UsageError: the model takes no text, or does not fit the options or the machine.
            ModelLoadError: the model cannot be loaded.
            PromptError: the chat template refuses a question, or the system message.
            PrefixFolderError: the folder of prompts cannot be used.
        """
        prompts = None if self.keep is None else PrefixStore(self.keep)
        ready = load_model(self.options.model, notes)
        if ready.tokenizer is None:
            raise UsageError(f"{self.options.model.name} has no tokenizer, so it takes no text.")
        chat_text(ready.tokenizer, ".", self.options.system)  # what is refused here no question could have
        compile_kernels(ready.model, self.options.cache == "quantized", notes)
        options = self.options
        if options.at_once != 1 and not can_answer_together(ready.model):
            note(notes, "not all layers of this model attend to all tokens: its questions are answered one at a time")
            options = replace(options, at_once=1)
        at_once = QuestionsAtOnce(ready.model, options, self.num_jobs, notes)
        store = None if prompts is None else PromptStore(prompts, ready.tokenizer, notes)
        return DocumentQuestions(ready.model, ready.tokenizer, options, at_once, self.folder, store, notes)
