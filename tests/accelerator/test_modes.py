"""Every way to generate, with every cache, gives what transformers' own cache gives, for a model on an accelerator."""

import copy
import functools
from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from accelerator.orders import DEVICE, IS_SIMULATED, ORDERS, in_order
from common.caches import CACHES, QUANTIZED, QUANTIZED_OWN_ATTENTION, SPLIT, stock
from common.modes import FOR_QUANTIZED_BLOCKS, MODES, Result
from common.slow import slow_but
from models.tiny_models import tiny_model

# torch does not copy memory of the simulated accelerator from Python, as these do.
COPIED = {"assistant", "copied_prefix"} if IS_SIMULATED else set()
EACH_MODE = pytest.mark.parametrize("mode", slow_but(["beams", "prompt_lookup"], sorted(set(MODES) - COPIED)))


@pytest.fixture(autouse=True)
def in_any_order() -> Iterator[None]:
    with in_order(ORDERS[-1]):
        yield


@functools.cache
def model_on_device() -> PreTrainedModel:
    return copy.deepcopy(tiny_model("llama")).to(DEVICE)


def require_same(ours: Result, theirs: Result, share_off: float = 0.0) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        if not isinstance(other, torch.Tensor):
            assert mine == other
        elif other.is_floating_point():
            is_off = ~torch.isclose(mine, other, rtol=1e-2, atol=1e-2)
            assert is_off.float().mean() <= share_off
        else:
            assert torch.equal(mine, other)


@EACH_MODE
@pytest.mark.parametrize("cache", CACHES)
def test_tokens_and_logits_are_those_of_dynamic_cache(cache: str, mode: str):
    model = model_on_device()
    more = FOR_QUANTIZED_BLOCKS if cache in SPLIT else 0
    require_same(MODES[mode](model, CACHES[cache], more), MODES[mode](model, stock, more))


@pytest.mark.usefixtures("exact_kernels")
@EACH_MODE
@pytest.mark.parametrize("cache", QUANTIZED)
def test_quantized_caches_give_what_the_codes_of_their_blocks_give(cache: str, mode: str):
    ours, reference = QUANTIZED[cache]
    model = model_on_device()
    # A number midway between two codes gets one or the other by the last bit of what attention gave before.
    is_exact = cache not in QUANTIZED_OWN_ATTENTION and DEVICE != "cuda"
    results = (MODES[mode](model, make, FOR_QUANTIZED_BLOCKS) for make in (ours, reference))
    require_same(*results, share_off=0 if is_exact else 0.01)
