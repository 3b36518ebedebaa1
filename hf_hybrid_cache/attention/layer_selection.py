"""Top-p page selection of one layer, and the numbers of pages that it has read."""

from ..storage import CacheStats
from .key_index import KeyIndex

# Steps that read all pages after too many were needed, before pages are rated again.
_STEPS_BETWEEN = 16
# Query rows of a KV head: with more of them nearly all pages matter to one of them.
_MOST_ROWS = 64


class LayerSelection:
    """
    The selection of one layer: how much the next call may skip, and how much the last ones have read.

    Args:
        layer_idx: index in the model.
        top_p: of a user's `Selection`; 1 for a layer that reads all.
        most: of the same.
        index: index of the layer's keys.
        stats: counters of the cache.
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
        """Whether no page may ever be skipped."""
        return self._top_p == 1

    def reset(self) -> None:
        """Forget the counts of the last calls, and the index."""
        self._dense_steps_left = 0
        self.index.clear()

    def top_p_for(self, rows: int) -> float:
        """Return the attention mass that a call with so many query rows for each KV head must read."""
        return 1.0 if self._dense_steps_left or rows > _MOST_ROWS else self._top_p

    def note(self, tokens_read: int, tokens: int, has_rated: bool) -> None:
        """Note the tokens that a call has read, of all tokens of each KV head, and whether it has rated their pages."""
        if has_rated:
            self._dense_steps_left = _STEPS_BETWEEN - 1 if tokens_read == tokens else 0
        else:
            self._dense_steps_left = max(0, self._dense_steps_left - 1)
        self._stats.note_read(self._layer_idx, tokens_read, tokens)
