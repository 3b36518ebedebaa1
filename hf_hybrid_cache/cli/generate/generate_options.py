"""All options of `generate`, checked together."""

from dataclasses import dataclass

from ..console import UsageError
from ..model_options import ModelOptions
from ..runs.answer_options import AnswerOptions
from ..runs.prompt_store import check_keep
from ..runs.sampling import GREEDY
from .cache_choice import CacheChoice, option_of
from .cache_files import CacheFiles
from .prompt_options import PromptOptions


@dataclass(frozen=True)
class GenerateOptions:
    """
    The prompt, the model and the cache, and the form in which the answer is printed.

    Attributes:
        prompt: what the model is asked.
        files: where its cache is saved or loaded.
        cache: which cache is used.
        model: which model answers.
        answer: how the answer is generated.
        as_json: whether the answer is printed as JSON.

    Raises:
        UsageError: options exclude each other, or one is missing.
    """

    prompt: PromptOptions
    files: CacheFiles
    cache: CacheChoice
    model: ModelOptions
    answer: AnswerOptions
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.files.option is not None:
            self._check_file(self.files.option)
        if self.files.load:
            self._check_loaded()
        if self.files.keep:
            check_keep(self.answer.prefill_chunk_size)
        if self.cache.compare and self.answer.sampling != GREEDY:
            raise UsageError("--compare takes the likeliest token each time: drop the options for sampling.")
        if self.prompt.question is None:
            self._check_without_question()

    def _check_file(self, option: str) -> None:
        """Raise an error if options exclude a file for the cache."""
        if self.cache.compare:
            raise UsageError(f"{option} is for one cache, --compare for all: drop one of them.")
        if self.prompt.prompt_file and not self.files.keep:
            raise UsageError(f"{option} tells the document from the question: use --document instead of --prompt-file.")
        if not self.files.load and self.cache.cache == "stock":
            raise UsageError("--cache stock is transformers' own, which cannot be saved: use dynamic.")

    def _check_loaded(self) -> None:
        """Raise an error if a loaded cache would ignore an option."""
        if self.cache.cache:
            raise UsageError("--load-cache gives the cache that was saved: drop --cache.")
        for field in self.cache.given:
            raise UsageError(f"--load-cache gives the cache that was saved: drop {option_of(field)}.")
        if self.prompt.system is not None:
            raise UsageError("--load-cache gives what comes before: drop --system.")

    @property
    def only_keeps(self) -> bool:
        """Whether a document is kept for later questions, and nothing is asked."""
        if self.prompt.question is not None:
            return False
        return bool(self.files.save or (self.files.keep and self.prompt.documents))

    def _check_without_question(self) -> None:
        """Raise an error if a question is missing."""
        if self.as_json and self.only_keeps:
            raise UsageError("--json is of an answer: ask something with --question, or drop it.")
        if self.files.load:
            raise UsageError("Ask something about the saved document: --question.")
        if self.prompt.documents and not self.only_keeps:
            raise UsageError("Ask something about the document: --question. --keep keeps it for later questions.")
