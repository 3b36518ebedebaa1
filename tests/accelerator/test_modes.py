"""Every way to generate, with every cache, gives what transformers' own cache gives, for a model on an accelerator."""

import copy
import functools
import itertools
from dataclasses import replace

import pytest
from contracts.generation import FAMILIES_AND_MODES, VARIANTS, Variant
from transformers import PreTrainedModel

from hf_hybrid_cache import DecodeOnCPU

from accelerator.orders import DEVICE, IS_SIMULATED
from common.caches import CACHES
from common.slow import slow
from models.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("in_any_order")

# torch does not copy memory of the simulated accelerator from Python, as these do.
COPIED = {"assistant", "copied_prefix"} if IS_SIMULATED else set()
DECODED = {f"{name}_decoded_on_cpu": Variant(make, decode=DecodeOnCPU()) for name, make in CACHES.items()}
# All modes with one family, and one mode with all.
CASES = [
    (cache, family, mode)
    for cache in VARIANTS | DECODED
    for family, mode in FAMILIES_AND_MODES
    if mode not in COPIED and (family == "llama" or mode == "beams")
]
QUICK = set(zip(VARIANTS | DECODED, itertools.cycle([("llama", "prompt_lookup"), ("gemma3", "beams")]), strict=False))


@functools.cache
def model_on_device(family: str) -> PreTrainedModel:
    return copy.deepcopy(tiny_model(family)).to(DEVICE)


@pytest.mark.usefixtures("short_prompts_choose")
@pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")
@pytest.mark.parametrize(
    ("cache", "family", "mode"), [case if (case[0], case[1:]) in QUICK else slow(*case) for case in CASES]
)
def test_tokens_and_logits_are_those_of_dynamic_cache(cache: str, family: str, mode: str):
    variant = (VARIANTS | DECODED)[cache]
    if DEVICE == "cuda" and variant.more:
        variant = replace(variant, share_off=0.01)
    variant.require(model_on_device(family), mode, least_tolerance=1e-2)
