"""Every cache, in every generation mode, gives what transformers' `DynamicCache` gives: the same tokens and logits."""

from typing import Any

import pytest
import torch
from contracts.generation import FAMILIES_AND_MODES, OF_8_BITS, VARIANTS, expected
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from hf_hybrid_cache.attention import StoredAttention
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.kernels.vector.processor import set_integer_kernels

from common.caches import CACHES, CHOOSING, QUANTIZED, QUANTIZED_OWN_ATTENTION, SAME_ATTENTION, MakeCache, stock
from common.modes import FOR_QUANTIZED_BLOCKS, MODES, prompt_lookup
from models.tiny_models import random_prompt, tiny_model

# What others do to a cache is a part of what these do.
CROSSED = ("beams", "assistant", "left_padding", "copied_prefix", "continuations")


def ways(are_crossed: bool) -> pytest.MarkDecorator:
    """Families and modes: those that meet every cache, or the others."""
    chosen = [(family, mode) for family, mode in FAMILIES_AND_MODES if (mode in CROSSED) == are_crossed]
    return pytest.mark.parametrize(
        ("family", "mode"), [pytest.param(*each, marks=pytest.mark.xdist_group(each[0])) for each in chosen]
    )


# Keys and values of DeepSeek-V3 are not attended to as they are stored, so every step asks for them.
pytestmark = pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")


@pytest.mark.default("pairs")
@ways(True)
@pytest.mark.parametrize("cache", VARIANTS)
def test_tokens_and_logits_equal_those_of_dynamic_cache(cache: str, family: str, mode: str):
    VARIANTS[cache].require(tiny_model(family), mode)


@pytest.mark.default("values")
@ways(False)
@pytest.mark.parametrize("cache", VARIANTS)
def test_tokens_and_logits_in_simpler_ways_equal_those_of_dynamic_cache(cache: str, family: str, mode: str):
    VARIANTS[cache].require(tiny_model(family), mode)


@pytest.mark.default("values")
@ways(True)
@pytest.mark.parametrize("cache", SAME_ATTENTION)
def test_tokens_and_logits_in_bfloat16_equal_those_of_dynamic_cache(cache: str, family: str, mode: str):
    VARIANTS[cache].require(tiny_model(family, torch.bfloat16), mode)


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
@pytest.mark.default("values")
@pytest.mark.usefixtures("exact_kernels")
@ways(True)
@pytest.mark.parametrize("cache", sorted(set(QUANTIZED_OWN_ATTENTION).difference(OF_8_BITS)))
def test_integer_kernels_give_what_exact_ones_give_for_the_same_few_bits(cache: str, family: str, mode: str):
    expected(tiny_model(family), mode)  # skips what transformers itself cannot do
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


def test_modes_left_out_are_refused_by_transformers_itself():
    with pytest.raises(ValueError, match="not supported with stateful models"):
        prompt_lookup(tiny_model("qwen3_next"), stock)


OF_ANY_TYPE = CACHES | CHOOSING
# A share, or attention on the CPU that was asked for, needs one type that there is a kernel for.
ASK_FOR_A_KERNEL = {"cpu_decode_partly", "shared_with_nobody", "split", "split_in_three"}


def last_logits(make: MakeCache, dtype: torch.dtype) -> torch.Tensor:
    """Return the last logits of a prompt, some tokens and a step, beyond what stays on the device."""
    model = tiny_model("llama", dtype)
    cache = make(model.config)
    with torch.no_grad():
        for tokens in (200, 5, 1):
            logits = model(random_prompt(2, tokens, seed=tokens), **cache_argument(cache), logits_to_keep=1).logits
    return logits


@pytest.mark.parametrize("name", OF_ANY_TYPE)
def test_model_in_float64_or_under_autocast_then_answers_as_stock(name: str):
    for dtype, is_cast in ((torch.float64, False), (torch.float32, True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            expected = last_logits(stock, dtype)
            try:
                logits = last_logits(OF_ANY_TYPE[name], dtype)
            except ValueError as error:
                assert name in ASK_FOR_A_KERNEL
                assert "or pass cpu_decode=False" in str(error) or "group=" in str(error)  # noqa: PT017
                continue
        assert logits.dtype == expected.dtype
        assert (logits - expected).abs().max() < (0.3 if is_cast or name in CHOOSING else 1e-4)
