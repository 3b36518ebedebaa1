"""The budget of host memory, and the error that is raised before memory runs out."""

import copy
import warnings
import weakref
from bisect import bisect_left

from ...errors import HybridCacheError
from .growth import grown_capacity, least_capacity
from .memory_limits import Limit, tightest_limit


class HostMemoryError(HybridCacheError, MemoryError):
    """Host memory would not suffice. The error is raised before anything is allocated or changed."""


def available_host_bytes() -> int:
    """
    Return the bytes that can be allocated without swapping.

    They are the least of what the system reports free, and what a container and limits on the process leave.
    """
    return tightest_limit().free


class ExpectedLength:
    """
    The expected length of a cache, and one warning if memory ends before it.

    Args:
        num_tokens: tokens that will be stored; 0 if that is not known.
    """

    def __init__(self, num_tokens: int = 0):
        self.num_tokens = num_tokens
        self.has_warned = False

    def warn(self, last_token: int, limit: Limit) -> None:
        """Warn that memory ends at `last_token`."""
        self.has_warned = True
        of_expected = f" of {self.num_tokens:,} (max_length)" if self.num_tokens > last_token else ""
        warnings.warn(
            f"Host memory will end at about token {last_token:,}{of_expected}: {limit.free / 2**30:.2f} GiB are "
            f"free{limit.where}. Stop generating before, free memory, or use a cache with fewer bits. Tokens "
            "that are stored stay, and the cache can be used on, also after an error.",
            stacklevel=2,
        )


class HostBudget:
    """
    Host memory that the layers of one cache hold.

    A model's layers grow one after the other to the same length, so the first that grows asks for all of them: a
    context that does not fit is refused before its first layer is stored, not in the middle of the model.

    Args:
        num_stores: number of layers that will hold tokens in host memory.
        entry_tokens: tokens of an entry, 64 for packed blocks.
        expected_length: expected length of the cache. The first tokens ask for memory for all of it, and it is compared
            with free memory whenever layers grow. `None` if layers soon stop growing.
    """

    def __init__(self, num_stores: int, entry_tokens: int = 1, expected_length: ExpectedLength | None = None):
        self.num_stores = num_stores
        self.entry_tokens = entry_tokens
        self.expected_length = expected_length
        self._held: weakref.WeakKeyDictionary[object, tuple[int, int]] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: dict) -> "HostBudget":
        """Return an empty budget, in which the copies of the layers note themselves."""
        return HostBudget(self.num_stores, self.entry_tokens, copy.deepcopy(self.expected_length, memo))

    def grow(self, store: object, num_tokens: int, bytes_per_token: int, moved_bytes: int = 0) -> int:
        """
        Check that all layers could hold `num_tokens` and some more, and note that `store` will.

        Args:
            store: store of one layer.
            num_tokens: tokens that it must hold.
            bytes_per_token: bytes of one token, over the whole batch.
            moved_bytes: bytes that are held twice while the store grows.

        Returns:
            Tokens that there is memory for: a chunk more than `num_tokens`, or only what fills whole blocks. Where
            memory will end within one more chunk, or before what is expected, a warning says so, once for a cache.

        Raises:
            HostMemoryError: the layers would need more than is free, or nothing is held yet and the expected length
                would; nothing is noted then.
        """

        def need(tokens: int) -> int:
            return self._missing_bytes(store, tokens, bytes_per_token) + moved_bytes

        limit = tightest_limit()
        free = limit.free
        ahead = grown_capacity(num_tokens, self.entry_tokens)
        granted = ahead if need(ahead) <= free else least_capacity(num_tokens, self.entry_tokens)
        if need(granted) > free:
            raise _refusal(need(granted), f"{num_tokens * self.entry_tokens:,} tokens need", limit)
        if self.expected_length is not None:
            expected_tokens = self.expected_length.num_tokens
            expected = expected_tokens // self.entry_tokens
            if need(expected) > free and not self._held:
                raise _refusal(need(expected), f"{expected_tokens:,} tokens (max_length) need", limit)
            horizon = max(grown_capacity(ahead, self.entry_tokens), expected)
            if need(horizon) > free and not self.expected_length.has_warned:
                beyond = range(granted + 1, horizon)
                fitting = granted + bisect_left(beyond, True, key=lambda tokens: need(tokens) > free)
                self.expected_length.warn(fitting * self.entry_tokens, limit)
        self.note(store, granted, bytes_per_token)
        return granted

    def note(self, store: object, num_tokens: int, bytes_per_token: int) -> None:
        """Note how many tokens `store` holds, without a check."""
        self._held[store] = (num_tokens, bytes_per_token)

    def forget(self, store: object) -> None:
        """Note that `store` holds nothing, as if it had never asked."""
        self._held.pop(store, None)

    def _missing_bytes(self, store: object, num_tokens: int, bytes_per_token: int) -> int:
        """Return the bytes that all layers lack to hold `num_tokens`."""
        held = {other: size for other, size in self._held.items() if other is not store}
        held_tokens, held_bytes_per_token = self._held.get(store, (0, bytes_per_token))
        need = num_tokens * bytes_per_token - held_tokens * held_bytes_per_token
        need += sum(max(0, num_tokens - tokens) * size for tokens, size in held.values())
        return need + max(0, self.num_stores - len(held) - 1) * num_tokens * bytes_per_token


def require_host_bytes(num_bytes: int, purpose: str) -> None:
    """
    Check that `num_bytes` more can be allocated.

    Raises:
        HostMemoryError: they cannot; the message begins with `purpose`, such as "5 tokens need".
    """
    limit = tightest_limit()
    if num_bytes > limit.free:
        raise _refusal(num_bytes, purpose, limit)


def _refusal(num_bytes: int, purpose: str, limit: Limit) -> HostMemoryError:
    return HostMemoryError(
        f"{purpose} {num_bytes / 2**30:.2f} GiB more host memory and {limit.free / 2**30:.2f} GiB are free"
        f"{limit.where}. Use a shorter context, a smaller batch or fewer beams, or free memory first."
    )
