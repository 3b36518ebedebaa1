"""Fused steps among everything else that is done to a cache, and steps that are interrupted anywhere."""

import copy
import random
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from decode_step.twins import CACHES, FAMILIES, Twins, made_at_random
from hf_hybrid_cache import DynamicHybridCache, HybridCache, IncompleteCacheError
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.decode_step import fuse_decode

from common.interruptions import Interruption
from common.soak import budget, count
from models.tiny_models import random_prompt


def half_of(cache: HybridCache, number: int) -> None:
    layer = cache.layers[number % 2]
    keys = layer.keys.clone()
    keys[:, :, -3:] *= 0.5
    layer.set(keys, layer.values)


def saved(cache: HybridCache, number: int) -> HybridCache:
    with TemporaryDirectory() as folder:
        cache.save(f"{folder}/cache")
        return HybridCache.load(f"{folder}/cache", FAMILIES["Llama"]())


def rows(cache: HybridCache) -> torch.Tensor:
    return torch.arange(cache.layers[0].batch)


# What is done to each of the two caches, with a number that is drawn.
CHANGES_OF_CACHES: dict[str, Callable[[HybridCache, int], Any]] = {
    "edit": half_of,
    "save and load": saved,
    "copy": lambda cache, number: copy.deepcopy(cache),
    "reset": lambda cache, number: cache.reset(),
    "convert": lambda cache, number: cache.to("cpu", torch.float32),
    "crop": lambda cache, number: cache.crop(-min(number, cache.get_seq_length() - 1)),
    "go back": lambda cache, number: cache.go_back(max(1, cache.get_seq_length() - number)) and None,
    "checkpoint": lambda cache, number: cache.checkpoint(),
    "reorder": lambda cache, number: cache.reorder_cache(rows(cache).flip(0)),
    "select": lambda cache, number: cache.batch_select_indices(
        rows(cache)[number % 2 :] if len(rows(cache)) > 1 else rows(cache)
    ),
    "repeat": lambda cache, number: cache.batch_repeat_interleave(1 + number % 2 * (len(rows(cache)) < 3)),
}


def check_history(seed: int, make: Callable[[Any], HybridCache]) -> int:
    """Do random things between random steps; return how many steps were fused."""
    chosen, held = random.Random(seed), []
    twins = Twins(made_at_random(), make, tolerance=1e-4 if make is DynamicHybridCache else 0.1)
    fused_steps = 0
    for _ in range(8):
        if not twins.own.get_seq_length() or chosen.random() < 0.2:
            batch = 1 + chosen.randrange(3) if not twins.own.get_seq_length() else len(rows(twins.own))
            twins.forward(random_prompt(batch, chosen.randrange(2, 300)))
        fused_steps += twins.steps(chosen.choice([1, 2, 5, 70]), chosen.randrange(9))
        with torch.inference_mode():
            for keys in held:  # of no effect: they are copies
                keys *= 0.5
        what, number = chosen.choice(list(CHANGES_OF_CACHES)), chosen.choice([1, 2, 63, 64, 65, 130])
        for name in ("ours", "own"):
            changed = CHANGES_OF_CACHES[what](getattr(twins, name), number)
            setattr(twins, name, getattr(twins, name) if changed is None else changed)
        assert twins.hold_the_same(), f"{what}, seed {seed}"
        if chosen.random() < 0.1:
            twins.model = copy.deepcopy(twins.model)
            twins.fused = fuse_decode(twins.model)
        is_held = twins.own.get_seq_length() and chosen.random() < 0.3
        held = [cache.layers[number % 2].keys for cache in (twins.ours, twins.own)] if is_held else []
    return fused_steps


@pytest.mark.soak
@pytest.mark.usefixtures("exact_kernels")
@pytest.mark.parametrize("cache", CACHES)
def test_any_history_leaves_what_the_own_forward_leaves(cache: str):
    number = budget(2)
    assert sum(check_history(seed, CACHES[cache]) for seed in range(number)) > 20 * number
    count("examples of operation sequences", number)


@pytest.mark.soak
@pytest.mark.parametrize("folder", ["decode_step/step_plan", "cache/whole_step", ""])
def test_a_step_that_is_ended_anywhere_is_done_or_not_or_says_so(folder: str):
    twins = Twins(made_at_random())
    twins.forward(random_prompt(2, 100))
    twins.steps(2)
    counting = Interruption(folder=folder)
    with torch.no_grad():
        counting.run(lambda: twins.model(torch.tensor([[7], [8]]), **cache_argument(copy.deepcopy(twins.ours))))
    before, chosen = copy.deepcopy((twins.ours, twins.own)), random.Random(0)
    for at_line in chosen.sample(range(counting.lines), min(budget(20), counting.lines)):
        twins.ours, twins.own = copy.deepcopy(before)
        twins.steps(2)  # the first one gets memory, the second one prepares what the next one finds
        fault = Interruption(chosen.choice([KeyboardInterrupt, MemoryError]), at_line, folder)
        with torch.no_grad():
            fault.run(lambda: twins.model(torch.tensor([[7], [8]]), **cache_argument(twins.ours)))
        length = twins.own.get_seq_length()
        if len({layer.get_seq_length() for layer in twins.ours.layers}) > 1:
            with pytest.raises(IncompleteCacheError, match="drop_unfinished"):
                twins.model(torch.tensor([[7], [8]]), **cache_argument(twins.ours))
            twins.ours.drop_unfinished()
            assert twins.ours.get_seq_length() == length, fault.place
        if twins.ours.get_seq_length() > length:
            with torch.no_grad():
                twins.own_model(torch.tensor([[7], [8]]), **cache_argument(twins.own))
        assert twins.hold_the_same(), fault.place
        assert twins.steps(2) == 2, fault.place
        count("faults injected")
