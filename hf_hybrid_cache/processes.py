"""Processes that run the same model, and send tensors to each other."""

import os
import time
from typing import Any

import torch
from torch import distributed

from .errors import HybridCacheError

# Waking up takes longer than most messages, so a process polls for a while before it sleeps.
_SECONDS_AWAKE = 0.01
_PAUSE = 0.001
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
        Send `message` to the others and return theirs. All must call it, with messages of the same shape.

        Every process sends to every other one, and none passes messages on: that takes one latency, and those that
        wait for a process that has ended notice at once.

        Returns:
            `[size, *message.shape]` in the order of ranks, on the host.

        Raises:
            LostProcessError: one of the others has ended, or did not answer within the group's timeout.
            OutOfStepError: one of the others sent something of another size.
        """
        return self.trade(message.expand(self.size, *message.shape))

    def trade(self, messages: torch.Tensor) -> torch.Tensor:
        """
        Send each other process a message of its own, `[size, ...]`, in the order of ranks, and return theirs.

        Returns:
            What each has for this one, as for `exchange`.
        """
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
        """
        Return the first process' message in all processes. All must call it, with tensors of the same shape.

        Raises:
            LostProcessError: as for `exchange`.
        """
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


def _wait_for(work: "distributed.Work") -> None:
    """Wait for a collective, in Python, so that Ctrl-C ends it."""
    end = time.perf_counter() + _SECONDS_AWAKE
    while not work.is_completed():
        if time.perf_counter() < end:
            _let_others_run()  # gloo's own thread may need this processor
        else:
            time.sleep(_PAUSE)
    work.wait()
