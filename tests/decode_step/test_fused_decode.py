"""A fused step gives what the model's own forward gives, and leaves the same in the cache; each test says which ran."""

import copy
import pickle
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import cycle
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn
from transformers.cache_utils import DynamicCache

from decode_step.twins import CACHES, FAMILIES, FIRST_STEP, Twins, made_at_random, only_packs
from hf_hybrid_cache import (
    DynamicHybridCache,
    OffloadedHybridCache,
    quantize_weights,
    set_num_threads,
)
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.decode_step import UnknownStepError, fuse_decode

from common.caches import stock
from common.modes import FOR_QUANTIZED_BLOCKS, MODES, generate, read
from models.tiny_models import random_prompt, tiny_model


@pytest.fixture
def llama() -> Any:
    return made_at_random()


@pytest.fixture
def twins(llama: Any) -> Twins:
    """Twins that have read a prompt."""
    twins = Twins(llama)
    twins.forward(random_prompt(1, 40))
    return twins


@pytest.mark.default("pairs")
@pytest.mark.usefixtures("exact_kernels")
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "cache"), list(zip(FAMILIES, cycle(CACHES), strict=False)))
def test_fused_steps_give_what_the_own_forward_gives(family: str, cache: str, dtype: torch.dtype, bits: int | None):
    # Where a number is midway between two codes, the last bit decides.
    has_codes = bits is not None or cache != "full precision"
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-2 if has_codes else 1e-5
    if family in {"GptOss", "Qwen3Moe"} and tolerance > 1e-5:
        pytest.skip("the last bits choose other experts")
    twins = Twins(made_at_random(family, dtype, bits), CACHES[cache], tolerance)
    twins.forward(random_prompt(2, 150))
    assert twins.steps(70) >= 66  # over the ends of two blocks
    assert only_packs(twins.fused)
    assert twins.hold_the_same()


@pytest.mark.usefixtures("exact_kernels")
@pytest.mark.parametrize("window", [2, 4, 64, 65, 100, 128])
@pytest.mark.parametrize("family", ["Mistral", "Gemma3"])
def test_all_steps_over_windows_of_any_size_are_in_one_call(family: str, window: int):
    twins = Twins(made_at_random(family, sliding_window=window), tolerance=1e-5)
    twins.forward(random_prompt(2, 100))
    assert twins.steps(150) == 150
    assert twins.hold_the_same()


@pytest.mark.parametrize("mode", MODES)
def test_generation_gives_the_tokens_that_dynamic_cache_gives(mode: str):
    expected = MODES[mode](tiny_model("llama"), stock, FOR_QUANTIZED_BLOCKS)
    model = copy.deepcopy(tiny_model("llama"))
    fused = fuse_decode(model)
    for ours, theirs in zip(MODES[mode](model, DynamicHybridCache, FOR_QUANTIZED_BLOCKS), expected, strict=True):
        if isinstance(theirs, torch.Tensor) and theirs.is_floating_point():
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
        else:
            assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs
    assert fused.fused_steps
    assert only_packs(fused)


@pytest.mark.parametrize(("rows", "fused_steps"), [(3, 2), (16, 2), (17, 0)])
def test_sixteen_sequences_are_fused_and_seventeen_are_not(llama: Any, rows: int, fused_steps: int):
    twins = Twins(llama)
    twins.forward(random_prompt(rows, 50))
    assert twins.steps(2) == fused_steps
    assert twins.fused.other_passes[FIRST_STEP] == 3 - fused_steps


# The reason that is counted -> options of the step, or a function that changes the model, and returns what undoes it.
OTHERS: dict[str, Any] = {
    "output_hidden_states is given": {"output_hidden_states": True},
    "output_attentions is given": {"output_attentions": True},
    "hidden states or attentions are asked for": lambda model: setting(model.config, "output_hidden_states", True),
    "use_cache=False is given": {"use_cache": False},
    "cache_position is given": {"cache_position": torch.tensor([40])},
    "a mask adds numbers to the scores, or hides all tokens": {"attention_mask": torch.full((1, 1, 1, 41), -0.5)},
    "autocast is on": lambda model: torch.autocast("cpu", torch.bfloat16),
    "a module is in training mode": lambda model: setting(model.model.layers[0], "training", True),
}


@contextmanager
def setting(owner: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


@pytest.mark.parametrize("reason", OTHERS)
def test_any_other_pass_is_run_by_the_own_forward(twins: Twins, reason: str):
    other, models = OTHERS[reason], (twins.model, twins.own_model)
    surroundings = [nullcontext() if isinstance(other, dict) else other(model) for model in models]
    with surroundings[0], surroundings[1]:
        twins.forward(torch.tensor([[7]]), **(other if isinstance(other, dict) else {}))
    assert twins.fused.other_passes == {FIRST_STEP: 1, reason: 1}
    assert twins.steps(3) == 3


def test_a_step_of_the_decoder_alone_is_fused_unless_a_tuple_is_asked_for(twins: Twins):
    twins.model, twins.own_model = twins.model.model, twins.own_model.model
    embedded = twins.model.embed_tokens(torch.tensor([[5]])).detach()
    for options in ({"input_ids": torch.tensor([[7]])}, {"inputs_embeds": embedded}):
        twins.forward(**options)
    twins.forward(input_ids=torch.tensor([[7]]), return_dict=False)
    twins.forward(torch.tensor([[7]]))
    passes = {FIRST_STEP: 1, "return_dict=False is given": 1}
    assert (twins.fused.fused_steps, dict(twins.fused.other_passes)) == (3, passes)


def test_a_step_with_gradients_is_refused_as_by_the_own_forward(twins: Twins):
    with pytest.raises(RuntimeError, match="keeps no gradients"):
        twins.model(torch.tensor([[7]]), **cache_argument(twins.ours))
    assert twins.fused.other_passes["gradients are recorded"] == 1
    assert twins.steps(3) == 3


@pytest.mark.slow
def test_a_compiled_model_runs_its_own_forward(llama: Any):
    own, fused = logits(llama), fuse_decode(llama)
    torch.testing.assert_close(logits(torch.compile(llama, backend="eager")), own, rtol=1e-4, atol=1e-4)
    torch.compiler.reset()
    assert (fused.fused_steps, fused.other_passes.total()) == (0, 0)


@pytest.mark.parametrize("make", [DynamicCache, lambda config: OffloadedHybridCache(config, cpu_decode=False)])
def test_steps_over_other_caches_are_not_fused(llama: Any, make: Callable[..., Any]):
    fused = fuse_decode(llama)
    logits(llama, make(config=llama.config))
    assert (fused.fused_steps, fused.other_passes.total()) == (0, 4)


def logits(model: Any, cache: Any = None) -> torch.Tensor:
    """Logits of three steps after a prompt."""
    cache = DynamicHybridCache(model.config) if cache is None else cache
    read(model, random_prompt(1, 40), cache)
    return torch.stack([read(model, token, cache) for token in random_prompt(1, 3).split(1, 1)])


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, 4)])
def test_any_number_of_threads_gives_the_same_bits(dtype: torch.dtype, bits: int | None):
    large = {"hidden_size": 256, "intermediate_size": 528, "head_dim": 48, "num_key_value_heads": 1}
    model, before = made_at_random("Llama", dtype, bits, **large), torch.get_num_threads()
    own, fused, results = logits(model), fuse_decode(model), []
    try:
        for number in (1, 2, 1):
            set_num_threads(number)
            torch.set_num_threads(number)
            results.append(logits(model))
    finally:
        set_num_threads(None)
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert fused.fused_steps == 9
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5 if bits is None else 1e-3
    assert (results[0] - own).abs().max() <= tolerance * own.abs().max()


def test_weights_that_are_quantized_for_a_while_count_in_it(twins: Twins):
    twins.tolerance, ours, own = 1e-3, twins.model, twins.own_model
    for bits in (8, 4):
        with quantize_weights(ours, bits, temporary=True), quantize_weights(own, bits, temporary=True):
            assert twins.steps(2) == 2
        assert twins.steps(2) == 2


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_runs_its_own_weights(llama: Any, copy_of: Callable[[Any], Any]):
    fused = fuse_decode(llama)
    expected = logits(llama)
    copied = copy_of(llama)
    llama.model.layers[0].mlp.down_proj.weight.data.mul_(-1)
    assert torch.equal(logits(copied), expected)
    assert not torch.equal(logits(llama), expected)
    assert (fused.fused_steps, fuse_decode(copied).fused_steps) == (6, 3)


def test_fusing_is_undone_at_the_end_of_a_block_and_once(llama: Any):
    with fuse_decode(llama) as fused:
        assert fuse_decode(llama) is fused
        logits(llama)
    assert "forward" not in vars(llama.model)
    logits(llama)
    fused.undo()
    assert fused.fused_steps == 3
    assert fuse_decode(llama) is not fused


def test_a_model_and_a_cache_are_freed_with_their_last_references():
    model = made_at_random()
    fused = fuse_decode(model)
    cache = DynamicHybridCache(model.config)
    logits(model, cache)
    of_cache, of_model = weakref.ref(cache), weakref.ref(model.model)
    of_weight = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    del cache
    assert of_cache() is None
    del model
    assert of_model() is None
    assert of_weight() is None
    assert fused.fused_steps == 3


def test_callers_on_several_threads_get_their_own_tokens(llama: Any):
    fused, prompts = fuse_decode(llama), [random_prompt(1, 30, seed) for seed in range(4)]

    def answer(prompt: torch.Tensor) -> torch.Tensor:
        return generate(llama, prompt, DynamicHybridCache(llama.config), max_new_tokens=20)[0]

    expected = [answer(prompt) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, pool.map(answer, prompts * 3), expected * 3))
    assert fused.fused_steps > 4 * 4 * 15


def test_a_hook_of_accelerate_on_the_decoder_is_never_lost(llama: Any):
    calls: list[nn.Module] = []
    hook = ModelHook()
    hook.pre_forward = lambda module, *args, **kwargs: calls.append(module) or (args, kwargs)
    add_hook_to_module(llama.model, hook)
    with pytest.raises(UnknownStepError, match="as accelerate does it"):
        fuse_decode(llama)
    logits(llama)
    remove_hook_from_module(llama.model)
    fused = fuse_decode(llama)
    add_hook_to_module(llama.model, hook)
    logits(llama)
    assert (fused.fused_steps, len(calls)) == (3, 8)
