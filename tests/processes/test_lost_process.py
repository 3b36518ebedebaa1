"""A lost or stopped process ends the others that share a cache with it, with an error that names it."""

import itertools
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from hf_hybrid_cache import DynamicHybridCache, HybridCache, LostProcessError, QuantizedHybridCache
from hf_hybrid_cache.cache_argument import cache_argument

from common.slow import combination, slow
from models.tiny_models import random_prompt, tiny_model
from processes.groups import Group

if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("needs torch.distributed with gloo, which this torch was built without", allow_module_level=True)
if not hasattr(signal, "SIGSTOP"):
    pytest.skip("needs signals that stop and kill processes", allow_module_level=True)

pytestmark = pytest.mark.xdist_group("groups")

SIZE = 3
# The group's timeout: others wait so long for a process that only does not answer, but not for one that has ended.
TIMEOUT = {signal.SIGSTOP: timedelta(seconds=3), signal.SIGKILL: timedelta(seconds=120)}
# On a machine that does other things besides.
SECONDS_TO_END = 40


def in_the_middle(lost_rank: int, number: int, step: int) -> Callable[..., Any]:
    """Return a hook of a layer, in which one process sends itself a signal."""
    calls = 0

    def hook(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls == step and distributed.get_rank() == lost_rank:
            os.kill(os.getpid(), number)

    return hook


def generate(bits: int | None, lost_rank: int, number: int, step: int) -> list[int]:
    """Generate tokens; one process may be lost in a step, between the attention of one layer and the next."""
    model = tiny_model("llama")
    world = distributed.group.WORLD
    cache = (
        DynamicHybridCache(model.config, group=world)
        if bits is None
        else QuantizedHybridCache(model.config, bits, group=world)
    )
    model.model.layers[1].mlp.register_forward_hook(in_the_middle(lost_rank, number, step))
    ids = random_prompt(1, 300)
    return model.generate(ids, **cache_argument(cache), max_new_tokens=50, do_sample=False).tolist()


def end_of_the_others(group: Group, lost_rank: int) -> tuple[set[str], float]:
    """Return the errors of the other processes, and the seconds until they end."""
    start = time.monotonic()
    said = set()
    for rank in range(SIZE):
        if rank != lost_rank:
            with pytest.raises(LostProcessError) as raised:
                group.answer(rank, SECONDS_TO_END)
            said.add(str(raised.value).partition(" (Rank")[0])
    return said, time.monotonic() - start


@pytest.mark.parametrize(
    ("lost_rank", "has_host", "number"),
    [
        (2, True, signal.SIGSTOP),
        slow(0, False, signal.SIGKILL),
        *(
            combination(*case)
            for case in itertools.product((0, 2), (False, True), (signal.SIGKILL, signal.SIGSTOP))
            if case not in ((2, True, signal.SIGSTOP), (0, False, signal.SIGKILL))
        ),
    ],
)
def test_all_others_end_and_name_the_rank(lost_rank: int, has_host: bool, number: int):
    with Group(SIZE, TIMEOUT[number], has_host) as group:
        group.start(generate, 8 if has_host else None, lost_rank, number, 7)
        said, _ = end_of_the_others(group, lost_rank)
        assert len(said) == 1
        assert re.search(rf"rank {lost_rank} has ended or stopped answering.* Start all of them again", said.pop())
        assert not [rank for rank in range(SIZE) if rank != lost_rank and not group.processes[rank].is_alive()]


def save(path: str, lost_rank: int) -> None:
    cache = DynamicHybridCache(tiny_model("llama").config, group=distributed.group.WORLD)
    states = torch.randn(1, 2, 700, 16)
    for layer in range(4):
        cache.update(states, states, layer)
    cache.save(path)
    peers = cache._stores.peers
    exchange, calls = peers.exchange, 0

    def lost_in_the_middle(message: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 9 and distributed.get_rank() == lost_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(message)

    peers.exchange = lost_in_the_middle
    cache.update(states, states, 0)
    for layer in range(1, 4):
        cache.update(states, states, layer)
    cache.save(path)


@pytest.mark.slow
def test_save_when_a_process_is_lost_then_leaves_no_partial_file(tmp_path: Path):
    path = tmp_path / "cache.kv"
    with Group(SIZE, TIMEOUT[signal.SIGKILL]) as group:
        group.start(save, str(path), 1)
        said, _ = end_of_the_others(group, 1)
    assert "rank 1 has ended" in said.pop()
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert HybridCache.load(path, tiny_model("llama").config).get_seq_length() == 700
