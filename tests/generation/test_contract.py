"""Every cache, in every generation mode, gives what transformers' `DynamicCache` gives: the same tokens and logits."""

import pytest
import torch
from contracts.generation import FAMILIES_AND_MODES, VARIANTS

from common.caches import CACHES, CHOOSING, SAME_ATTENTION, MakeCache, stock
from common.modes import prompt_lookup, read
from models.tiny_models import random_prompt, tiny_model

ways = pytest.mark.parametrize(
    ("family", "mode"), [pytest.param(*each, marks=pytest.mark.xdist_group(each[0])) for each in FAMILIES_AND_MODES]
)
# One of each kind; the others differ from one of these by options.
MAIN = (
    "offloaded",
    "default",
    "split",
    "split_in_three",
    "quantized_8",
    "quantized_split_streamed",
    "choosing_on_host",
    "decoded_in_float64",
)
# Keys and values of DeepSeek-V3 are not attended to as they are stored, so every step asks for them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Attention asks for the keys and values"),
    pytest.mark.usefixtures("short_prompts_choose"),
]


@pytest.mark.default("pairs")
@ways
@pytest.mark.parametrize("cache", MAIN)
def test_tokens_and_logits_equal_those_of_dynamic_cache(cache: str, family: str, mode: str):
    VARIANTS[cache].require(tiny_model(family), mode)


@pytest.mark.default("values")
@ways
@pytest.mark.parametrize("cache", [name for name in VARIANTS if name not in MAIN])
def test_tokens_and_logits_of_other_caches_equal_those_of_dynamic_cache(cache: str, family: str, mode: str):
    VARIANTS[cache].require(tiny_model(family), mode)


@pytest.mark.default("values")
@ways
@pytest.mark.parametrize("cache", SAME_ATTENTION)
def test_tokens_and_logits_in_bfloat16_equal_those_of_dynamic_cache(cache: str, family: str, mode: str):
    VARIANTS[cache].require(tiny_model(family, torch.bfloat16), mode)


def test_modes_left_out_are_refused_by_transformers_itself():
    with pytest.raises(ValueError, match="not supported with stateful models"):
        prompt_lookup(tiny_model("qwen3_next"), stock)


OF_ANY_TYPE = CACHES | CHOOSING
# A share, or attention on the CPU that was asked for, needs one type that there is a kernel for.
ASK_FOR_A_KERNEL = {"shared_with_nobody", "split", "split_in_three"}


def last_logits(make: MakeCache, dtype: torch.dtype) -> torch.Tensor:
    """Return the last logits of a prompt, some tokens and a step, beyond what stays on the device."""
    model = tiny_model("llama", dtype)
    cache = make(model.config)
    for tokens in (200, 5, 1):
        logits = read(model, random_prompt(2, tokens, seed=tokens), cache, logits_to_keep=1)
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
