"""Processes that run the same model, send tensors to each other, and go on or fail together."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import distributed

from .errors import HybridCacheError

# Waking up takes longer than most messages, so a process polls for a while before it sleeps.
_SECONDS_AWAKE = 0.01
_PAUSE = 0.001
_T = TypeVar("_T")
_FAILED = -1
# Not on every system.
_let_others_run = getattr(os, "sched_yield", lambda: time.sleep(0))


class LostProcessError(HybridCacheError, RuntimeError):
    """Another process of the group has ended, or does not answer within the timeout of the group."""


class OutOfStepError(HybridCacheError, RuntimeError):
    """The processes of the group compute different things; the message says where they differ."""


class Peers:
    """
    The processes of a group, each with the same model, which make the same calls in the same order.

    Args:
        group: of `torch.distributed`, of which this process is a member.

    Raises:
        TypeError: `group` is something else.
        ValueError: this process is not in it.

    Attributes:
        group: as given.
        rank: of this process in the group.
        size: how many there are.
    """

    def __init__(self, group: "distributed.ProcessGroup"):
        if not distributed.is_available():
            raise ValueError("group= needs torch.distributed, and this torch was built without it.")
        if isinstance(group, int) and group == distributed.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("This process is not in the group. Pass the group that it is in.")
        if not isinstance(group, distributed.ProcessGroup):
            raise TypeError(
                "group must be a process group of torch.distributed, such as torch.distributed.group.WORLD after "
                f"init_process_group('gloo'), got {group!r}."
            )
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        # NCCL alone knows no messages in host memory.
        self._device = torch.device("cuda" if distributed.get_backend(group) == "nccl" else "cpu")

    def __deepcopy__(self, memo: dict) -> "Peers":
        """Return this object: a copy has the same processes."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError("A group of processes cannot be pickled.")

    def exchange(self, message: torch.Tensor) -> torch.Tensor:
        """
        Send `message` to the others, and return all, `[size, *message.shape]`, in the order of ranks, on the host.

        All must call it, with messages of the same shape. Every process sends to every other one, and none passes
        messages on: that takes one latency, and those that wait for a process that has ended notice at once.
        """
        return self.trade(message.expand(self.size, *message.shape))

    def trade(self, messages: torch.Tensor) -> torch.Tensor:
        """Send each process a message of its own, `[size, ...]`, and return what each has for this one, likewise."""
        sent = messages.to(self._device).contiguous()
        received = torch.empty_like(sent)
        try:
            _wait_for(distributed.all_to_all_single(received, sent, group=self.group, async_op=True))
            return received.cpu()  # errors of NCCL may come only now
        except RuntimeError as error:
            raise self._explained(error) from error

    def numbers(self, number: int) -> list[int]:
        """Send a number to the others, and return those of all in the order of ranks, as `exchange` does."""
        return self.exchange(torch.tensor([number]))[:, 0].tolist()

    def of_the_first(self, message: torch.Tensor) -> torch.Tensor:
        """Return the first process' message in all processes. All must call it, with tensors of the same shape."""
        heard = message.to(self._device, copy=True)
        try:
            distributed.broadcast(heard, group_src=0, group=self.group)
            return heard.to(message.device)
        except RuntimeError as error:
            raise self._explained(error) from error

    def _explained(self, error: RuntimeError) -> RuntimeError:
        """Return the error of a collective as one that says what to do."""
        rank, reason = self.rank_of_all(self.rank), str(error).splitlines()[0]
        if "preamble" in reason:  # gloo: longer than what was expected
            return OutOfStepError(
                f"Rank {rank} got a message of another length than its own: the processes do not compute the same. "
                "Call the model in all of them with the same inputs and options."
            )
        return LostProcessError(
            f"One of the {self.size} processes that share a cache has ended or stopped answering, and the others "
            "cannot go on without what it kept. Its own output, and torchrun's, say more. Start all of them again; a "
            f"file that was saved before is whole. (Rank {rank}: {reason})"
        )

    def rank_of_all(self, rank: int) -> int:
        """Return the rank among all processes, as `torchrun` counts them, of a process of this group."""
        return distributed.get_global_rank(self.group, rank)


class Agreement:
    """
    Lets all processes of a group go on together, or fail together. A single process is alone in its group.

    An act may have others within it: a failure is told once.

    Args:
        peers: the processes; `None` for a single one.
        failure_of: makes the error to raise where the process of that rank, among all processes, has failed.
    """

    def __init__(self, peers: Peers | None, failure_of: Callable[[int], Exception]):
        self._peers, self._failure_of = peers, failure_of
        self._can_tell = True

    def numbers(self, act: Callable[[], _T], number_of: Callable[[_T], int]) -> tuple[_T, list[int]]:
        """
        Do something, and return its result and the numbers of all results, at least 0, in the order of ranks.

        All processes call this. The error of `failure_of` tells that `act` raised one in another process.
        """
        self._can_tell = True
        try:
            number = number_of(result := act())
        except BaseException:
            if self._can_tell:
                with contextlib.suppress(HybridCacheError):  # the first error says more
                    self._told(_FAILED)
            raise
        told = self._told(number)
        if _FAILED in told:
            assert self._peers is not None
            raise self._failure_of(self._peers.rank_of_all(told.index(_FAILED)))
        return result, told

    def together(self, act: Callable[[], _T]) -> _T:
        """Do something, and raise an error if it raised one in another process, see `numbers`."""
        return self.numbers(act, lambda result: 0)[0]

    def same(self, act: Callable[[], _T], number_of: Callable[[_T], int]) -> _T:
        """Do something, and raise `OutOfStepError` if the number of its result is not that of all, see `numbers`."""
        result, told = self.numbers(act, number_of)
        different = [rank for rank, each in enumerate(told) if each != told[0]]
        if different:
            raise OutOfStepError(
                f"The processes that share a cache have different prompts, tokens or codes (0 and "
                f"{', '.join(map(str, different))} of {len(told)}): make the same calls in all of them, with the same "
                "tokens and options."
            )
        return result

    def in_turns(self, made_together: Iterable[_T]) -> Iterator[_T]:
        """Yield what all processes make together, after all have agreed to go on before each of them."""
        made = iter(made_together)
        while True:
            self.together(lambda: None)
            self._can_tell = False  # others may wait for what is made
            each = next(made, None)
            self._can_tell = True
            if each is None:
                return
            yield each

    def _told(self, number: int) -> list[int]:
        """Return the numbers of all processes; once one has failed, or does not answer, nothing more can be told."""
        self._can_tell = False
        told = [number] if self._peers is None else self._peers.numbers(number)
        self._can_tell = _FAILED not in told
        return told


def _wait_for(work: "distributed.Work") -> None:
    """Wait for a collective, in Python, so that Ctrl-C ends it."""
    end = time.perf_counter() + _SECONDS_AWAKE
    while not work.is_completed():
        if time.perf_counter() < end:
            _let_others_run()  # gloo's own thread may need this processor
        else:
            time.sleep(_PAUSE)
    work.wait()
