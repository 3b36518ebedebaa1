"""Reading only what carries the weight: what the user asks for, and what becomes of it layer by layer."""

from collections.abc import Collection
from dataclasses import dataclass

from ..storage import CacheStats

# Where too much has to be read all is, and every so many steps it is looked whether that has changed.
_STEPS_BETWEEN = 16
# Query rows of a KV head: with more of them nearly all pages matter to one of them.
_MOST_ROWS = 64


@dataclass(frozen=True)
class Selection:
    """
    Reads, of a coded sequence, all keys and then only the pages of 16 tokens that matter to the new tokens.

    At each step and for each KV head the fewest pages are read that, with all that is in full precision, carry a share
    of the attention (Lin et al., 2025, https://arxiv.org/abs/2502.02770, choose by a share too). Nothing is forgotten:
    what is left out now can be read at the next step.

    Args:
        mass: the share, more than 0 and at most 1, on average over the query heads that share a KV head; 1 reads all.
        most: the share of a layer's coded tokens, more than 0 and at most 1, up to which a part is read. Where more
            would have to be, all is, for some steps: rating takes half the time of reading all. More pays where reading
            is slow, such as from a file.
        dense_layers: indices of layers that read all.

    Raises:
        ValueError: an argument is none of these.

    Example:
        >>> cache = QuantizedHybridCache(model.config, bits=4, selection=Selection(mass=0.99))
    """

    mass: float = 0.99
    most: float = 1 / 16
    dense_layers: Collection[int] = ()

    def __post_init__(self) -> None:
        for name, share, whole in (("mass", self.mass, "the attention"), ("most", self.most, "the coded tokens")):
            if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
                raise ValueError(f"{name} must be a number above 0 and at most 1, a share of {whole}, got {share!r}.")
        layers = self.dense_layers if isinstance(self.dense_layers, Collection) else [None]
        if not all(isinstance(index, int) and not isinstance(index, bool) and index >= 0 for index in layers):
            raise ValueError(f"dense_layers must be a collection of indices of layers, got {self.dense_layers!r}.")
        object.__setattr__(self, "dense_layers", frozenset(index for index in layers if index is not None))


class LayerSelection:
    """
    One layer's: how much the next call may leave out, and what the last ones have read.

    Args:
        layer_idx: index in the model.
        mass: see `Selection`; 1 for a layer that reads all.
        most: likewise.
        stats: counted into.
    """

    def __init__(self, layer_idx: int, mass: float, most: float, stats: CacheStats):
        self.most = most
        self._layer_idx = layer_idx
        self._mass = mass
        self._stats = stats
        self._dense_steps_left = 0

    def reset(self) -> None:
        """Forget what the last calls have read."""
        self._dense_steps_left = 0

    def mass_for(self, rows: int) -> float:
        """The share of the attention that a call with so many query rows for each KV head is to read."""
        return 1.0 if self._dense_steps_left or rows > _MOST_ROWS else self._mass

    def note(self, tokens_read: int, tokens: int, has_rated: bool) -> None:
        """Note what a call has read, of how many tokens, counted for each KV head; whether it has rated them."""
        if has_rated:
            self._dense_steps_left = _STEPS_BETWEEN - 1 if tokens_read == tokens else 0
        else:
            self._dense_steps_left = max(0, self._dense_steps_left - 1)
        self._stats.note_read(self._layer_idx, tokens_read, tokens)
