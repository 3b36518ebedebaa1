"""Weights of few bits: models compute what the codes stand for, and get their own weights back afterwards."""

import copy
import gc
import re
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    NllbMoeConfig,
    PreTrainedModel,
    SwitchTransformersConfig,
)

from hf_hybrid_cache import (
    HostMemoryError,
    QuantizedWeightsConfig,
    move_experts_to_host,
    quantize_weights,
)
from hf_hybrid_cache.weights import ReadOnlyWeightError
from hf_hybrid_cache.weights.coverage import coverage
from hf_hybrid_cache.weights.quantized_matrices import MOST_TOKENS, QuantizedMatrices
from hf_hybrid_cache.weights.quantized_weight import QuantizedWeight

from common.interruptions import Interruption
from models import architectures
from models.architectures import small_model
from models.expert_models import expert_model
from models.tiny_models import FAMILIES, random_prompt, tiny_model
from weights.quantized_models import logits, note_operations, quantized_weights, with_dense_weights

# The scores that choose experts are close to each other in this family.
CLOSE_CHOICES = {"qwen3_next"}


def quantized_llama(bits: int) -> PreTrainedModel:
    model = copy.deepcopy(tiny_model("llama"))
    quantize_weights(model, bits)
    return model


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the operations that need the dequantized numbers of a weight."""
    return note_operations(monkeypatch)


# --- what a model computes


@pytest.mark.default("pairs")
@pytest.mark.parametrize("num_tokens", [1, 9, MOST_TOKENS])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("exact_kernels")
def test_a_model_computes_with_what_its_codes_stand_for(family: str, bits: int, num_tokens: int, operations: list[str]):
    model = tiny_model(family)
    own = logits(model, num_tokens)
    with quantize_weights(model, bits, group_size=32, temporary=True):
        ours = logits(model, num_tokens)
        assert not operations, "slow: the numbers of a weight were read"
        theirs = logits(with_dense_weights(model), num_tokens)
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < (5e-2 if family in CLOSE_CHOICES else 2e-3)
    assert not torch.equal(ours, own)
    assert torch.equal(logits(model, num_tokens), own)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["MixtralConfig", "GptOssConfig"])
def test_experts_compute_with_their_codes_however_transformers_runs_them(name: str, implementation: str):
    model = small_model(name)
    model.set_experts_implementation(implementation)
    with quantize_weights(model, 8, group_size=32, temporary=True):
        torch.testing.assert_close(logits(model), logits(with_dense_weights(model)), rtol=5e-3, atol=5e-3)


def test_embeddings_are_those_of_the_codes_and_check_ids():
    model = tiny_model("llama")
    ids = torch.tensor([[3, 90, 3, 127], [0, 1, 2, 3]])
    with quantize_weights(model, 4, temporary=True):
        weight = model.get_input_embeddings().weight
        assert torch.equal(model.get_input_embeddings()(ids), weight.dense()[ids])
        assert model.get_input_embeddings()(ids[:, :0]).shape == (2, 0, 64)
        with pytest.raises(IndexError, match=r"128 rows, and ids from 3 to 128"):
            model.get_input_embeddings()(torch.tensor([3, 128]))


def test_weights_made_in_inference_mode_work_outside_of_it():
    model = copy.deepcopy(tiny_model("llama"))
    with torch.inference_mode():
        quantize_weights(model, 8)
    model(input_ids=random_prompt(1, 5), labels=random_prompt(1, 5)).loss.backward()
    with torch.inference_mode():
        model(input_ids=random_prompt(1, 5))


# --- operations on a weight


def tensors(kind: str) -> tuple[QuantizedWeight, torch.Tensor]:
    """A weight of few bits, and the same numbers as a tensor."""
    torch.manual_seed(0)
    is_stacked = "stacked" in kind
    matrices = QuantizedMatrices(torch.randn(3 if is_stacked else 1, 40, 64), 4, 32)
    weight = QuantizedWeight.make(matrices, None if is_stacked else 0, "transposed" in kind, torch.float32)
    return weight, weight.dense()


TOKENS, WIDE_TOKENS = torch.randn(5, 64), torch.randn(5, 40)
OPERATIONS: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "linear": ("matrix", lambda weight: functional.linear(TOKENS, weight)),
    "linear with a bias": ("matrix", lambda weight: functional.linear(TOKENS, weight, WIDE_TOKENS[0])),
    "linear of no token": ("matrix", lambda weight: functional.linear(TOKENS[:0], weight)),
    "linear with a quantized bias": ("matrix", lambda weight: functional.linear(TOKENS, weight, weight[:, 0])),
    "matmul": ("matrix", lambda weight: TOKENS @ weight.T),
    "mm into a tensor": ("matrix", lambda weight: torch.mm(TOKENS, weight.T, out=torch.empty(5, 40))),
    "matmul of the other side": ("matrix", lambda weight: WIDE_TOKENS @ weight),
    "addmm": ("transposed", lambda weight: torch.addmm(WIDE_TOKENS[0], TOKENS, weight)),
    "addmm with factors": ("transposed", lambda weight: torch.addmm(WIDE_TOKENS[0], TOKENS, weight, beta=2, alpha=3)),
    "rows": ("matrix", lambda weight: functional.embedding(torch.tensor([[3, 0], [39, 3]]), weight)),
    "rows of the transposed": ("transposed", lambda weight: functional.embedding(torch.tensor([63, 0]), weight)),
    "one of several": ("stacked", lambda weight: functional.linear(TOKENS, weight[1])),
    "the last of several": ("stacked", lambda weight: functional.linear(TOKENS, weight[-1])),
    "one by a tensor": ("stacked", lambda weight: functional.linear(TOKENS, weight[torch.tensor(2)])),
    "one transposed": ("stacked and transposed", lambda weight: TOKENS @ weight[0]),
    "a slice": ("stacked", lambda weight: weight[1:, :3]),
    "groups": (
        "stacked",
        lambda weight: functional.grouped_mm(
            TOKENS.bfloat16(), weight.transpose(-2, -1).bfloat16(), offs=torch.tensor([2, 2, 5], dtype=torch.int32)
        ),
    ),
    "a number": ("matrix", lambda weight: weight[7, 3].item()),
    "other type": ("matrix", lambda weight: weight.to(torch.bfloat16)),
    "list": ("matrix", lambda weight: weight.tolist()),
    "numpy": ("matrix", lambda weight: torch.from_numpy(weight.numpy().copy())),
    "shape": ("stacked and transposed", lambda weight: (weight.shape, weight.size(-1), weight.dim(), weight.numel())),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_any_operation_gives_what_it_gives_with_the_numbers(name: str):
    kind, operation = OPERATIONS[name]
    weight, dense = tensors(kind)
    actual, wanted = operation(weight), operation(dense)
    if isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=2e-3)
    else:
        assert actual == wanted


@pytest.mark.parametrize(
    ("kind", "operation"),
    [
        ("matrix", lambda weight: functional.linear(TOKENS[:, :50], weight)),
        ("matrix", lambda weight: functional.linear(TOKENS.double(), weight)),
        ("matrix", lambda weight: functional.linear(TOKENS, weight, torch.ones(3))),
        ("matrix", lambda weight: functional.linear(TOKENS, weight, torch.ones(40, dtype=torch.float64))),
        ("matrix", lambda weight: functional.linear(TOKENS, weight, torch.ones(40, device="meta"))),
        ("matrix", lambda weight: functional.embedding(torch.tensor([40]), weight)),
        ("matrix", lambda weight: functional.embedding(torch.tensor([1.0]), weight)),
        ("matrix", lambda weight: functional.embedding(torch.tensor([1], dtype=torch.int8), weight)),
        ("stacked", lambda weight: weight[3]),
    ],
)
def test_what_torch_refuses_is_refused_with_its_own_error(kind: str, operation: Callable[[torch.Tensor], Any]):
    weight, dense = tensors(kind)
    with pytest.raises((RuntimeError, IndexError)) as theirs:
        operation(dense)
    with pytest.raises(type(theirs.value)):
        operation(weight)


# --- writes


PLAIN = torch.zeros(40, 64)
WRITES: dict[str, Callable[[Any], Any]] = {
    "an operation in place": lambda weight: weight.mul_(0),
    "data": lambda weight: weight.data.add_(1),
    "an argument for the output": lambda weight: torch.mul(PLAIN, 2, out=weight),
    "one of a list": lambda weight: torch._foreach_add_([PLAIN.clone(), weight], 1),
    "norms of rows": lambda weight: functional.embedding(torch.tensor([1]), weight, max_norm=1e-3),
    "a view of a view": lambda weight: weight.detach()[1:].mT.flatten(1).clamp_(0),
    "an array": lambda weight: weight.numpy().__setitem__(0, 0),
    "other data": lambda weight: setattr(weight, "data", PLAIN),
    "memory of another library": torch.from_dlpack,
    "a function of Python": lambda weight: weight.apply_(lambda _: 0.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_a_weight_is_refused_before_anything_changes(name: str):
    weight, dense = tensors("matrix")
    with torch.no_grad(), pytest.raises((ReadOnlyWeightError, TypeError, ValueError)) as refused:
        WRITES[name](weight)
    assert refused.match("codes never change.*weight.dense|take weight.dense|read-only")
    assert torch.equal(weight.dense(), dense)
    assert not PLAIN.any()


@pytest.mark.parametrize("kind", ["model", "experts"])
def test_a_state_dict_is_loaded_whole_or_refused_before_anything_changes(kind: str):
    model = copy.deepcopy(tiny_model("llama")) if kind == "model" else expert_model("mixtral")
    other = {name: weight + 1 for name, weight in model.state_dict().items()}
    change = quantize_weights if kind == "model" else move_experts_to_host
    with change(model, 8, temporary=True):
        before, twin = logits(model), copy.deepcopy(model)
        for each in (model, twin):
            with pytest.raises(ReadOnlyWeightError, match=r"\d+ weights of the state dict are .*assign=True"):
                each.load_state_dict(other)
            assert torch.equal(logits(each), before)
        part = {name: weight for name, weight in other.items() if "norm" in name}
        twin.load_state_dict(part, strict=False)
        twin.load_state_dict(other, assign=True)
        assert not quantized_weights(twin)
        with pytest.raises(RuntimeError, match="codes never change"):
            model.model.load_state_dict({name.removeprefix("model."): weight for name, weight in other.items()})
    model.load_state_dict(other)
    assert torch.equal(logits(model), logits(twin))
    assert all(torch.equal(weight, other[name]) for name, weight in twin.state_dict().items())


# --- which weights, and for how long


def test_ended_at_any_line_a_model_has_all_its_parameters():
    model = copy.deepcopy(tiny_model("llama"))
    before = list(model.parameters())

    def use() -> None:
        with quantize_weights(model, 8, temporary=True):
            pass

    whole = Interruption(folder="weights")
    whole.run(use)
    for at_line in range(0, whole.lines, max(1, whole.lines // 60)):
        fault = Interruption(KeyboardInterrupt, at_line, folder="weights")
        fault.run(use)
        assert all(now is then for now, then in zip(model.parameters(), before, strict=True)), fault.place


def test_permanently_quantized_weights_are_freed_and_the_report_says_so():
    torch.manual_seed(0)
    config = copy.deepcopy(tiny_model("llama").config)
    config.hidden_size, config.intermediate_size, config.vocab_size = 256, 1024, 2048
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    before = sum(weight.nbytes for weight in model.parameters())
    originals = [weakref.ref(weight) for weight in model.parameters() if weight.dim() == 2]
    report = quantize_weights(model, 4, head_bits=4)
    gc.collect()
    assert not any(original() for original in originals)
    assert not report.left
    assert report.quantized_weights == len(originals)
    assert report.original_bytes + report.other_bytes == before
    assert report.quantized_bytes + report.other_bytes < 0.32 * before
    assert report.quantized_bytes == sum(weight.matrices.num_bytes for weight in quantized_weights(model))
    assert f"{len(originals)} weights in 4 bits, groups of 32" in str(report)


@pytest.mark.parametrize(("options", "head_bits"), [({}, 8), ({"head_bits": 4}, 4)])
def test_the_output_head_has_eight_bits_unless_told_otherwise(options: dict[str, int], head_bits: int):
    model = copy.deepcopy(tiny_model("llama"))
    report = quantize_weights(model, 4, **options)
    assert model.lm_head.weight.matrices.layout.bits == head_bits
    assert model.model.layers[0].mlp.up_proj.weight.matrices.layout.bits == 4
    assert ("(the output head in 8)" in str(report)) == (head_bits == 8)


def test_tied_weights_stay_tied():
    model = small_model("GPT2Config")
    assert model.lm_head.weight is model.transformer.wte.weight
    with quantize_weights(model, 8, temporary=True):
        assert isinstance(model.lm_head.weight, QuantizedWeight)
        assert model.lm_head.weight is model.transformer.wte.weight
        twin = copy.deepcopy(model)
        assert twin.lm_head.weight is twin.transformer.wte.weight
        assert twin.lm_head.weight.matrices is model.lm_head.weight.matrices


@pytest.mark.slow
def test_routers_of_all_architectures_stay_as_they_are(monkeypatch: pytest.MonkeyPatch):
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        monkeypatch.setitem(architectures._SIZES, name, 32)  # enough for a router to be a matrix like others
    sizes = {"d_model": 64, "num_experts": 32, "pad_token_id": 0}
    configs = [SwitchTransformersConfig(**sizes), NllbMoeConfig(**sizes)]
    for name in architectures.CONFIGS:
        with suppress(Exception):  # what transformers raises for such sizes
            configs.append(architectures.small_config(name))
    with_router = set()
    for config in configs:
        of_kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        try:
            with torch.device("meta"):
                model = of_kind.from_config(config)
        except Exception:
            continue
        covered = [each.name for each in coverage(model)[0]]
        # By names, which the package does not look at.
        routers = {
            name for name, _ in model.named_modules() if re.search(r"(router|mlp\.gate|mlp\.router\.\w+)$", name)
        }
        with_router |= {type(config).__name__} if routers else set()
        assert not [name for name in covered if name.removesuffix(".weight") in routers]
    assert with_router >= {
        "AfmoeConfig",
        "JetMoeConfig",
        "LongcatFlashConfig",
        "NllbMoeConfig",
        "SwitchTransformersConfig",
    }


def test_weights_that_cannot_be_quantized_are_named_with_reasons():
    model = small_model("GPT2Config")
    model.transformer.h[0].mlp.c_fc.weight.data[3, 3] = torch.inf
    model.transformer.h[1].mlp.c_fc = nn.Linear(32, 8)
    model.transformer.h[2].mlp.c_fc = nn.Linear(32, 64, dtype=torch.float64)
    with quantize_weights(model, 8, temporary=True) as report:
        assert not any(isinstance(model.get_parameter(name), QuantizedWeight) for name in report.left)
    assert report.left == {
        "transformer.wpe.weight": "is used by Embedding, not as the matrix of a linear layer",
        "transformer.h.0.mlp.c_fc.weight": "has numbers that are infinite or not a number",
        "transformer.h.1.mlp.c_fc.weight": "has only 8 outputs and 32 inputs",
        "transformer.h.2.mlp.c_fc.weight": "is of type Tensor, torch.float64",
    }
    assert all(f"{name} {reason}" in str(report) for name, reason in report.left.items())


@pytest.mark.parametrize("use", [quantize_weights, lambda _, *given: QuantizedWeightsConfig(*given)])
@pytest.mark.parametrize(
    ("error", "message", "given"),
    [
        *((TypeError, f"bits must be an integer, got {given!r}", (given,)) for given in ("4", True, None)),
        (ValueError, "bits must be 8 or 4, got 2. Leave it out", (2,)),
        (TypeError, "head_bits must be an integer, got None", (4, 32, None)),
        (ValueError, "head_bits must be 8 or 4, got 16", (4, 32, 16)),
        (TypeError, "group_size must be an integer, got 32.0", (4, 32.0)),
        (ValueError, "group_size must be 32, 64 or 128, got 48", (4, 48)),
    ],
)
def test_options_that_there_are_not_are_refused(
    use: Callable, error: type[Exception], message: str, given: tuple[Any, ...]
):
    model = tiny_model("llama")
    with pytest.raises(error, match=message):
        use(model, *given)
    assert not quantized_weights(model)


def test_a_model_elsewhere_or_of_few_bits_already_is_refused():
    with pytest.raises(TypeError, match="temporary must be True or False, got 'yes'"):
        quantize_weights(tiny_model("llama"), 4, temporary="yes")
    with torch.device("meta"):
        elsewhere = AutoModelForCausalLM.from_config(tiny_model("llama").config)
    with pytest.raises(ValueError, match=r"Weights are on meta; .*DecodeOnCPU\(weights=4\)"):
        quantize_weights(elsewhere, 4)
    model = quantized_llama(4)
    with pytest.raises(ValueError, match=r"No weight of LlamaForCausalLM .*embed_tokens.weight is quantized already"):
        quantize_weights(model, 4)


def test_too_little_host_memory_is_noticed_before_anything_changes():
    model = copy.deepcopy(tiny_model("llama"))
    # A view of one number: 2**40 of them cost the test nothing.
    model.lm_head.weight.data = torch.ones(1).expand(2**20, 2**20)
    with pytest.raises(HostMemoryError, match=r"Weights in 4 bits need 115\d\.\d+ GiB more host memory"):
        quantize_weights(model, 4)
    assert not quantized_weights(model)


def test_saving_and_sharing_are_refused_with_the_way_out(tmp_path: Path):
    model = quantized_llama(8)
    saves = lambda: model.save_pretrained(tmp_path), lambda: torch.save(model, tmp_path / "model"), model.share_memory
    for save in saves:
        with pytest.raises(TypeError, match="Save or share the model before its weights are quantized"):
            save()


def test_moved_elsewhere_a_model_has_the_numbers_as_weights_of_its_own():
    model = quantized_llama(8)
    ours = logits(model)
    model.double()
    assert not quantized_weights(model)
    torch.testing.assert_close(logits(model).float(), ours, rtol=5e-3, atol=5e-3)
