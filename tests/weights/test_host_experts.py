"""Experts in host memory: models compute what transformers' own implementation does, and read only chosen experts."""

import copy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from hf_hybrid_cache import (
    DecodeOnCPU,
    DynamicHybridCache,
    HybridCache,
    OffloadedHybridCache,
    minmax,
    move_experts_to_host,
    quantize_weights,
)
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.weights.chosen_experts import chosen_experts
from hf_hybrid_cache.weights.expert_layers import ExpertLayer, expert_modules
from hf_hybrid_cache.weights.matrices import Matrices
from hf_hybrid_cache.weights.plain_matrices import PlainMatrices
from hf_hybrid_cache.weights.quantized_matrices import QuantizedMatrices
from hf_hybrid_cache.weights.quantized_weight import QuantizedWeight

from common.caches import stock
from common.modes import MODES, NOT_IN_TRANSFORMERS, skipped_where_stock_fails
from models.architectures import small_model
from models.expert_models import EXPERT_FAMILIES, NUM_EXPERTS, expert_model
from models.tiny_models import random_prompt, tiny_model
from weights.quantized_models import logits, with_dense_weights

# transformers' `ExpertsInterface` does not know these experts.
OTHER_FORMS = {
    "JetMoeConfig": "JetMoeParallelExperts",
    "Llama4TextConfig": "Llama4TextExperts",
    "LongcatFlashConfig": "LongcatFlashExperts",
}
CACHES = {
    "dynamic": DynamicHybridCache,
    "offloaded": OffloadedHybridCache,
    "quantized": lambda config: HybridCache(config, codec=minmax(8, group_size=32)),
}
# One token, few, and more than an expert takes at once.
TOKEN_COUNTS = [1, 7, 40]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, share: float) -> None:
    assert (ours - theirs).abs().max() <= share * theirs.abs().max()


def with_dense_experts(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model whose experts are the numbers that the codes stand for, one after the other."""
    model = with_dense_weights(model)
    model.set_experts_implementation("eager")
    return model


# --- what a model computes


def test_experts_when_no_norm_after_them_is_declared_then_compute_the_same():
    model = copy.deepcopy(expert_model("mixtral"))
    expected = logits(model)
    for module in expert_modules(model).values():
        vars(module).pop("has_post_expert_norm", None)  # since transformers 5.20
    move_experts_to_host(model)
    assert_close(logits(model), expected, 1e-5)


@pytest.mark.parametrize("num_tokens", TOKEN_COUNTS)
@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_model_when_experts_are_on_host_then_computes_as_eager_experts(family, num_tokens):
    model = expert_model(family)
    theirs = logits(model, num_tokens)
    with move_experts_to_host(model, temporary=True):
        ours = logits(model, num_tokens)
    assert_close(ours, theirs, 1e-5)
    assert torch.equal(logits(model, num_tokens), theirs)


@pytest.mark.parametrize("num_tokens", TOKEN_COUNTS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_a_model_computes_with_what_the_codes_of_its_experts_stand_for(family, bits, num_tokens):
    model = expert_model(family)
    with move_experts_to_host(model, bits, temporary=True):
        assert any(isinstance(weight, QuantizedWeight) for weight in model.parameters())
        ours = logits(model, num_tokens)
        theirs = logits(with_dense_experts(model), num_tokens)
    # Choices of experts that come close to each other change with the last bits.
    errors = (ours - theirs).abs().amax(-1) / theirs.abs().max()
    assert errors.median() < 2e-3
    assert not any(isinstance(weight, QuantizedWeight) for weight in model.parameters())


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_experts_of_any_type_compute_as_precisely_as_one_after_the_other(family, dtype):
    [first, *_] = expert_modules(expert_model(family, torch.float64)).values()
    tokens, chosen = torch.randn(5, 64).to(dtype), torch.tensor([[0, 1], [3, 2], [1, 0], [2, 0], [0, 3]])
    weights = torch.rand(5, 2).to(dtype)
    module: Any = copy.deepcopy(first).to(dtype)
    exact = copy.deepcopy(module).double()(tokens.double(), chosen, weights.double())
    with torch.no_grad():
        theirs = module(tokens, chosen, weights)
        ours = chosen_experts(module, tokens, chosen, weights)
    assert ours.dtype == dtype
    assert (ours - exact).abs().max() <= 1.5 * (theirs - exact).abs().max() + 1e-12


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_the_sums_of_gated_experts_are_computed_by_one_call(family):
    [first, *_] = expert_modules(expert_model(family)).values()
    layer = ExpertLayer(first)
    given = torch.randn(2, 64), torch.tensor([[0, 1], [2, 0]]), torch.rand(2, 2), layer.up_bias, layer.down_bias
    assert layer.up.add_up_experts(layer.down, *given) is not None
    # GPT-OSS has another gate.
    assert layer.has_silu_gate == (family != "gpt_oss")


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_other_activations_are_those_of_the_model(activation, bits):
    module: Any
    model = expert_model("mixtral")
    [module, *_] = expert_modules(model).values()
    module.act_fn = ACT2FN[activation]
    assert not ExpertLayer(module).has_silu_gate
    given = torch.randn(9, 64), torch.tensor([[2, 0], [1, NUM_EXPERTS], [3, 4]]).repeat(3, 1), torch.rand(9, 2)
    with torch.no_grad():
        theirs = module(*given)
        with move_experts_to_host(model, bits, temporary=True):
            ours = module(*given)
    assert_close(ours, theirs, 1e-5 if bits is None else 0.05)


@pytest.mark.covering(1)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_tokens_are_those_of_dynamic_cache_in_every_mode(family, mode, cache):
    if (family, mode) in NOT_IN_TRANSFORMERS:
        pytest.skip("transformers refuses to roll back recurrent states")
    model, ours = expert_model(family), CACHES[cache]
    # The error of quantized keys and values is not tested here.
    reference = ours if cache == "quantized" else stock
    with skipped_where_stock_fails():
        expected = MODES[mode](model, reference, 0)
    with move_experts_to_host(model, temporary=True):
        actual = MODES[mode](model, ours, 0)
    for mine, other in zip(actual, expected, strict=True):
        if isinstance(other, torch.Tensor) and other.is_floating_point():
            assert_close(mine, other, 1e-3)
        else:
            assert torch.equal(mine, other) if isinstance(other, torch.Tensor) else mine == other


# --- which experts are read


@pytest.mark.parametrize("num_tokens", [1, 30])
def test_experts_that_no_token_chose_are_not_multiplied(num_tokens):
    model = expert_model("mixtral")
    module: Any = next(iter(expert_modules(model).values()))
    tokens, chosen = torch.randn(num_tokens, 64), torch.tensor([[2, 0]]).repeat(num_tokens, 1)
    weights = torch.rand(num_tokens, 2)
    with torch.no_grad(), move_experts_to_host(model, temporary=True):
        before = module(tokens, chosen, weights)
        for weight in (module.gate_up_proj, module.down_proj):
            weight[[1, 3, 4, 5]] = float("nan")
        assert torch.equal(module(tokens, chosen, weights), before)


@pytest.mark.parametrize("num_tokens", [1, 30])
@pytest.mark.parametrize("bits", [None, 8])
def test_experts_when_index_means_none_then_add_nothing(bits, num_tokens):
    model = expert_model("mixtral")
    module: Any = next(iter(expert_modules(model).values()))
    tokens, chosen = torch.randn(num_tokens, 64), torch.tensor([[2, NUM_EXPERTS]]).repeat(num_tokens, 1)
    weights = torch.rand(num_tokens, 2)
    with torch.no_grad(), move_experts_to_host(model, bits, temporary=True):
        ours = module(tokens, chosen, weights)
        alone = module(tokens, chosen[:, :1], weights[:, :1])
    torch.testing.assert_close(ours, alone)


@pytest.mark.parametrize(
    "matrices", [PlainMatrices(torch.randn(3, 16, 32)), QuantizedMatrices(torch.randn(3, 16, 32), 8, 32)]
)
def test_an_index_of_no_expert_is_refused_with_the_numbers(matrices: Matrices):
    with pytest.raises(IndexError, match=r"1 of 4 indices are of no matrix: there are 3\."):
        matrices.multiply_chosen(torch.randn(2, 32), torch.tensor([[0, 1], [4, 2]]))


@pytest.mark.parametrize("bits", [None, 8])
def test_an_index_of_no_expert_is_refused_with_the_numbers_for_sums_too(bits):
    model = expert_model("mixtral")
    [module, *_] = expert_modules(model).values()
    with (
        torch.no_grad(),
        move_experts_to_host(model, bits, temporary=True),
        pytest.raises(IndexError, match=r"2 of 4 indices .* there are 6\."),
    ):
        module(torch.randn(2, 64), torch.tensor([[0, -1], [NUM_EXPERTS + 1, 2]]), torch.rand(2, 2))


def test_experts_when_there_are_no_tokens_then_give_none():
    model = expert_model("mixtral")
    module: Any = next(iter(expert_modules(model).values()))
    with torch.no_grad(), move_experts_to_host(model, temporary=True):
        assert module(torch.empty(0, 64), torch.empty(0, 2, dtype=torch.long), torch.empty(0, 2)).shape == (0, 64)


# --- for how long, and which models


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_the_report_counts_experts_and_bytes(bits):
    model = expert_model("qwen3_moe")
    experts = [weight for module in expert_modules(model).values() for weight in module.parameters()]
    original, everything = (sum(each.nbytes for each in of) for of in (experts, model.parameters()))
    report = move_experts_to_host(model, bits)
    assert (report.expert_layers, report.experts, report.bits) == (3, NUM_EXPERTS, bits)
    assert report.original_bytes == (0 if bits is None else original)
    assert report.original_bytes + report.other_bytes == everything
    assert report.expert_bytes == (original if bits is None else quantized_bytes(model))
    assert report.quantized_bytes == quantized_bytes(model)
    assert "3 layers of 6 experts in host memory" in str(report)


def quantized_bytes(model: PreTrainedModel) -> int:
    return sum(weight.matrices.num_bytes for weight in model.parameters() if isinstance(weight, QuantizedWeight))


def test_experts_when_quantized_already_then_are_counted_and_kept():
    model = expert_model("qwen3_moe")
    quantize_weights(model, 8)
    theirs = logits(model)
    experts = {id(weight): weight for module in expert_modules(model).values() for weight in module.parameters()}
    report = move_experts_to_host(model)
    assert report.expert_bytes == sum(weight.matrices.num_bytes for weight in experts.values())
    assert report.bits is None
    assert torch.equal(logits(model), theirs)
    with pytest.raises(ValueError, match=r"can be quantized: .* is quantized already"):
        move_experts_to_host(model, 4)


def test_a_dense_model_is_refused_by_name():
    message = r"LlamaForCausalLM has no experts .*: it is dense\."
    with pytest.raises(ValueError, match=message):
        move_experts_to_host(tiny_model("llama"))
    with pytest.raises(ValueError, match=message), move_experts_to_host(tiny_model("llama"), temporary=True):
        pass


@pytest.mark.parametrize(("name", "kind"), OTHER_FORMS.items())
def test_experts_of_another_form_are_refused_by_name(name, kind):
    model = small_model(name)
    with pytest.raises(ValueError, match=f"{type(model).__name__} has no experts .*{kind}"):
        move_experts_to_host(model)


@pytest.mark.parametrize(("bits", "error"), [(5, ValueError), ("4", TypeError), (True, TypeError)])
def test_other_bits_are_refused_before_anything_changes(bits, error):
    model = expert_model("mixtral")
    with pytest.raises(error, match="bits must be"):
        move_experts_to_host(model, bits)
    assert model.config._experts_implementation == "eager"


@pytest.mark.parametrize("group", [32, None], ids=["groups", "rows"])
def test_experts_when_on_a_4_bit_grid_then_quantize_without_loss(group):
    """Such experts come from a checkpoint of GPTQ or AWQ that was dequantized."""
    model = expert_model("mixtral")
    with torch.no_grad():
        for module in expert_modules(model).values():
            for weight in module.parameters():
                groups = weight.unflatten(-1, (-1, group or weight.shape[-1]))
                steps = groups.abs().amax(-1, keepdim=True).bfloat16().float() / 8
                weight.copy_(((groups / steps).round().clamp(-8, 7) * steps).flatten(-2))
    theirs = logits(model)
    with move_experts_to_host(model, 4, temporary=True):
        ours = logits(model)
    assert_close(ours, theirs, 2e-3)


def test_weights_that_are_elsewhere_are_refused():
    model = expert_model("mixtral").to("meta")
    with pytest.raises(ValueError, match="Weights are on meta"):
        move_experts_to_host(model)


def test_decode_on_cpu_when_model_has_experts_then_uses_chosen_experts():
    model = expert_model("qwen3_moe")
    ids = random_prompt(1, 20)
    options = {"max_new_tokens": 8, "do_sample": False}
    theirs = model.generate(ids, **options)
    ours = model.generate(
        ids, **cache_argument(DynamicHybridCache(model.config)), custom_generate=DecodeOnCPU(), **options
    )
    assert torch.equal(ours, theirs)
