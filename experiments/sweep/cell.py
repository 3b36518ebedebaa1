"""The key of one measurement of the sweep."""

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, order=True)
class Cell:
    """
    One measurement; equal cells are the same one, and it is measured once.

    Attributes:
        model: a name that `hf_hybrid_cache.models.load` knows.
        cache: a key of `caches.CACHES`.
        decode_device: `gpu`; `cpu-attention`, the model on the GPU and attention on the CPU; or `cpu`, the whole decode
            phase on the CPU.
        context_tokens: prompt and new tokens together.
        new_tokens: of these, generated.
        prefill: `real`, or `synthetic` for random keys and values in place of all of the prompt but its last token.
        repeat: counts from 0.
    """

    model: str
    cache: str
    decode_device: str
    context_tokens: int
    new_tokens: int
    prefill: str
    repeat: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.new_tokens < self.context_tokens:
            raise ValueError(
                f"{self.new_tokens:,} new tokens in a context of {self.context_tokens:,}: there must be at least two, "
                "and room for a prompt."
            )

    @property
    def name(self) -> str:
        """The name of its file."""
        return "--".join(str(value).replace("/", "-") for value in asdict(self).values())

    @property
    def prompt_tokens(self) -> int:
        return self.context_tokens - self.new_tokens

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Cell":
        return cls(**{field.name: record["cell"][field.name] for field in fields(cls)})
