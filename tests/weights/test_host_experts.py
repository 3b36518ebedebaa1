"""Experts in host memory: models compute what transformers' own implementation does, and read only chosen experts."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from hf_hybrid_cache import move_experts_to_host, quantize_weights
from hf_hybrid_cache.weights.chosen_experts import chosen_experts
from hf_hybrid_cache.weights.expert_layers import ExpertLayer, expert_modules

from models.architectures import small_model
from models.expert_models import EXPERT_FAMILIES, NUM_EXPERTS, expert_model
from models.tiny_models import tiny_model
from weights.quantized_models import logits, quantized_weights, with_dense_weights

in_bits = pytest.mark.parametrize("bits", [None, 8, 4])


def first_experts(model: PreTrainedModel) -> Any:
    return next(iter(expert_modules(model).values()))


# --- what a model computes


@pytest.mark.default("pairs")
@pytest.mark.parametrize("num_tokens", [1, 7, 40], ids=["one token", "few", "more than an expert takes at once"])
@in_bits
@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_experts_compute_as_one_after_the_other_with_the_same_numbers(family: str, bits: int | None, num_tokens: int):
    model = expert_model(family)
    own = logits(model, num_tokens)
    with move_experts_to_host(model, bits, temporary=True):
        assert bool(quantized_weights(model)) == (bits is not None)
        ours, dense = logits(model, num_tokens), with_dense_weights(model)
    dense.set_experts_implementation("eager")
    theirs = logits(dense, num_tokens)
    errors = (ours - theirs).abs().amax(-1) / theirs.abs().max()
    # With codes, choices of experts that come close to each other change with the last bits.
    assert errors.max() <= 1e-5 if bits is None else errors.median() < 2e-3
    assert torch.equal(logits(model, num_tokens), own)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_experts_of_any_type_compute_as_precisely_as_one_after_the_other(family: str, dtype: torch.dtype):
    module = first_experts(expert_model(family, torch.float64)).to(dtype)
    tokens, chosen = torch.randn(5, 64).to(dtype), torch.tensor([[0, 1], [3, 2], [1, 0], [2, 0], [0, 3]])
    weights = torch.rand(5, 2).to(dtype)
    exact = copy.deepcopy(module).double()(tokens.double(), chosen, weights.double())
    with torch.no_grad():
        theirs = module(tokens, chosen, weights)
        ours = chosen_experts(module, tokens, chosen, weights)
    assert ours.dtype == dtype
    assert (ours - exact).abs().max() <= 1.5 * (theirs - exact).abs().max() + 1e-12


# --- which experts are read


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("repeats", [0, 1, 30], ids=["no token", "few", "many"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
def test_any_activation_is_the_models_and_unknown_experts_are_refused(activation: str, repeats: int, bits: int | None):
    model = expert_model("mixtral")
    module = first_experts(model)
    module.act_fn = ACT2FN[activation]
    chosen = torch.tensor([[2, 0], [1, NUM_EXPERTS], [NUM_EXPERTS, 4]]).repeat(repeats, 1)
    tokens, weights = torch.randn(len(chosen), 64), torch.rand(len(chosen), 2)
    with torch.no_grad():
        theirs = module(tokens, chosen, weights)
        move_experts_to_host(model, bits)
        errors = (module(tokens, chosen, weights) - theirs).abs()
        assert (errors <= (1e-5 if bits is None else 0.05) * theirs.abs().amax(1, keepdim=True).clamp_min(1)).all()
        unknown, tokens, weights = torch.tensor([[0, -1], [NUM_EXPERTS + 1, 2]]), torch.randn(2, 64), torch.rand(2, 2)
        with pytest.raises(IndexError, match=r"indices are of no matrix: there are 6\."):
            module(tokens, unknown, weights)


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_indices_and_biases_of_other_types_compute_the_same_or_are_refused(family: str, bits: int | None):
    model = expert_model(family)
    module = first_experts(model)
    tokens, weights, chosen = torch.randn(9, 64), torch.rand(9, 2), torch.randint(NUM_EXPERTS, (9, 2))
    with torch.no_grad(), move_experts_to_host(model, bits, temporary=True):
        before = module(tokens, chosen, weights)
        for name, bias in module.named_parameters():
            if "bias" in name:
                bias.data = bias.data.double()
        for dtype in (torch.int32, torch.int16, torch.uint8):
            assert torch.equal(module(tokens, chosen.to(dtype), weights), before)
        with pytest.raises(TypeError, match=r"Indices of experts are integers, got torch.float32"):
            module(tokens, chosen.float(), weights)
        for wrong in (
            (tokens[:, :60], chosen, weights),
            (tokens, chosen[:5], weights),
            (tokens, chosen, weights[:, :1]),
        ):
            with pytest.raises(ValueError, match="Experts of 64 columns got tokens"):
                module(*wrong)
        if family == "gpt_oss":
            module.down_proj_bias.data = torch.zeros(NUM_EXPERTS, 60)
            with pytest.raises(
                ValueError, match=rf"is \[{NUM_EXPERTS}, 60\], and down_proj needs \[{NUM_EXPERTS}, 64\]"
            ):
                module(tokens, chosen, weights)


def test_experts_of_columns_when_moved_then_a_kernel_reads_them():
    """gpt-oss keeps them so; they are laid out in rows once, and stay the same numbers in the same shape."""
    model, moved = expert_model("gpt_oss"), expert_model("gpt_oss")
    assert ExpertLayer(first_experts(model)).up.products is None
    move_experts_to_host(moved)
    layer = ExpertLayer(first_experts(moved))
    assert None not in (layer.up.products, layer.down.products)
    for weight, other in zip(model.parameters(), moved.parameters(), strict=True):
        assert torch.equal(weight, other)
    model.set_experts_implementation("eager")
    torch.testing.assert_close(logits(moved, 7), logits(model, 7), rtol=1e-5, atol=1e-5)


# --- the report, and which models


@in_bits
def test_the_report_counts_experts_and_bytes(bits: int | None):
    model = expert_model("qwen3_moe")
    experts = [weight for module in expert_modules(model).values() for weight in module.parameters()]
    original, everything = (sum(each.nbytes for each in of) for of in (experts, model.parameters()))
    report = move_experts_to_host(model, bits)
    quantized = sum(weight.matrices.num_bytes for weight in quantized_weights(model))
    assert (report.expert_layers, report.experts, report.bits) == (3, NUM_EXPERTS, bits)
    assert report.original_bytes == (0 if bits is None else original)
    assert report.original_bytes + report.other_bytes == everything
    assert report.expert_bytes == (original if bits is None else quantized)
    assert report.quantized_bytes == quantized
    assert "3 layers of 6 experts in host memory" in str(report)


def test_experts_that_are_quantized_already_are_counted_and_kept():
    model = expert_model("qwen3_moe")
    quantize_weights(model, 8)
    theirs = logits(model)
    experts = [weight for module in expert_modules(model).values() for weight in module.parameters()]
    report = move_experts_to_host(model)
    assert report.expert_bytes == sum(weight.matrices.num_bytes for weight in experts)
    assert report.bits is None
    assert torch.equal(logits(model), theirs)
    with pytest.raises(ValueError, match=r"can be quantized: .* is quantized already"):
        move_experts_to_host(model, 4)


@pytest.mark.parametrize(
    "move", [move_experts_to_host, lambda *given: move_experts_to_host(*given, temporary=True).__enter__()]
)
@pytest.mark.parametrize(
    ("make", "bits", "error", "message"),
    [
        (lambda: tiny_model("llama"), None, ValueError, r"LlamaForCausalLM has no experts .*: it is dense\."),
        # transformers' `ExpertsInterface` does not know these experts.
        (lambda: small_model("JetMoeConfig"), None, ValueError, "JetMoe.* has no experts .*JetMoeParallelExperts"),
        (lambda: small_model("Llama4TextConfig"), None, ValueError, "Llama4.* has no experts .*Llama4TextExperts"),
        (lambda: small_model("LongcatFlashConfig"), None, ValueError, "Longcat.* has no experts .*LongcatFlashExperts"),
        (lambda: expert_model("mixtral").to("meta"), None, ValueError, "Weights are on meta"),
        (lambda: expert_model("mixtral"), 5, ValueError, "bits must be"),
        (lambda: expert_model("mixtral"), "4", TypeError, "bits must be"),
        (lambda: expert_model("mixtral"), True, TypeError, "bits must be"),
    ],
)
def test_what_cannot_be_moved_is_refused_before_anything_changes(
    make: Callable[[], PreTrainedModel], bits: Any, error: type[Exception], message: str, move: Callable
):
    model = make()
    implementation = model.config._experts_implementation
    with pytest.raises(error, match=message):
        move(model, bits)
    assert model.config._experts_implementation == implementation
    assert not quantized_weights(model)
