"""All options of `batch`, by theme."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...jobs import EXECUTORS
from ..choices import DEFAULT_BITS
from ..console import UsageError
from ..earlier_console import check_choice
from ..files import STANDARD_OUTPUT
from ..model_options import ModelOptions
from ..runs.answer_options import AnswerOptions


@dataclass(frozen=True)
class BatchFiles:
    """
    The files that `batch` reads and writes.

    Attributes:
        questions: a file of lines of JSON; names of documents are relative to its folder.
        out: a file for the answers; `-` for standard output.
        keep: the folder that documents are looked for in, and kept in; `None` for no such folder.

    Raises:
        UsageError: the folder of `out` does not exist, or `out` is no regular file.
    """

    questions: Path
    out: Path
    keep: Path | None

    def __post_init__(self) -> None:
        if not self.out.parent.is_dir():
            raise UsageError(f"There is no folder {self.out.parent} for --out.")
        if self.out.exists() and not self.out.is_file() and not self.is_printed:
            raise UsageError(f"--out {self.out} is no regular file: name one, or - for standard output.")

    @property
    def is_printed(self) -> bool:
        """Whether answers go to standard output."""
        return str(self.out) == STANDARD_OUTPUT


@dataclass(frozen=True)
class JobOptions:
    """
    The jobs that answer the questions, if any.

    Attributes:
        executor: one of `EXECUTORS`; `None` for no jobs.
        num_jobs: jobs at once; `None` for one.
        parameters: NAME=VALUE of submitit's.

    Raises:
        UsageError: there is no such executor, or other options need one.
    """

    executor: str | None = None
    num_jobs: int | None = None
    parameters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.executor is None and (self.num_jobs is not None or self.parameters):
            raise UsageError("--jobs and --job-option are for jobs: drop them, or pass --executor local or slurm.")
        if self.executor is not None:
            check_choice("--executor", self.executor, EXECUTORS)


@dataclass(frozen=True)
class BatchOptions:
    """
    The model, the cache and the settings that answer all questions of a file.

    Attributes:
        model: which model answers.
        cache: one of `CACHES` except "stock".
        bits: of keys and values in a quantized cache; `None` for its default.
        answer: how answers are generated.
        context: tokens of a document in the prompt at most; `None` for all, and an error where they do not fit.
        system: system message; `None` for the one of the chat template.
        at_once: questions about one document that are answered together, at most; `None` to choose by memory.

    Raises:
        UsageError: no question would be answered at once.
    """

    model: ModelOptions
    cache: str
    bits: int | None
    answer: AnswerOptions
    context: int | None
    system: str | None
    at_once: int | None = 1

    def __post_init__(self) -> None:
        if self.at_once is not None and self.at_once < 1:
            raise UsageError(f"--at-once must be at least 1, got {self.at_once}; 1 answers one question at a time.")

    @property
    def cache_bits(self) -> int:
        """Bits of keys and values in a quantized cache."""
        return DEFAULT_BITS if self.bits is None else self.bits

    def settings(self) -> dict[str, Any]:
        """The settings that all answers in a file have alike; `at_once` may be another one after an interruption."""
        return {
            "model": self.model.name,
            "cache": self.cache,
            "bits": self.bits,
            "weights": self.model.weights,
            "experts": self.model.experts,
            "expert_bits": self.model.expert_bits,
            "dtype": self.model.dtype,
            "max_new_tokens": self.answer.max_new_tokens,
            "context": self.context,
            "prefill_chunk_size": self.answer.prefill_chunk_size,
            "system": self.system,
            "sampling": asdict(self.answer.sampling),
        }


def parsed_at_once(text: str) -> int | None:
    """
    The number that `--at-once` names; `None` for auto.

    Raises:
        UsageError: the text is no number.
    """
    try:
        return None if text == "auto" else int(text)
    except ValueError:
        raise UsageError(f"--at-once must be a number or auto, got {text!r}.") from None
