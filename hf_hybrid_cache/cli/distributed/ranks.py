"""The number of processes that `torchrun` started, and the rank of this one."""

import os


def num_processes() -> int:
    """The number of processes that `torchrun` started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The rank of this process among all; 0 without `torchrun`."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """The rank of this process among the processes of this machine; 0 without `torchrun`."""
    return int(os.environ.get("LOCAL_RANK", "0"))
