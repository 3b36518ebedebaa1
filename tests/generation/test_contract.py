"""Every cache, in every generation mode, gives what transformers' `DynamicCache` gives: the same tokens and logits."""

import copy
import functools
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from hf_hybrid_cache.attention import StoredAttention
from hf_hybrid_cache.kernels.vector.processor import set_integer_kernels

from common.caches import CACHES, OWN_ATTENTION, QUANTIZED, QUANTIZED_OWN_ATTENTION, SAME_ATTENTION, SPLIT, stock
from common.modes import (
    FOR_QUANTIZED_BLOCKS,
    MODES,
    NOT_IN_TRANSFORMERS,
    Result,
    greedy,
    prompt_lookup,
    skipped_where_stock_fails,
)
from models.tiny_models import FAMILIES, tiny_model


@functools.cache
def expected(family: str, mode: str, dtype: torch.dtype, more: int = 0) -> Result:
    with skipped_where_stock_fails():
        return MODES[mode](tiny_model(family, dtype), stock, more)


EVERY_MODE = pytest.mark.parametrize(
    ("family", "mode"),
    [
        pytest.param(family, mode, marks=pytest.mark.xdist_group(f"{family}"))
        for family in FAMILIES
        for mode in MODES
        if (family, mode) not in NOT_IN_TRANSFORMERS
    ],
)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@EVERY_MODE
@pytest.mark.parametrize("cache", SAME_ATTENTION)
def test_tokens_and_logits_equal_those_of_dynamic_cache(cache: str, family: str, mode: str, dtype: torch.dtype):
    reference = expected(family, mode, dtype)
    actual = MODES[mode](tiny_model(family, dtype), CACHES[cache], 0)
    if mode == "continuations":  # attention to what is shared is merged with attention to the rest
        tolerance = 1e-3 if dtype == torch.float32 else 0.2
        torch.testing.assert_close(actual[1][0], reference[1][0], rtol=tolerance, atol=tolerance)
        assert dtype == torch.bfloat16 or torch.equal(actual[0], reference[0])
        return
    for ours, theirs in zip(actual, reference, strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=False)
        else:
            assert ours == theirs


# Keys and values of DeepSeek-V3 are not attended to as they are stored, so every step asks for them.
@pytest.mark.covering(2)
@pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")
@EVERY_MODE
@pytest.mark.parametrize(
    ("cache", "more"),
    # In short contexts nothing would leave the device.
    [*((cache, 0) for cache in OWN_ATTENTION), *((cache, FOR_QUANTIZED_BLOCKS) for cache in SPLIT)],
)
def test_tokens_equal_those_of_dynamic_cache_when_attention_is_not_its_own(
    cache: str, more: int, family: str, mode: str
):
    reference = expected(family, mode, torch.float32, more)
    actual = MODES[mode](tiny_model(family), CACHES[cache], more)
    for ours, theirs in zip(actual, reference, strict=True):
        if isinstance(theirs, torch.Tensor) and theirs.is_floating_point():
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
        elif isinstance(theirs, torch.Tensor):
            assert torch.equal(ours, theirs)
        else:
            assert ours == theirs


# With fewer bits, kernels with integer products round queries and weights to 8 bits.
OF_8_BITS = (
    "quantized_8",
    "quantized_balanced",
    "quantized_shared_with_nobody",
    "quantized_split",
    "quantized_split_in_three",
)


@pytest.mark.covering(2)
@pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")
@EVERY_MODE
@pytest.mark.parametrize("cache", QUANTIZED)
def test_quantized_caches_give_what_the_codes_of_their_blocks_give(
    cache: str, family: str, mode: str, request: pytest.FixtureRequest
):
    if cache not in OF_8_BITS:
        request.getfixturevalue("exact_kernels")
    ours, reference = QUANTIZED[cache]
    model = tiny_model(family)
    is_exact = cache not in QUANTIZED_OWN_ATTENTION
    with skipped_where_stock_fails():
        expected_result = MODES[mode](model, reference, FOR_QUANTIZED_BLOCKS)
    for mine, theirs in zip(MODES[mode](model, ours, FOR_QUANTIZED_BLOCKS), expected_result, strict=True):
        if not isinstance(theirs, torch.Tensor):
            assert mine == theirs
        elif theirs.is_floating_point() and not is_exact:
            # A number midway between two codes gets one or the other by the last bit of what attention gave before.
            is_off = ~torch.isclose(mine, theirs, rtol=1e-2, atol=1e-2)
            assert is_off.float().mean() < 0.01
            torch.testing.assert_close(mine, theirs, rtol=5e-2, atol=5e-2)
        else:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=False)


class ComparedAttention(StoredAttention):
    """Attends with integers, and then to the same codes without rounding; a test reads by how much they differ."""

    differences: list[float]

    def __deepcopy__(self, memo: dict) -> "ComparedAttention":
        return self

    def __call__(self, *arguments: Any) -> torch.Tensor:
        set_integer_kernels(True)
        rounded = super().__call__(*arguments).float()
        set_integer_kernels(False)
        exact = super().__call__(*arguments)
        self.differences.append(float((rounded - exact).abs().max() / exact.abs().max()))
        return exact


# Attention's rounding changes the states that codes are made of, so tokens and logits tell little here.
@pytest.mark.covering(1)
@pytest.mark.usefixtures("exact_kernels")
@pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")
@EVERY_MODE
@pytest.mark.parametrize("cache", sorted(set(QUANTIZED_OWN_ATTENTION).difference(OF_8_BITS)))
def test_integer_kernels_give_what_exact_ones_give_for_the_same_few_bits(cache: str, family: str, mode: str):
    expected(family, mode, torch.float32)  # skips what transformers itself cannot do
    differences: list[float] = []

    def make(config: PreTrainedConfig) -> Cache:
        made = QUANTIZED[cache][0](config)
        made._stores.attention = ComparedAttention(made._stores.stats, True)
        made._stores.attention.differences = differences
        return made

    MODES[mode](tiny_model(family), make, FOR_QUANTIZED_BLOCKS)
    # Scores of these models are far apart; a sequence, a head or a token in the place of another would be off by 1.
    assert max(differences, default=0) < 0.1
    assert differences or family != "llama"


@pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_any_attention_implementation_gets_the_stored_states(cache: str, implementation: str):
    model = copy.deepcopy(tiny_model("llama"))
    model.set_attn_implementation(implementation)
    ours, theirs = (greedy(model, make_cache) for make_cache in (CACHES[cache], stock))
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", sorted({family for family, _ in NOT_IN_TRANSFORMERS}))
def test_modes_left_out_are_refused_by_transformers_itself(family: str):
    with pytest.raises(ValueError, match="not supported with stateful models"):
        prompt_lookup(tiny_model(family), stock)
