"""The others end with an error when a process that shares a cache with them is lost, and leave no half of a file."""

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.distributed_c10d import _set_pg_timeout

from hf_hybrid_cache import DynamicHybridCache, HybridCache, LostProcessError, QuantizedHybridCache
from hf_hybrid_cache.attention import compile_kernels

from .groups import NEEDS_GROUPS, Group
from common.modes import answer
from common.slow import slow
from models.tiny_models import random_prompt, tiny_model

pytestmark = [
    pytest.mark.xdist_group("groups"),
    pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs signals that stop and kill processes"),
    NEEDS_GROUPS,
]


def lost_at_call(number: int, lost_rank: int, at: int) -> Callable[..., None]:
    """
    Return a function in which one process sends itself a signal when it calls it so often.

    The others are not patient with it, once all have begun; another one that the machine keeps waiting is lost, too.
    """
    calls = 0

    def called(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at and distributed.get_rank() == lost_rank:
            os.kill(os.getpid(), number)

    # A process that is stopped while it compiles would hold the lock of a kernel, for which all others wait.
    compile_kernels(torch.float32, True, lambda: None)
    distributed.barrier()
    _set_pg_timeout(timedelta(seconds=5))
    return called


def generate(bits: int | None, number: int, lost_rank: int, at: int) -> None:
    """Generate tokens; one process is lost in a step, between the attention of one layer and the next."""
    model, group = tiny_model("llama"), distributed.group.WORLD
    shared = {"group": group} if bits is None else {"group": group, "bits": bits}
    cache = (DynamicHybridCache if bits is None else QuantizedHybridCache)(model.config, **shared)
    model.model.layers[1].mlp.register_forward_hook(lost_at_call(number, lost_rank, at))
    answer(model, random_prompt(1, 700), cache, max_new_tokens=50)


def start_and_require_errors(group: Group, lost_rank: int, function: Callable[..., None], *arguments: Any) -> None:
    """Let all but the lost process end with an error that names them; the group is not used again."""
    group.is_in_step = False
    group.start(function, *arguments)
    for rank in {*range(len(group.pipes))} - {lost_rank}:
        with pytest.raises(LostProcessError, match=rf"Start all of them again; .* \(Rank {rank}: "):
            group.answer(rank)


@pytest.mark.parametrize(
    ("number", "lost_rank", "bits", "at"),
    [
        (signal.SIGKILL, 2, 8, 7),
        slow(signal.SIGKILL, 0, 8, 9),
        slow(signal.SIGKILL, 1, None, 1),
        slow(signal.SIGSTOP, 0, 8, 8),
        slow(signal.SIGSTOP, 2, None, 20),
    ],
)
@pytest.mark.parametrize("group", [3], indirect=True)
def test_process_when_lost_in_a_step_then_all_others_end(
    number: int, lost_rank: int, bits: int | None, at: int, group: Group
):
    start_and_require_errors(group, lost_rank, generate, bits, number, lost_rank, at)


def fill(cache: HybridCache, tokens: int) -> None:
    states = torch.randn(1, 2, tokens, 16)
    for layer in range(4):
        cache.update(states, states, layer)


def save(path: str, number: int, lost_rank: int) -> None:
    """Save a cache of 1,400 tokens, during which one process is lost."""
    cache = DynamicHybridCache(tiny_model("llama").config, group=distributed.group.WORLD)
    fill(cache, 1400)
    lost, send = lost_at_call(number, lost_rank, 9), distributed.all_to_all_single

    def send_or_lose(*arguments: Any, **options: Any) -> Any:
        lost()
        return send(*arguments, **options)

    distributed.all_to_all_single = send_or_lose
    cache.save(path)


@pytest.mark.parametrize(("number", "lost_rank"), [(signal.SIGKILL, 1), slow(signal.SIGSTOP, 0)])
def test_save_when_a_process_is_lost_then_leaves_the_old_file(
    number: int, lost_rank: int, group: Group, tmp_path: Path
):
    path, config = tmp_path / "cache.kv", tiny_model("llama").config
    old = DynamicHybridCache(config)
    fill(old, 700)
    old.save(path)
    start_and_require_errors(group, lost_rank, save, str(path), number, lost_rank)
    assert HybridCache.load(path, config).get_seq_length() == 700
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
