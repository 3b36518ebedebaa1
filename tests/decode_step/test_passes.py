"""Passes of up to 16 tokens of any sequences in one call: the bits of each token, what it sees, and what is left."""

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.cache_utils import DynamicCache

from decode_step.twins import CACHES, MAY_END_FUSING, made, made_at_random
from hf_hybrid_cache import DynamicHybridCache, HybridCache, minmax
from hf_hybrid_cache.cache import contents_of
from hf_hybrid_cache.cache_argument import cache_argument, passed_cache
from hf_hybrid_cache.decode_step import fuse_decode, run_together

from common.modes import read
from models.tiny_models import random_prompt

# Sizes that are not those of vectors, and groups of three.
ODD = {
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_attention_heads": 6,
    "head_dim": 20,
    "max_position_embeddings": 2048,
}


def padded(lengths: list[int], more: int = 0) -> torch.Tensor:
    """The mask of prompts that are padded on the left, with tokens after them."""
    longest = max(lengths)
    return torch.tensor([[0] * (longest - each) + [1] * (each + more) for each in lengths])


def pass_of(model: Any, cache: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits of a pass, with positions that count the tokens of each sequence."""
    with torch.no_grad():
        logits: torch.Tensor = model(**arguments_of(cache, tokens, mask)).logits
    return logits


def arguments_of(cache: Any, tokens: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
    return {"input_ids": tokens, "attention_mask": mask, "position_ids": positions, **cache_argument(cache)}


@st.composite
def passes(draw: st.DrawFn) -> tuple[list[int], int]:
    """Lengths of prompts, up to 64 tokens around the ends of blocks, and the tokens of a pass after them."""
    batch = draw(st.integers(1, 4))
    around = draw(st.sampled_from([20, 64, 192, 1408]))
    longest = draw(st.integers(around - 16, around + 4))
    lengths = draw(st.lists(st.integers(max(1, longest - 70), longest), min_size=batch - 1, max_size=batch - 1))
    return [longest, *lengths], draw(st.integers(2, 16 // batch))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_a_token_has_the_same_bits_alone_and_among_others(dtype: torch.dtype, bits: int | None):
    model = made_at_random("Llama", dtype, bits, **ODD)
    fused = fuse_decode(model)
    assert fused.repeats_rows

    @settings(max_examples=8)
    @given(passes(), st.sampled_from(sorted(CACHES)), st.integers(0, 15), st.integers(1, 3))
    def check(shape: tuple[list[int], int], name: str, rejected: int, continuations: int) -> None:
        lengths, length = shape
        longest, cache = max(lengths), CACHES[name](model.config)
        pass_of(model, cache, random_prompt(len(lengths), longest), padded(lengths))
        cache.batch_repeat_interleave(continuations)
        lengths = [each for each in lengths for _ in range(continuations)]
        batch = len(lengths)
        length = min(length, 16 // batch)
        alone = [copy.deepcopy(cache) for _ in lengths]
        rejected = min(rejected, 16 // batch, 63 - longest % 64)
        if rejected:
            pass_of(model, cache, random_prompt(batch, rejected, seed=2), padded(lengths, rejected))
            cache.crop(-rejected)
        tokens, before = random_prompt(batch, length, seed=1), copy.copy(fused.other_passes)
        together = pass_of(model, cache, tokens, padded(lengths, length))
        for row, one in enumerate(alone):
            one.batch_select_indices(torch.tensor([row]))
            for index in range(length):
                mask = padded(lengths, index + 1)[row : row + 1]
                expected = pass_of(model, one, tokens[row : row + 1, index : index + 1], mask)
                assert torch.equal(together[row, index], expected[0, 0]), (row, index)
        assert {*(fused.other_passes - before)} <= {MAY_END_FUSING}, fused

    check()


@pytest.mark.parametrize("bits", [None, 8, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_continuations_of_a_prompt_give_what_the_own_forward_gives(bits: int | None, groups: int):
    own, ours = models_with("sdpa")
    fused, lengths = vars(ours.model)["forward"], [330, 250][:groups] * 3
    cache = HybridCache(own.config, codec=None if bits is None else minmax(bits, rotate=True))
    pass_of(own, cache, random_prompt(groups, 330), padded(lengths[:groups]))
    cache.batch_repeat_interleave(3)
    lengths, caches, before = (
        sorted(lengths, reverse=True),
        (cache, copy.deepcopy(cache)),
        copy.copy(fused.other_passes),
    )
    length = 2 if bits is None else 1  # the first token of a pass over the end of a block sees no codes of it
    for more in range(length, 80, length):
        tokens = random_prompt(3 * groups, length, seed=more)
        result, expected = (
            pass_of(model, each, tokens, padded(lengths, more)) for model, each in zip((ours, own), caches, strict=True)
        )
        apart = (result - expected).norm() / expected.norm()
        assert apart <= (1e-5 if bits is None else 0.02), (more, apart)
        if more == 40:
            for each in caches:
                each.reorder_cache(torch.arange(3 * groups).flip(0))
            lengths.reverse()
    assert fused.other_passes == before


@st.composite
def clients(draw: st.DrawFn) -> list[tuple[str, list[int], int]]:
    """The kinds of some caches, the lengths of their prompts, and how many sequences continue each prompt."""
    kinds = st.sampled_from(sorted(CACHES))
    lengths = st.sampled_from([20, 63, 130, 191, 256, 900]).flatmap(lambda most: st.sampled_from([[most], [most, 17]]))
    return draw(st.lists(st.tuples(kinds, lengths, st.integers(1, 2)), min_size=2, max_size=4))


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, 8), (torch.float32, 4)]
)
def test_passes_of_several_caches_together_have_the_bits_of_each_alone(dtype: torch.dtype, bits: int | None):
    model = made_at_random("Llama", dtype, bits, **ODD)
    fused, together = fuse_decode(model), list[bool]()

    @settings(max_examples=5)
    @given(clients(), st.lists(st.lists(st.integers(1, 4), min_size=4, max_size=4), min_size=3, max_size=3))
    def check(kinds: list[tuple[str, list[int], int]], steps: list[list[int]]) -> None:
        caches, masks = list[HybridCache](), list[torch.Tensor]()
        for seed, (kind, lengths, continuations) in enumerate(kinds):
            caches.append(CACHES[kind](model.config))
            masks.append(padded(lengths).repeat_interleave(continuations, 0))
            pass_of(model, caches[-1], random_prompt(len(lengths), max(lengths), seed), padded(lengths))
            caches[-1].batch_repeat_interleave(continuations)
        alone, most = copy.deepcopy(caches), 16 // sum(len(each) for each in masks)
        for number, wanted in enumerate(steps):
            lengths = [min(most, each) for each in wanted]
            tokens = [random_prompt(len(mask), each, number) for mask, each in zip(masks, lengths, strict=False)]
            masks = [torch.cat([mask, torch.ones_like(each)], 1) for mask, each in zip(masks, tokens, strict=True)]
            given_to = [arguments_of(*each) for each in zip(caches, tokens, masks, strict=True)]
            apart = fused.passes_apart.total()
            with torch.no_grad():
                outs = run_together(model, given_to)
            together.append(fused.passes_apart.total() == apart)
            for out, cache, own, ids, mask in zip(outs, caches, alone, tokens, masks, strict=True):
                assert torch.equal(out.logits, pass_of(model, own, ids, mask))
                assert passed_cache(out) is cache
                assert torch.equal(cache.layers[1].keys, own.layers[1].keys)
                for each in (cache, own):
                    each.crop(-1)
            masks = [mask[:, :-1] for mask in masks]
            if number:  # another client is the first, and one has gone
                caches, alone, masks = caches[:0:-1], alone[:0:-1], masks[:0:-1]

    check()
    assert set(fused.passes_apart) <= {MAY_END_FUSING}, fused.passes_apart
    assert sum(together) > len(together) / 2


@st.composite
def readers(draw: st.DrawFn) -> tuple[int, list[int], str]:
    """Tokens of a document, those of some questions about it, and the kind of their caches."""
    document = draw(st.sampled_from([100, 256, 449, 700, 1300])) + draw(st.integers(-2, 2))
    questions = draw(st.lists(st.integers(1, 200), min_size=2, max_size=5))
    return document, questions, draw(st.sampled_from(sorted(CACHES)))


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, None), (torch.bfloat16, 4)])
def test_caches_of_one_document_attend_at_once_with_the_bits_of_each(dtype: torch.dtype, bits: int | None):
    model = made_at_random("Llama", dtype, bits, **ODD)
    fused = fuse_decode(model)

    @settings(max_examples=8)
    @given(readers(), st.lists(st.integers(1, 3), min_size=5, max_size=5), st.booleans())
    @example((449, [200, 190, 180], "8 bits"), [1] * 5, True)
    @example((449, [200, 190, 180], "full precision"), [1] * 5, True)
    def check(asked: tuple[int, list[int], str], lengths: list[int], are_continued: bool) -> None:
        num_tokens, questions, kind = asked
        document = CACHES[kind](model.config)
        pass_of(model, document, random_prompt(1, num_tokens), padded([num_tokens]))
        contents_of(document).note_keys(b"a store", np.arange(num_tokens, dtype=np.uint32))
        caches = [copy.deepcopy(document) for _ in questions]
        for seed, (cache, length) in enumerate(zip(caches, questions, strict=True)):
            if are_continued:  # one of two continuations of the document, which is a prefix now
                cache.batch_repeat_interleave(2)
                cache.batch_select_indices(torch.tensor([0]))
            pass_of(model, cache, random_prompt(1, length, seed), padded([num_tokens + length]))
        alone = copy.deepcopy(caches)
        for step in range(3):
            given_to = [
                {"input_ids": random_prompt(1, length, step), **cache_argument(cache)}
                for cache, length in zip(caches, lengths, strict=False)
            ]
            with torch.no_grad():
                outs = run_together(model, given_to)
                for out, given_as, own in zip(outs, given_to, alone, strict=True):
                    assert torch.equal(out.logits, model(**given_as | cache_argument(own)).logits)
                    assert torch.equal(passed_cache(out).layers[1].keys, own.layers[1].keys)

    check()
    assert set(fused.passes_apart) <= {MAY_END_FUSING}, fused.passes_apart


@torch.no_grad()
def test_tokens_whose_masks_keep_them_apart_in_the_trial_are_not_tried():
    model, calls = made_at_random("Mistral", sliding_window=4), list[int]()
    fused, caches = fuse_decode(model), [DynamicHybridCache(model.config) for _ in range(2)]
    for seed, cache in enumerate(caches):
        read(model, random_prompt(1, 20, seed), cache)
    model.get_input_embeddings().register_forward_hook(lambda _, given, __: calls.append(given[0].numel()))
    given = {"input_ids": random_prompt(1, 1), "position_ids": torch.tensor([[20]])}
    run_together(model, [given | cache_argument(cache) for cache in caches])
    assert not fused.passes_apart
    assert calls[-2:] == [1, 1]
    assert 2 not in calls[-3:]


ANGLES = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "max_position_embeddings": 90}


# Windows, angles of two kinds, layers without any, and those that change beyond 90 tokens for all rows of a pass.
@pytest.mark.parametrize(
    ("family", "config"),
    [("Llama", {}), ("Mistral", {}), ("Gemma3", {}), ("SmolLM3", {}), ("GPTNeoX", {}), ("Llama", ANGLES)],
)
@torch.no_grad()
def test_tokens_of_several_caches_have_their_bits_from_one_embedding(family: str, config: dict[str, Any]):
    model, calls, numbers = made_at_random(family, **config), list[int](), list[int]()
    fused, lengths = fuse_decode(model), (20, 60, 40)
    caches = [DynamicHybridCache(model.config) for _ in lengths]
    for seed, (cache, length) in enumerate(zip(caches, lengths, strict=True)):
        read(model, random_prompt(1, length, seed), cache)
    alone = copy.deepcopy(caches)
    model.get_input_embeddings().register_forward_hook(lambda _, given, __: calls.append(given[0].numel()))
    for step in range(40):  # beyond windows, and beyond those angles
        given_to = [
            {"input_ids": random_prompt(1, 1, step + seed), "position_ids": torch.tensor([[step + length]])}
            for seed, length in enumerate(lengths)
        ]
        calls.clear()
        outs = run_together(model, [each | cache_argument(cache) for each, cache in zip(given_to, caches, strict=True)])
        numbers.append(len(calls))
        for out, each, own in zip(outs, given_to, alone, strict=True):
            assert torch.equal(out.logits, model(**each, **cache_argument(own)).logits)
    assert not fused.passes_apart
    assert numbers[1] == 1  # the first step may be recorded anew
    assert numbers.count(1 + len(lengths)) <= 1  # what a window ends is tried once


def test_what_a_store_knows_as_the_same_tokens_is_read_from_one_cache():
    model = made_at_random("Llama")
    fused, caches = fuse_decode(model), [DynamicHybridCache(model.config) for _ in range(3)]
    for seed, cache in enumerate(caches):
        pass_of(model, cache, random_prompt(1, 700, seed), padded([700]))
    claimed = copy.deepcopy(caches)
    for cache in claimed[:2]:  # these two hold others, so the second one shows which it has read
        contents_of(cache).note_keys(b"a store", np.arange(700, dtype=np.uint32))
    tokens, results = random_prompt(1, 1), list[list[torch.Tensor]]()
    for each in (caches, claimed):
        with torch.no_grad():
            outs = run_together(model, [{"input_ids": tokens, **cache_argument(cache)} for cache in each])
        results.append([out.logits for out in outs])
    assert [torch.equal(*pair) for pair in zip(*results, strict=True)] == [True, False, True]
    claimed[1].crop(-701)
    pass_of(model, claimed[1], random_prompt(1, 700, 1), padded([700]))
    with torch.no_grad():
        out = run_together(model, [{"input_ids": tokens, **cache_argument(cache)} for cache in claimed[:2]])[1]
    assert torch.equal(out.logits, results[0][1])
    assert not fused.passes_apart


@pytest.mark.parametrize("family", ["Gemma2", "Cohere", "Qwen3Moe"])  # windows and caps, scaled logits, experts
def test_passes_of_several_caches_together_give_what_the_own_forward_gives(family: str):
    own = made_at_random(family)
    ours, caches = copy.deepcopy(own), [DynamicHybridCache(own.config) for _ in range(3)]
    fused, masks = fuse_decode(ours), [padded([100, 30]), padded([7]), padded([70])]
    for cache, mask in zip(caches, masks, strict=True):
        pass_of(own, cache, random_prompt(*mask.shape), mask)
    masks = [torch.cat([mask, torch.ones_like(mask[:, :2])], 1) for mask in masks]
    given_to = [
        {**arguments_of(cache, random_prompt(len(mask), 2), mask), "logits_to_keep": 1}
        for cache, mask in zip(copy.deepcopy(caches), masks, strict=True)
    ]
    with torch.no_grad():
        outs = run_together(ours, given_to)
    for out, cache, mask in zip(outs, caches, masks, strict=True):
        expected = pass_of(own, cache, random_prompt(len(mask), 2), mask)[:, -1:]
        torch.testing.assert_close(out.logits, expected, rtol=1e-4, atol=1e-4)
    assert (fused.fused_steps, fused.passes_apart) == (1, {})


@torch.no_grad()
def test_passes_that_are_no_step_together_run_apart_and_say_why():
    _, model = models_with("sdpa")
    fused, caches = vars(model.model)["forward"], [DynamicHybridCache(model.config), DynamicCache(config=model.config)]
    for cache in caches:
        read(model, random_prompt(1, 20), cache)
    given_to = [{"input_ids": random_prompt(1, 1), **cache_argument(each)} for each in caches]
    results = [out.logits for out in run_together(model, given_to)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert fused.passes_apart == {"the cache is not of this package": 1}
    with pytest.raises(ValueError, match="needs a cache of its own"):
        run_together(model, given_to[:1] * 2)


@functools.cache
def models_with(attention: str) -> Any:
    own = made_at_random("Llama", **ODD)
    own.set_attn_implementation(attention)
    ours = copy.deepcopy(own)
    fuse_decode(ours)
    return own, ours


@settings(max_examples=30)
@given(st.data())
def test_any_mask_gives_what_the_own_forward_gives(data: st.DataObject):
    attention = data.draw(st.sampled_from(["sdpa", "eager"]))
    own, ours = models_with(attention)
    batch, continuations = data.draw(st.sampled_from([(1, 1), (3, 1), (1, 3), (2, 2)]))
    length, held = data.draw(st.integers(1, 16 // (batch * continuations))), data.draw(st.integers(2, 300))
    caches = [DynamicCache(config=own.config), DynamicHybridCache(ours.config)]
    prompt, batch = random_prompt(batch, held), batch * continuations
    tokens = random_prompt(batch, length, seed=1)
    first = torch.tensor(data.draw(st.lists(st.integers(0, held), min_size=batch * length, max_size=batch * length)))
    end = held + 1 + torch.arange(length)
    places = torch.arange(held + length)
    mask = (places >= first.view(batch, 1, length, 1)) & (places < end[:, None])
    if data.draw(st.booleans()):  # what is seen has holes
        mask &= (torch.rand(mask.shape, generator=torch.Generator().manual_seed(held)) < 0.7) | (places == held)
    if attention == "eager" or data.draw(st.booleans()):
        mask = torch.zeros(mask.shape).masked_fill_(~mask, torch.finfo(torch.float32).min)
    results, before = [], vars(ours.model)["forward"].fused_steps
    for model, cache in zip((own, ours), caches, strict=True):
        read(model, prompt, cache)
        cache.batch_repeat_interleave(continuations)
        results.append(read(model, tokens, cache, attention_mask=mask))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert vars(ours.model)["forward"].fused_steps > before


def test_a_head_with_a_hook_or_gradients_or_another_forward_is_called():
    model = made_at_random(**ODD)
    head, calls = model.lm_head, list[Any]()
    with fuse_decode(model):
        states = torch.randn(1, 3, ODD["hidden_size"], requires_grad=True)
        head(states).sum().backward()
        assert states.grad is not None
        handle = head.register_forward_hook(lambda *_: calls.append(1))
        with torch.no_grad():
            torch.testing.assert_close(head(states), nn.functional.linear(states, head.weight))
        handle.remove()
    assert calls == [1]
    assert "forward" not in vars(head)
    head.forward = lambda states: states
    with fuse_decode(model):
        assert head(1) == 1


def test_a_model_whose_experts_python_calls_does_not_repeat_rows():
    assert not fuse_decode(made_at_random("Qwen3Moe")).repeats_rows
    assert fuse_decode(made()).repeats_rows
