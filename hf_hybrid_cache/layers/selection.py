"""The user's options of top-p page selection. Plain numbers, no tensors."""

from collections.abc import Collection
from dataclasses import dataclass

from ..scalars import as_float
from .placement import layer_indices


@dataclass(frozen=True)
class Selection:
    """
    Reads an index of all keys, and then only the pages of 16 tokens that matter to the new tokens.

    The index is a code of 2 bits for each number of a key, beside the stored states. At each step and for each KV head
    the fewest pages are read that, with the first and the last tokens, carry a share of the attention (Lin et al.,
    2025, https://arxiv.org/abs/2502.02770, choose by a share too). Nothing is forgotten: a page that is skipped now can
    be read at the next step.

    Args:
        top_p: the share, more than 0 and at most 1, on average over the query heads that share a KV head; 1 reads all.
            `None` for shares without a measured loss: 0.995 in full precision, 0.998 of codes.
        most: the largest share of a layer's indexed tokens, more than 0 and at most 1, that is read as a part. If more
            is needed, all tokens are read for some steps. `None` for shares that are faster than reading all: a quarter
            in full precision, an eighth of codes. More pays if reading is slow, such as from a file.
        dense_layers: indices of layers that read all.

    Raises:
        ValueError: an argument is none of these.

    Example:
        >>> cache = DynamicHybridCache(model.config, selection=Selection())
    """

    top_p: float | None = None
    most: float | None = None
    dense_layers: Collection[int] = ()

    def __post_init__(self) -> None:
        for name, share, whole in (("top_p", self.top_p, "the attention"), ("most", self.most, "the indexed tokens")):
            if share is None:
                continue
            number = as_float(share)
            if number is None or not 0 < number <= 1:
                raise ValueError(f"{name} must be a number above 0 and at most 1, a share of {whole}, got {share!r}.")
            object.__setattr__(self, name, number)
        layers = layer_indices(self.dense_layers)
        if layers is None:
            raise ValueError(f"dense_layers must be a collection of indices of layers, got {self.dense_layers!r}.")
        object.__setattr__(self, "dense_layers", layers)
