"""All options of `chat`, checked together."""

from dataclasses import dataclass
from pathlib import Path

from ..choices import DEFAULT_BITS
from ..console import UsageError
from ..earlier_console import cache_of_ours
from ..files import STANDARD_INPUT
from ..model_options import ModelOptions
from ..runs.answer_options import AnswerOptions
from ..runs.prompt_store import check_keep


@dataclass(frozen=True)
class ChatOptions:
    """
    The document of a conversation, its model and its cache.

    Attributes:
        documents: names of files and folders; empty for the default document.
        load_cache: the file of a document or a conversation; `None` for a new cache.
        keep: the folder that document and conversation are kept in; `None` for no such folder.
        resumes: whether a conversation that is kept there goes on.
        which: the number or the id of that conversation; `None` to choose it.
        model: which model answers.
        cache: one of `CACHES` except "stock"; `None` for the cache that `bits` is for.
        bits: of keys and values in a quantized cache; `None` for its default.
        answer: how answers are generated, until `/set` changes it.
        context: tokens of the documents in the prompt at most; `None` for as many as leave room to talk.
        keeps_history: whether a file keeps what is typed.

    Raises:
        UsageError: options exclude each other, or there is no such cache.
    """

    documents: tuple[str, ...]
    load_cache: Path | None
    keep: Path | None
    resumes: bool
    which: str | None
    model: ModelOptions
    cache: str | None
    bits: int | None
    answer: AnswerOptions
    context: int | None
    keeps_history: bool

    def __post_init__(self) -> None:
        cache_of_ours(self.cache, self.bits)
        if STANDARD_INPUT in self.documents:
            raise UsageError("Questions come from standard input: give the document as a file.")
        given = {
            "--document": self.documents or None,
            "--cache": self.cache,
            "--bits": self.bits,
            "--context": self.context,
        }
        for option, value in given.items():
            if self.load_cache and value is not None:
                raise UsageError(f"--load-cache gives the document and the cache that were saved: drop {option}.")
            if self.resumes and value is not None and option in ("--document", "--context"):
                raise UsageError(f"--resume goes on with the document of the conversation: drop {option}.")
        self._check_kept()

    def _check_kept(self) -> None:
        """Raise an error if options exclude a folder that keeps the conversation, or need it."""
        if self.which is not None and not self.resumes:
            raise UsageError(
                f"{self.which!r} names a conversation to go on with: add --resume, or --document before it."
            )
        if self.keep is None:
            if self.resumes:
                raise UsageError("--resume goes on with a conversation of a folder: name that with --keep.")
            return
        if self.load_cache:
            raise UsageError("--load-cache goes on with a file, --keep with a folder: drop one of them.")
        check_keep(self.answer.prefill_chunk_size)

    @property
    def cache_name(self) -> str:
        """The cache that is used."""
        return cache_of_ours(self.cache, self.bits)

    @property
    def cache_bits(self) -> int:
        """Bits of keys and values in a quantized cache."""
        return self.bits or DEFAULT_BITS
