"""The options that say how an answer is generated."""

from dataclasses import dataclass

from ...prefill_chunks import PREFILL_CHUNK_SIZE
from .sampling import GREEDY, Sampling


@dataclass(frozen=True)
class AnswerOptions:
    """
    Settings for reading a prompt and generating its answer.

    Attributes:
        max_new_tokens: tokens of the answer at most.
        sampling: how tokens are chosen.
        prefill_chunk_size: tokens of the prompt in each forward pass.
    """

    max_new_tokens: int
    sampling: Sampling = GREEDY
    prefill_chunk_size: int = PREFILL_CHUNK_SIZE
