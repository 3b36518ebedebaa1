"""Caches that choose their codecs: sequences of few tokens stay in full precision."""

import pytest
import torch
from transformers import PreTrainedModel

from hf_hybrid_cache import DynamicHybridCache, HybridCache, Placement, minmax
from hf_hybrid_cache.cache.whole_step import WholeSteps
from hf_hybrid_cache.storage import Allowance, CodecChoice
from hf_hybrid_cache.storage.kv_shape import KVShape

from common.modes import read
from models.tiny_models import random_prompt, tiny_model

# With so many tokens codecs are chosen.
ENOUGH = 640
PLACES = {
    "host": Placement(),
    "device": Placement(cpu_decode=False),
    "streamed": Placement(offload=True, cpu_decode=False),
}


def are_chosen(cache: HybridCache) -> set[bool]:
    return {codec.is_fitted for codec in cache.codecs.values()}


def filled(model: PreTrainedModel, ids: torch.Tensor, *sizes: int, place: str = "host") -> HybridCache:
    """A cache that has read tokens in passes of these sizes."""
    cache = HybridCache(model.config, PLACES[place], codec=minmax(4))
    for piece in ids.split(sizes, dim=1):
        read(model, piece, cache)
    return cache


@pytest.mark.parametrize("place", PLACES)
def test_short_prompts_when_read_then_stay_in_full_precision(place: str):
    model, ids = tiny_model("llama"), random_prompt(1, ENOUGH)
    cache = filled(model, ids[:, :-1], 300, ENOUGH - 301, place=place)
    plain = DynamicHybridCache(model.config, cpu_decode=PLACES[place].cpu_decode)
    for piece in ids[:, :-1].split((300, ENOUGH - 301), dim=1):
        read(model, piece, plain)
    assert are_chosen(cache) == {False}
    for ours, theirs in zip(cache.layers, plain.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
    for step in range(2):  # on a device the states of a step are quantized with the next one
        read(model, random_prompt(1, 1, seed=step), cache)
    assert are_chosen(cache) == {True}
    assert not torch.equal(cache.layers[0].values[:, :, :ENOUGH], plain.layers[0].values)


def test_choice_when_a_short_prompt_is_gone_back_to_then_is_by_it_alone():
    model, ids = tiny_model("llama"), random_prompt(1, 300)
    fresh, cache = filled(model, ids, 300), filled(model, ids, 300)
    for each in (fresh, cache):
        each.checkpoint()
    assert are_chosen(fresh) == {True}
    read(model, random_prompt(1, 500, seed=1), cache)
    cache.go_back(300)
    assert cache.codecs == fresh.codecs
    for ours, theirs in zip(cache.layers, fresh.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)


def test_steps_when_the_choice_waits_then_run_in_one_call_until_it_is_due():
    model, layers = tiny_model("llama"), range(4)
    for num_tokens, left in ((300, 20), (ENOUGH - 3, 2), (ENOUGH - 1, 0)):
        steps = WholeSteps(filled(model, random_prompt(1, num_tokens), num_tokens), layers)
        assert steps.num_left == left


@pytest.mark.parametrize("prompt", [20, 100])
def test_queries_when_seen_one_by_one_or_together_then_as_many_are_noted(prompt: int):
    query = torch.randn(1, 4, 200, 16)
    states = torch.zeros(1, 2, prompt, 16)
    noted = []
    for size in (1, 7, 64):
        choice = CodecChoice(minmax(4), Allowance(1))
        first = 200 if size == 64 else prompt
        for piece in (query[:, :, :first], *query[:, :, first:].split(size, dim=2)):
            choice.observe(piece, KVShape.of(states, states))
        noted.append(choice.seen_queries)
    assert noted[0].number == noted[1].number == max(prompt, 64)
    torch.testing.assert_close(noted[0].squares, noted[1].squares)
    assert noted[2].number == 200
