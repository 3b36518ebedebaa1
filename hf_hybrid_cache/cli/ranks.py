"""The processes that `torchrun` starts with one command: how many, and which one this is."""

import os


def num_processes() -> int:
    """How many `torchrun` has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Of this process among all; 0 without `torchrun`."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Of this process among those on this machine; 0 without `torchrun`."""
    return int(os.environ.get("LOCAL_RANK", "0"))
