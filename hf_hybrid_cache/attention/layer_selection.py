"""Reading only what carries the weight: what one layer may leave out, and what it has read."""

from ..storage import CacheStats
from .key_index import KeyIndex

# Where too much has to be read all is, and every so many steps it is looked whether that has changed.
_STEPS_BETWEEN = 16
# Query rows of a KV head: with more of them nearly all pages matter to one of them.
_MOST_ROWS = 64


class LayerSelection:
    """
    One layer's: how much the next call may leave out, and what the last ones have read.

    Args:
        layer_idx: index in the model.
        top_p: of a user's `Selection`; 1 for a layer that reads all.
        most: likewise.
        index: of the layer's keys.
        stats: counted into.
    """

    def __init__(self, layer_idx: int, top_p: float, most: float, index: KeyIndex, stats: CacheStats):
        self.most = most
        self.index = index
        self._layer_idx = layer_idx
        self._top_p = top_p
        self._stats = stats
        self._dense_steps_left = 0

    @property
    def reads_all(self) -> bool:
        """Whether nothing may ever be left out."""
        return self._top_p == 1

    def reset(self) -> None:
        """Forget what the last calls have read, and the index."""
        self._dense_steps_left = 0
        self.index.clear()

    def top_p_for(self, rows: int) -> float:
        """The attention mass that a call with so many query rows for each KV head must read."""
        return 1.0 if self._dense_steps_left or rows > _MOST_ROWS else self._top_p

    def note(self, tokens_read: int, tokens: int, has_rated: bool) -> None:
        """Note what a call has read, of how many tokens, counted for each KV head; whether it has rated them."""
        if has_rated:
            self._dense_steps_left = _STEPS_BETWEEN - 1 if tokens_read == tokens else 0
        else:
            self._dense_steps_left = max(0, self._dense_steps_left - 1)
        self._stats.note_read(self._layer_idx, tokens_read, tokens)
