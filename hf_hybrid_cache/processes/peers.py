"""The processes of a group, which send tensors to each other."""

import os
import time
from typing import Any

import torch
from torch import distributed

from .barrier import Alarm, absent_ranks
from .errors import LostProcessError, OutOfStepError

_SECONDS_AWAKE = 0.01
_PAUSE = 0.001
# Not on every system.
_let_others_run = getattr(os, "sched_yield", lambda: time.sleep(0))


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
        self._abandoned: Any = None
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

        Every process sends to every other one, and none passes messages on: that takes one latency, and whoever waits
        for a process that has ended notices at once.

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
            self._wait(distributed.all_to_all_single(received, sent, group=self.group, async_op=True))
            return received.cpu()  # errors of NCCL may come only now
        except RuntimeError as error:
            raise self._explained(error) from error

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

    def _wait(self, work: "distributed.Work") -> None:
        """Poll for a while before sleeping, as threads of OpenMP do: waking up takes longer than most messages."""
        end = time.perf_counter() + _SECONDS_AWAKE
        while not work.is_completed() and time.perf_counter() < end:
            _let_others_run()  # gloo's own thread may need this processor
        if not work.is_completed():
            with Alarm(self.group.get_group_store()) as alarm:
                while not work.is_completed():
                    if alarm.is_raised.wait(_PAUSE):
                        self._abandoned = work  # with its memory, which may be written to still
                        raise RuntimeError("Another process has said that one is missing.")
        work.wait()

    def _explained(self, error: RuntimeError) -> RuntimeError:
        if "preamble" in str(error):  # gloo: longer than what was expected
            return OutOfStepError(
                f"Rank {self.rank_of_all(self.rank)} got a message of another length than its own: the processes do "
                "not compute the same. Call the model in all of them with the same inputs and options."
            )
        absent = absent_ranks(self.group.get_group_store(), self.rank, self.size)
        names = ", ".join(str(self.rank_of_all(rank)) for rank in absent)
        who = f"ranks {names} have" if len(absent) > 1 else f"rank {names} has" if absent else "one has"
        return LostProcessError(
            f"Of {self.size} processes that share a cache, {who} ended or stopped answering, and the others cannot go "
            "on without what it kept. Start all of them again; a file that was saved before is whole. (Rank "
            f"{self.rank_of_all(self.rank)}: {str(error).splitlines()[0]})"
        )

    def rank_of_all(self, rank: int) -> int:
        """Return the rank among all processes, as `torchrun` counts them, of a process of this group."""
        return distributed.get_global_rank(self.group, rank)
