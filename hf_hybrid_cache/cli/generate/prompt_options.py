"""The options that say what `generate` asks the model."""

from dataclasses import dataclass
from pathlib import Path

from ..console import UsageError
from ..distributed.ranks import num_processes
from ..files import STANDARD_INPUT
from ..terminal import is_encodable


@dataclass(frozen=True)
class PromptOptions:
    """
    A question about documents, or a whole prompt.

    Attributes:
        documents: names of files and folders, or `-` for standard input; empty for the default document.
        question: `None` for the default question, or for none where a cache is saved.
        prompt_file: the whole prompt, instead of documents and question.
        context: tokens of the documents in the prompt at most; `None` for as many as fit.
        system: system message; `None` for the one of the chat template.

    Raises:
        UsageError: two options exclude each other, or the question is not text.
    """

    documents: tuple[str, ...] = ()
    question: str | None = None
    prompt_file: Path | None = None
    context: int | None = None
    system: str | None = None

    def __post_init__(self) -> None:
        if num_processes() > 1 and STANDARD_INPUT in self.documents:
            raise UsageError(
                "Standard input is read by one process: with torchrun give the name of a file to --document."
            )
        if self.prompt_file and (self.documents or self.question is not None):
            raise UsageError("--prompt-file is the whole prompt: drop it, or --document and --question.")
        if self.prompt_file and self.context is not None:
            raise UsageError("--prompt-file is used as it is: drop --context, or pass the text as --document.")
        if self.prompt_file and self.system is not None:
            raise UsageError("--prompt-file is used as it is: drop --system.")
        if self.question is not None and not self.question.strip():
            raise UsageError("--question is empty.")
        if self.question is not None and not is_encodable(self.question):
            raise UsageError(f"--question {self.question!r} is not UTF-8 text.")
