"""Agreement of the processes that share a cache: each does something by itself, and all know how the others fared."""

import contextlib
from collections.abc import Callable
from typing import TypeVar

from ..cache import HybridCache, contents_of
from ..errors import HybridCacheError
from ..processes import OutOfStepError, Peers
from .errors import PrefixStoreError

_T = TypeVar("_T")
_FAILED = -1


class Agreement:
    """
    Lets all processes of a group go on together, or fail together. A single process is alone in its group.

    Args:
        peers: the processes; `None` for a single one.
    """

    def __init__(self, peers: Peers | None):
        self._peers = peers

    @classmethod
    def for_cache(cls, cache: HybridCache) -> "Agreement":
        """Make the agreement of the processes that share a cache."""
        return cls(contents_of(cache).stores.peers if isinstance(cache, HybridCache) else None)

    def numbers(self, act: Callable[[], _T], number_of: Callable[[_T], int]) -> tuple[_T, list[int]]:
        """
        Do something, and tell the others a number. All processes call this.

        Args:
            act: what each does by itself.
            number_of: the number of its result, at least 0.

        Returns:
            the result of `act`, and the numbers of all processes in the order of ranks.

        Raises:
            PrefixStoreError: `act` raised an error in another process.
            LostProcessError: another process has ended, or does not answer.
        """
        try:
            number = number_of(result := act())
        except BaseException:
            with contextlib.suppress(HybridCacheError):  # the first error says more
                self._told(_FAILED)
            raise
        told = self._told(number)
        if _FAILED in told:
            assert self._peers is not None
            rank = self._peers.rank_of_all(told.index(_FAILED))
            raise PrefixStoreError(f"Rank {rank} could not do its part, and says why; so no process goes on.")
        return result, told

    def together(self, act: Callable[[], _T]) -> _T:
        """Do something, and raise an error if it raised one in another process, see `numbers`."""
        return self.numbers(act, lambda result: 0)[0]

    def same(self, act: Callable[[], _T], number_of: Callable[[_T], int]) -> _T:
        """
        Do something, and check that the number of its result is the same in all processes, see `numbers`.

        Raises:
            OutOfStepError: it is not.
        """
        result, told = self.numbers(act, number_of)
        if len(set(told)) > 1:
            raise OutOfStepError(
                "The processes that share a cache have different prompts: call the store in all of them with the same "
                "tokens and options."
            )
        return result

    def _told(self, number: int) -> list[int]:
        """Return the numbers of all processes."""
        return [number] if self._peers is None else self._peers.numbers(number)
