"""One layer with a sliding window, or with chunks, of a hybrid cache."""

from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from ..storage import KVShape, OneSequence, RecentStates, TokenStore, WindowStore
from .errors import NoCheckpointError
from .hybrid_layer import HybridLayer, checked_removal, require_no_gradients
from .layer_stores import LayerStores, Place


class WindowLayer(HybridLayer):
    """
    Keys and values of one layer whose queries see the last tokens only.

    It stands in for transformers' `DynamicSlidingWindowLayer`: `update` returns the states that the new tokens see, and
    `keys` and `values` are those that later tokens will. Which of them a query sees is the mask's to say, so layers
    whose attention is in chunks are the same.

    Args:
        layer_idx: index in the model, for messages.
        stores: where the layer gets its store.
        window: tokens that a query sees, with itself.

    Attributes:
        sliding_window: the window.
    """

    is_sliding = True
    shares_copies = False

    def __init__(self, layer_idx: int, stores: LayerStores, window: int):
        super().__init__(layer_idx, stores)
        self.sliding_window = window
        self._records_past = False

    @property
    def record_past(self) -> bool:
        """Whether tokens are kept until the next `crop`, which may then remove any of them."""
        return self._records_past

    @record_past.setter
    def record_past(self, records: bool) -> None:
        self._records_past = records
        if isinstance(self.store, WindowStore):
            self.store.keeps_all = records

    def activate_past_recording(self) -> None:
        """Keep all tokens that come until the next `crop`, as assisted decoding asks for."""
        self.record_past = True

    def place_for(self, shape: KVShape) -> Place:
        return self._stores.place_of_window(self.sliding_window, shape)

    def start(self, *args: Any) -> OneSequence:
        new = super().start(*args)
        self.record_past = self._records_past
        return new

    def set(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """
        Replace the stored states.

        Raises:
            ValueError: they do not fit each other, or are not as many as the window leaves of the tokens.
            RuntimeError: they require gradients.
            HostMemoryError: host memory would not suffice.
        """
        self.usable_store()
        given, num_tokens = KVShape.of(keys, values), self.get_seq_length() or keys.shape[2]
        if keys.shape[2] != min(num_tokens, self.sliding_window - 1):
            raise ValueError(
                f"Layer {self.layer_idx} has {num_tokens:,} tokens and a window of {self.sliding_window:,}, so it "
                f"takes the states of the last {min(num_tokens, self.sliding_window - 1):,}, got {keys.shape[2]:,}. "
                "Remove tokens with crop, or forget all with reset()."
            )
        self._stores.num_edits += 1
        self._stores.drop_checkpoints()
        self._start_with(given, num_tokens, keys, values)

    def _start_with(self, shape: KVShape, num_tokens: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        require_no_gradients(keys, values)

        def fill(new: TokenStore) -> None:
            assert isinstance(new, WindowStore)
            new.put(num_tokens, keys, values)

        self.start(shape, fill)

    def get_seq_length(self) -> int:
        """Return the number of tokens of the sequence, of which the last ones are stored."""
        return 0 if self.store is None else self.store.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys that a mask must cover when `query_length` tokens come next."""
        num_tokens = self.get_seq_length()
        seen = min(num_tokens, self.sliding_window - 1)
        return seen + query_length, num_tokens - seen

    def get_max_length(self) -> int:
        """Return the window."""
        return self.sliding_window

    def can_go_back_to(self, num_tokens: int) -> bool:
        """Return whether `crop` can leave the first `num_tokens`."""
        store = self.store
        return not isinstance(store, WindowStore) or store.can_go_back_to(num_tokens)

    def crop(self, tokens_to_remove: int) -> None:
        """
        Remove the last `-tokens_to_remove` tokens, or all if there are not that many.

        The last 64 tokens that came can be removed, and all that came since `activate_past_recording`, if that is on.

        Raises:
            NoCheckpointError: what is before them was given back.
            ValueError: a positive number, which older versions of transformers took for the length to keep.
        """
        num_tokens = self.get_seq_length()
        removal = checked_removal(tokens_to_remove, num_tokens)
        left = max(0, num_tokens + removal)
        store = self.usable_store()
        if not self.can_go_back_to(left):
            assert isinstance(store, WindowStore)
            raise NoCheckpointError(
                f"Layer {self.layer_idx} cannot go back by {num_tokens - left:,} tokens to {left:,}: its window of "
                f"{self.sliding_window:,} tokens was given back up to token {store.first:,}. It can go back by "
                f"{num_tokens - store.first - self.sliding_window + 1:,}. Call activate_past_recording() before tokens "
                "come that may be removed."
            )
        super().crop(removal)

    def recent_states(self) -> RecentStates | None:
        """Copy the states that later tokens see; `None` if there are none."""
        store = self.usable_store()
        if store is None or not store.num_tokens:
            return None
        states = store.read_copy()
        return RecentStates(store.num_tokens - states[0].shape[2], None, states)

    def go_back(self, num_tokens: int, recent: RecentStates | None) -> None:
        if recent is None:
            self.crop(-self.get_seq_length())
            return
        store = self.usable_store()
        assert isinstance(store, WindowStore)
        self._stores.drop_checkpoints(after=num_tokens)
        store.put(num_tokens, *recent.states)

    def as_stock(self) -> DynamicSlidingWindowLayer:
        """Return transformers' layer with the same states, which files have: they do not depend on the device."""
        stock, store = DynamicSlidingWindowLayer(self.sliding_window), self.store
        if store is not None and store.num_tokens:
            keys, values = store.read_copy()
            stock.lazy_initialization(keys, values)
            stock.keys, stock.values, stock.cumulative_length = keys, values, store.num_tokens
        return stock

    def take_stock(self, stock: DynamicSlidingWindowLayer) -> None:
        """
        Take the states of transformers' layer.

        Raises:
            ValueError: it does not hold what a layer with this window does.
        """
        if not stock.is_initialized:
            return
        keys, values, num_tokens = stock.keys, stock.values, stock.cumulative_length
        if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor):
            raise ValueError(f"layer {self.layer_idx} has no keys or values")
        if not min(num_tokens, self.sliding_window - 1) <= keys.shape[2] <= num_tokens:
            raise ValueError(
                f"layer {self.layer_idx} has {keys.shape[2]:,} states of {num_tokens:,} tokens, and a window of "
                f"{self.sliding_window:,}"
            )
        self._start_with(KVShape.of(keys, values), num_tokens, keys, values)


def window_of(layer: Any) -> int | None:
    """Return the window of a layer of transformers' own that a `WindowLayer` stands for; `None` for any other."""
    # With a window of one token transformers' layer keeps all.
    return layer.sliding_window if type(layer) is DynamicSlidingWindowLayer and layer.sliding_window > 1 else None


def stock_form(layer: Any) -> Any:
    """Return a layer as files have it: of a `WindowLayer` transformers' own, of others itself."""
    return layer.as_stock() if isinstance(layer, WindowLayer) else layer
