"""Any decoder whose step is one of rows runs in one call; any other is refused with the reason."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    PreTrainedModel,
)

from decode_step.twins import FIRST_STEP, SIZES, Twins, made, made_at_random
from hf_hybrid_cache import DynamicHybridCache, quantize_weights
from hf_hybrid_cache.decode_step import UnknownStepError, fuse_decode, is_fused
from hf_hybrid_cache.decode_step.recording import PythonCall
from hf_hybrid_cache.weights.quantized_weight import HostWeight

from common.modes import generate
from models.architectures import CONFIGS, REPRESENTATIVES, small_model
from models.tiny_models import random_prompt


def refusal(model: PreTrainedModel) -> str:
    with pytest.raises(UnknownStepError, match="Its own forward goes on") as error:
        fuse_decode(model)
    assert not is_fused(model)
    return str(error.value)


def test_fuse_decode_when_around_a_text_decoder_then_that_is_fused():
    tower = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**tower, image_size=16, patch_size=8)
    config = LlavaOnevisionConfig(vision_config=vision, text_config=LlamaConfig(**SIZES))
    model = LlavaOnevisionForConditionalGeneration(config).eval()
    fused, cache = fuse_decode(model), DynamicHybridCache(config)
    generate(model, random_prompt(1, 20), cache, max_new_tokens=4)
    assert vars(model.model.language_model)["forward"] is fused
    assert (fused.fused_steps, set(fused.other_passes)) == (3, {FIRST_STEP})


# Architectures of transformers 5.24 whose steps do not run in one call -> why.
REASONS: dict[str, str] = {
    "Bloom": "what BloomAttention takes or gives is not of rows",
    "Dory": "it computes between its layers",
    "FalconMamba": "none of its products is one of kernels",
    "GPT2": "none of its products is one of kernels",  # columns of its weights come before rows
    "GlmMoeDsa": "a trial of its layers ends with RuntimeError",
    "HYV4": "what HYV4Attention returns is not of rows",
    "Inkling2LoopText": "it computes between its layers",
    "Inkling2Text": "it computes between its layers",
    "JetMoe": "none of its products is one of kernels",
    "Mamba": "none of its products is one of kernels",
    "MiniMax": "MiniMax uses cache of its own",
    "Mpt": "what MptAttention takes or gives is not of rows",
    "OpenAIGPT": "Block returns list",
    "RecurrentGemma": "its layers give other results",
    "Rwkv": "the cache holds no tokens",
    "XLM": "update of layer 0 is not of rows",
}
_NO_LIST = (
    "Bert BertGeneration BigBird Camembert CpmAnt Data2VecText Electra Ernie HrmText Llama4 Llama4Text "
    "MegatronBert Mllama ModernBertDecoder RemBert Roberta RobertaPreLayerNorm RoCBert RoFormer "
    "XLMRoberta XLMRobertaXL "
)
REASONS |= dict.fromkeys(_NO_LIST.split(), "it has no list of layers")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in REPRESENTATIVES else [pytest.mark.slow]) for name in CONFIGS]
)
def test_a_step_of_any_architecture_is_fused_or_says_why(name: str):
    try:
        model = small_model(name, is_wider=True)
        model(random_prompt(1, 3).clamp(max=90))
    except Exception as error:
        pytest.skip(f"stock cannot: {error}")
    if (reason := REASONS.get(name.removesuffix("Config"))) is not None:
        assert reason in refusal(model)
        return
    twins = Twins(model)
    twins.forward(random_prompt(2, 78).clamp(max=90))
    for token in random_prompt(2, 3).clamp(max=90).split(1, dim=1):  # until a window is full
        twins.forward(token)
    assert twins.fused.fused_steps == 3, twins.fused


def with_norm(norm: nn.Module, **settings: Any) -> PreTrainedModel:
    model = made(**settings)
    model.model.layers[1].post_attention_layernorm = norm
    return model


class MeanOfRows(nn.Module):
    """Mixes sequences."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states - states.mean(0, keepdim=True)


class Positive(nn.Module):
    """Lets a number go into Python."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states if states.sum() > 0 else 2 * states


class Sensitive(nn.Module):
    """Makes much of rounding, as a router does that chooses between experts that are close."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(SIZES["hidden_size"], SIZES["hidden_size"])

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + torch.sin(self.mix(states.float()) * 1e6).to(states.dtype)


REFUSED: dict[str, Callable[[], PreTrainedModel]] = {
    "it has no list of layers": lambda: made(LlamaConfig(**SIZES | {"num_hidden_layers": 0})),
    "in torch.float16": lambda: made(dtype=torch.float16),
    "on meta, not in host memory": lambda: made().to("meta"),
    "its layers give other results": lambda: with_norm(MeanOfRows().eval()),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_fuse_decode_when_a_step_is_none_of_rows_then_says_why(reason: str):
    assert reason in refusal(REFUSED[reason]())


def test_a_step_in_which_rounding_to_bfloat16_changes_much_is_fused():
    model = with_norm(Sensitive().eval(), dtype=torch.bfloat16)
    fuse_decode(model)
    assert is_fused(model)


def change_twins(change: Callable[[Any], object], **settings: Any) -> Twins:
    """Twins that have read a prompt, of a model that was changed before."""
    model = made_at_random(**settings)
    change(model)
    twins = Twins(model, tolerance=1e-3)
    twins.forward(random_prompt(2, 40))
    return twins


def set_weight(module: nn.Module, weight: torch.Tensor) -> None:
    module._parameters["weight"] = weight  # type: ignore[assignment]


def quantize_one(model: Any) -> None:
    quantized = made()
    quantize_weights(quantized, bits=4)
    set_weight(model.model.layers[1].mlp.up_proj, quantized.model.layers[1].mlp.up_proj.weight)


def transpose(model: Any) -> None:
    projection = model.model.layers[0].self_attn.o_proj
    set_weight(projection, nn.Parameter(projection.weight.detach().t()))


def keep_in_host_memory(model: Any) -> None:
    projection = model.model.layers[0].self_attn.q_proj
    set_weight(projection, HostWeight(projection.weight.detach()))


CHANGES: dict[str, Callable[[Any], object]] = {
    "one weight of several is quantized": quantize_one,
    "a weight is transposed": transpose,
    "a weight stays in host memory": keep_in_host_memory,
    "a norm of torch": lambda model: setattr(model.model.layers[1], "post_attention_layernorm", nn.RMSNorm(64)),
    "a norm of means": lambda model: setattr(model.model, "norm", nn.LayerNorm(64)),
    "attention that is written out": lambda model: model.set_attn_implementation("eager"),
    "a number goes into Python": lambda model: setattr(model.model.layers[0].mlp, "act_fn", Positive().eval()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_when_computed_in_any_way_gives_what_the_own_forward_gives(change: str):
    twins = change_twins(lambda model: (CHANGES[change](model), model.eval()))
    assert twins.steps(5) == 5
    assert twins.hold_the_same()


ACTIVATIONS = ["gelu", "gelu_pytorch_tanh", "relu", "relu2", "silu", "tanh", "sigmoid", "mish"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_step_with_any_activation_is_all_in_kernels(activation: str, dtype: torch.dtype):
    twins = Twins(
        made_at_random(dtype=dtype, hidden_act=activation), tolerance=1e-4 if dtype == torch.float32 else 0.05
    )
    twins.forward(random_prompt(2, 40))
    assert twins.steps(2) == 2
    step = twins.fused.recognise(twins.model.get_decoder()).step
    assert [each for each in step.steps if isinstance(each, PythonCall)] == []


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by PEFT
def test_a_step_when_a_model_has_an_adapter_is_fused():
    settings = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=16, init_lora_weights=False)
    twins = Twins(peft.get_peft_model(made_at_random(), settings).eval())
    twins.forward(random_prompt(2, 40))
    assert twins.steps(3) == 3
