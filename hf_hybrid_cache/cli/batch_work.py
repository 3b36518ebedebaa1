"""What answers the questions of `hf-hybrid-cache batch`, here or in a job."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from .console import UsageError, dtype_of
from .device import compile_kernels, loaded
from .document_questions import BatchOptions, DocumentQuestions
from .weight_options import WeightOptions


@dataclass(frozen=True)
class BatchWork:
    """
    All that is needed to answer questions: picklable.

    Attributes:
        options: how.
        device: as `--device` names it.
        folder: that documents' names are relative to.
        kept_caches: a folder for documents that were computed; `None` keeps none.
    """

    options: BatchOptions
    device: str | None
    folder: Path
    kept_caches: Path | None

    def reader(self, notes: Console) -> DocumentQuestions:
        """
        What answers, with a model that is loaded.

        Raises:
            UsageError: the model takes no text, or cannot be had in this way.
            ModelLoadError: it cannot be had.
        """
        options = self.options
        weights = WeightOptions(options.weights, options.experts, options.expert_bits)
        ready = loaded(options.model, dtype_of(options.dtype), self.device, weights, notes)
        if ready.tokenizer is None:
            raise UsageError(f"{options.model} has no tokenizer, so it takes no text.")
        compile_kernels(ready.model, options.cache == "quantized", notes)
        return DocumentQuestions(ready.model, ready.tokenizer, options, self.folder, self.kept_caches, notes)
