"""Every change of weights, for a while or for good: what is computed meanwhile, and what is back afterwards."""

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_hybrid_cache import move_experts_to_host, quantize_weights

from models.expert_models import expert_model
from models.tiny_models import random_prompt, tiny_model
from weights.quantized_models import logits, quantized_weights, with_dense_weights

# The family, the change, and its bits.
CHANGES: dict[str, tuple[str, Callable[..., Any], int | None]] = {
    "weights in 8 bits": ("llama", quantize_weights, 8),
    "weights in 4 bits": ("llama", quantize_weights, 4),
    "experts": ("qwen3_moe", move_experts_to_host, None),
    "experts in 4 bits": ("qwen3_moe", move_experts_to_host, 4),
    "weights and experts in 8 bits": ("qwen3_moe", quantize_weights, 8),
}
Change = Callable[..., Any]


@pytest.fixture(params=CHANGES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(name: str) -> PreTrainedModel:
    family = CHANGES[name][0]
    return copy.deepcopy(tiny_model(family)) if family == "llama" else expert_model(family)


@pytest.fixture
def change(name: str) -> Change:
    _, of_kind, bits = CHANGES[name]
    return lambda model, bits=bits, **options: of_kind(model, bits, **options)


def test_the_very_same_parameters_are_back_afterwards_whatever_ends_it(model: Any, change: Change):
    if hasattr(model.config, "num_experts"):
        model.set_experts_implementation("batched_mm")
    implementation = model.config._experts_implementation
    before = {name: (weight, weight.clone()) for name, weight in model.named_parameters()}
    for error in (None, RuntimeError, KeyboardInterrupt):
        with contextlib.suppress(RuntimeError, KeyboardInterrupt), change(model, temporary=True):
            if hasattr(model.config, "num_experts"):
                assert model.config._experts_implementation == "hf_hybrid_cache"
            if error is not None:
                raise error
        after = dict(model.named_parameters())
        assert model.config._experts_implementation == implementation
        assert list(after) == list(before)
        assert all(after[name] is weight and torch.equal(weight, value) for name, (weight, value) in before.items())


def test_permanent_and_temporary_changes_compute_the_same_and_free_codes(model: Any, change: Change):
    waiting = change(model, temporary=True)
    assert not quantized_weights(model), "nothing changes before the block is entered"
    with waiting as report:
        theirs = logits(model)
        codes = [weakref.ref(weight.matrices) for weight in quantized_weights(model)]
        assert bool(codes) == bool(report.quantized_bytes)
    gc.collect()
    assert not any(each() for each in codes)
    assert change(model) == report
    assert torch.equal(logits(model), theirs)


def test_gradients_are_those_of_the_numbers_that_are_held(model: Any, change: Change):
    ids = random_prompt(2, 12)

    def gradients(model: PreTrainedModel) -> list[torch.Tensor]:
        model.zero_grad()
        embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
        model(inputs_embeds=embeddings, labels=ids).loss.backward()
        return [embeddings.grad, *(weight.grad for weight in model.parameters() if weight.grad is not None)]

    with change(model, temporary=True):
        most = 1 if quantized_weights(model) else None  # codes have no gradients
        ours, dense = gradients(model)[:most], with_dense_weights(model)
    dense.set_experts_implementation("eager")
    for mine, other in zip(ours, gradients(dense)[:most], strict=True):
        assert (mine - other).norm() <= (1e-4 if most is None else 1e-2) * other.norm()


def test_autocast_sets_the_type_of_the_output(model: Any, change: Change):
    with change(model, temporary=True), torch.autocast("cpu", torch.bfloat16):
        assert logits(model).dtype == torch.bfloat16


@pytest.mark.slow
def test_a_compiled_model_computes_the_same(model: Any, change: Change):
    change(model)
    eager = logits(model)
    torch.testing.assert_close(logits(torch.compile(model, backend="aot_eager")), eager, rtol=1e-4, atol=1e-4)
    torch.compiler.reset()
