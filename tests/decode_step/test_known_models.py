"""A model is known by its source, its settings and its weights; any other is refused with a reason."""

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    GraniteConfig,
    LlamaConfig,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    MistralConfig,
    ModernBertDecoderConfig,
    PreTrainedModel,
    Qwen2Config,
)
from transformers.models.llama import modeling_llama

from decode_step.twins import FIRST_STEP, SIZES, made
from hf_hybrid_cache import DynamicHybridCache, quantize_weights
from hf_hybrid_cache.decode_step import UnknownStepError, fuse_decode, is_fused
from hf_hybrid_cache.decode_step.known_models import form_digest
from hf_hybrid_cache.weights.quantized_weight import HostWeight

from common.modes import generate
from models.architectures import CONFIGS, small_model
from models.tiny_models import FAMILIES, random_prompt


@pytest.fixture
def llama() -> Any:
    return made()


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


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_fuse_decode_when_of_another_family_then_says_why(family: str):
    assert re.search("unknown form|has layers of|has a window", refusal(made(FAMILIES[family]())))


def with_norm(norm: nn.Module) -> PreTrainedModel:
    model = made()
    model.model.layers[1].post_attention_layernorm = norm
    return model


def with_layers(*numbers: int) -> PreTrainedModel:
    model = made(LlamaConfig(**SIZES | {"num_hidden_layers": 4}))
    model.model.layers = nn.ModuleList([model.model.layers[number] for number in numbers])
    return model


REFUSED = {
    "window of 32 tokens": lambda: made(MistralConfig(**SIZES, sliding_window=32)),
    "layers of sliding_attention": lambda: made(Qwen2Config(**SIZES, layer_types=["sliding_attention"] * 2)),
    "GraniteModel has an unknown form": lambda: made(GraniteConfig(**SIZES)),
    "the model Linear has an unknown form": lambda: made(ModernBertDecoderConfig(**SIZES)),
    "GELUActivation, not SiLU": lambda: made(LlamaConfig(**SIZES, hidden_act="gelu")),
    "the norm RMSNorm has an unknown form": lambda: with_norm(nn.RMSNorm(64).eval()),
    "the norm LNTuningLayer has an unknown form": lambda: peft.get_peft_model(
        made(), peft.LNTuningConfig(target_modules=["input_layernorm"])
    ).eval(),
    "the numbers 0, 2, 3": lambda: with_layers(0, 2, 3),
    "the numbers 2, 1": lambda: with_layers(2, 1),
    "has 0 kinds of decoder layer": lambda: made(LlamaConfig(**SIZES | {"num_hidden_layers": 0})),
    "in torch.float16": lambda: made(dtype=torch.float16),
    "on meta, not in host memory": lambda: made().to("meta"),
    "attention is 'eager'": lambda: made(attn_implementation="eager"),
    "the size of its gates is no multiple of 16": lambda: made(LlamaConfig(**SIZES | {"intermediate_size": 100})),
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by PEFT
@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
@pytest.mark.parametrize("reason", REFUSED)
def test_fuse_decode_when_of_other_settings_then_says_which(reason: str):
    assert reason in refusal(REFUSED[reason]())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by PEFT
def test_fuse_decode_when_an_adapter_is_merged_then_is_known(llama: PreTrainedModel):
    adapted = peft.get_peft_model(llama, peft.LoraConfig(target_modules=["q_proj", "down_proj"])).eval()
    assert "q of layer 0 has an adapter; merge it first" in refusal(adapted)
    fuse_decode(adapted.merge_and_unload())


def set_weight(module: nn.Module, weight: torch.Tensor) -> None:
    module._parameters["weight"] = weight  # type: ignore[assignment]


def quantize_one(layers: Any) -> None:
    quantized = made()
    quantize_weights(quantized, bits=4)
    set_weight(layers[1].mlp.up_proj, quantized.model.layers[1].mlp.up_proj.weight)


def transpose(layers: Any) -> None:
    set_weight(layers[0].self_attn.o_proj, nn.Parameter(layers[0].self_attn.o_proj.weight.detach().t()))


UNFIT: dict[str, Callable[[Any], object]] = {
    "gate, up of layer 1 are not quantized alike": quantize_one,
    "o of layer 0 is neither": transpose,
    "down of layer 1 is neither": lambda layers: layers[1].mlp.down_proj.bfloat16(),
    "up of layer 1 is neither": lambda layers: set_weight(layers[1].mlp.up_proj, nn.Parameter(torch.ones(112, 64))),
    "norm or a bias of layer 1": lambda layers: layers[1].post_attention_layernorm.bfloat16(),
    "norm or a bias of layer 0": lambda layers: set_weight(layers[0].input_layernorm, nn.Parameter(torch.ones(16))),
}


@pytest.mark.parametrize("reason", UNFIT)
def test_fuse_decode_when_a_weight_is_unfit_then_names_it(llama: Any, reason: str):
    UNFIT[reason](llama.model.layers)
    assert reason in refusal(llama)


def test_fuse_decode_when_a_weight_stays_in_host_memory_then_is_known(llama: Any):
    projection = llama.model.layers[0].self_attn.q_proj
    set_weight(projection, HostWeight(projection.weight.detach()))
    fuse_decode(llama)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONFIGS)
def test_fuse_decode_when_of_any_architecture_then_is_fused_or_says_why(name: str):
    try:
        model = small_model(name)
    except Exception as error:
        pytest.skip(f"stock cannot: {error}")
    with contextlib.suppress(UnknownStepError):
        fuse_decode(model)


@pytest.mark.parametrize("patched", [modeling_llama.LlamaMLP, modeling_llama.LlamaAttention])
def test_known_model_when_a_class_was_patched_then_shows_its_digest(patched: Any, monkeypatch: pytest.MonkeyPatch):
    forward = patched.forward
    monkeypatch.setattr(patched, "forward", functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs)))
    assert f"{patched.__name__} has an unknown form, {form_digest(patched.forward)}" in refusal(made())
    monkeypatch.setattr(patched, "forward", print)
    assert f"{patched.__name__} has an unknown form, without source" in refusal(made())


class Older:
    def forward(self, x: int, past_key_values: Any = None) -> Any:
        """Have a docstring, types and the older name of the cache."""
        y: Any = x
        return past_key_values.update(y, past_key_values=1)


class Newer:
    def forward(self, x, cache=None):
        y = x
        return cache.update(y, cache=1)


class Other:
    def forward(self, x, cache=None):
        y = x
        return cache.update(y, cache=2)


def test_form_digest_when_only_types_and_cache_names_differ_is_the_same():
    assert form_digest(Older.forward) == form_digest(Newer.forward) != form_digest(Other.forward)
    assert len(form_digest(Newer.forward)) == 12
