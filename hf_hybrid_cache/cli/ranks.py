"""The processes that `torchrun` starts with one command: how many, which one this is, and how many threads each has."""

import os
from collections.abc import MutableMapping

THREADS = "HF_HYBRID_CACHE_NUM_THREADS"


def num_processes() -> int:
    """How many `torchrun` has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Of this process among all; 0 without `torchrun`."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Of this process among those on this machine; 0 without `torchrun`."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def share_processors(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let kernels use as many threads as OpenMP does, which `torchrun` limits, unless the user has said how many."""
    if num_processes() > 1 and "OMP_NUM_THREADS" in environment:
        environment.setdefault(THREADS, environment["OMP_NUM_THREADS"])
