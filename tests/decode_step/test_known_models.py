"""A model is known by its source, its settings and its weights; a guard notices what is changed later."""

import functools
import re
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import (
    CLIPVisionConfig,
    GraniteConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from decode_step.twins import SIZES, made
from hf_hybrid_cache import quantize_weights
from hf_hybrid_cache.decode_step.known_models import (
    UnknownStepError,
    form_digest,
    known_model,
    require_weights,
)
from hf_hybrid_cache.weights.quantized_weight import HostWeight

from models.tiny_models import FAMILIES


@pytest.fixture
def llama() -> PreTrainedModel:
    return made()


def refusal(model: PreTrainedModel) -> str:
    with pytest.raises(UnknownStepError, match="Its own forward goes on") as error:
        known_model(model)
    return str(error.value)


def test_known_model_when_around_a_text_decoder_then_is_that():
    tower = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**tower, image_size=16, patch_size=8)
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=LlamaConfig(**SIZES))).eval()
    known = known_model(model)
    assert known.name == type(model.model.language_model).__name__
    assert known.guard.broken() is None


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_known_model_when_of_another_family_then_says_why(family: str):
    assert re.search("unknown form|has layers of|has a window", refusal(made(FAMILIES[family]())))


REFUSED = {
    "window of 32 tokens": lambda: made(MistralConfig(**SIZES, sliding_window=32)),
    "layers of sliding_attention": lambda: made(Qwen2Config(**SIZES, layer_types=["sliding_attention"] * 2)),
    "GraniteModel has an unknown form": lambda: made(GraniteConfig(**SIZES)),
    "GELUActivation, not SiLU": lambda: made(LlamaConfig(**SIZES, hidden_act="gelu")),
    "in torch.float16": lambda: made(dtype=torch.float16),
    "on meta, not in host memory": lambda: made().to("meta"),
    "attention is 'eager'": lambda: made(attn_implementation="eager"),
    "has 0 kinds of decoder layer": lambda: made(LlamaConfig(**SIZES | {"num_hidden_layers": 0})),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_known_model_when_of_other_settings_then_says_which(reason: str):
    assert reason in refusal(REFUSED[reason]())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by PEFT
def test_known_model_when_an_adapter_is_merged_then_is_known(llama: PreTrainedModel):
    adapted = peft.get_peft_model(llama, peft.LoraConfig(target_modules=["q_proj", "down_proj"])).eval()
    assert "q of layer 0 has an adapter; merge it first" in refusal(adapted)
    assert known_model(adapted.merge_and_unload()).guard.broken() is None


def set_weight(module: nn.Module, weight: torch.Tensor) -> None:
    module._parameters["weight"] = weight  # type: ignore[assignment]


def quantize_one(known: Any) -> None:
    quantized = made()
    quantize_weights(quantized, bits=4)
    set_weight(known.layers[1].up, quantized.model.layers[1].mlp.up_proj.weight)


def transpose(known: Any) -> None:
    layer = known.layers[0]
    set_weight(layer.o, nn.Parameter(layer.o.weight.detach().t().contiguous().t()))


UNFIT = {
    "gate, up of layer 1 are not quantized alike": quantize_one,
    "o of layer 0 is neither": transpose,
    "down of layer 1 is neither": lambda known: known.layers[1].down.bfloat16(),
    "norm or a bias of layer 1": lambda known: known.layers[1].post_norm.bfloat16(),
}


@pytest.mark.parametrize("reason", UNFIT)
def test_require_weights_when_one_is_unfit_then_names_it(llama: PreTrainedModel, reason: str):
    known = known_model(llama)
    UNFIT[reason](known)
    with pytest.raises(UnknownStepError, match=reason):
        require_weights(known)


def test_require_weights_when_in_host_memory_for_good_then_passes(llama: PreTrainedModel):
    known = known_model(llama)
    set_weight(known.layers[0].q, HostWeight(known.layers[0].q.weight.detach()))
    require_weights(known)


def replaced(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute, and return what undoes it."""
    patch = pytest.MonkeyPatch()
    (patch.setitem if isinstance(owner, dict) else patch.setattr)(owner, name, value)
    return patch.undo


def nothing(*args: Any) -> None:
    """A hook that changes nothing."""


def accelerated(model: Any) -> Callable[[], Any]:
    module = add_hook_to_module(model.model.layers[1].mlp, ModelHook())
    return lambda: remove_hook_from_module(module)


def wrapped(model: Any) -> Callable[[], None]:
    kind = type(model.model.layers[0].mlp)
    forward = kind.forward
    return replaced(kind, "forward", functools.wraps(forward)(lambda *args: forward(*args)))


# What is done to a model -> a function that does it and returns what undoes it, and the reason that the guard gives.
CHANGES: dict[str, tuple[Callable[[Any], Callable[[], Any]], str]] = {
    "hook": (lambda model: model.model.norm.register_forward_hook(nothing).remove, "has hooks"),
    "pre-hook": (lambda model: model.model.layers[1].register_forward_pre_hook(nothing).remove, "has hooks"),
    "hook of all modules": (lambda model: register_module_forward_hook(nothing).remove, "has hooks"),
    "hook of accelerate": (accelerated, "forward of a module was replaced"),
    "training": (lambda model: model.train().eval, "training mode"),
    "layer": (lambda model: replaced(model.model.layers._modules, "1", nn.Identity()), "module was replaced"),
    "norm": (lambda model: replaced(model.model._modules, "norm", nn.Identity()), "module was replaced"),
    "class": (lambda model: replaced(model.model.norm, "__class__", nn.Identity), "module was replaced"),
    "patched class": (wrapped, "LlamaMLP was patched"),
    "patched function": (lambda model: replaced(modeling_llama, "rotate_half", nothing), "rotate_half was patched"),
    "fewer layers": (lambda model: replaced(model.config, "num_hidden_layers", 1), "number of layers"),
    "eager": (lambda model: replaced(model.config, "_attn_implementation", "eager"), "'eager', not 'sdpa'"),
    "sdpa": (lambda model: replaced(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", nothing), "was replaced"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_guard_when_a_model_is_changed_then_says_so_until_it_is_undone(llama: PreTrainedModel, change: str):
    guard, (make, reason) = known_model(llama).guard, CHANGES[change]
    undo = make(llama)
    try:
        assert reason in str(guard.broken())
    finally:
        undo()
    assert guard.broken() is None


def test_guard_when_only_the_decoder_has_hooks_then_is_whole(llama: Any):
    guard = known_model(llama).guard
    add_hook_to_module(llama.model, ModelHook())
    for module in (llama, llama.model, llama.model.embed_tokens, llama.model.rotary_emb, llama.lm_head):
        module.register_forward_hook(nothing)
    assert guard.broken() is None


def test_guard_when_hidden_states_were_asked_for_then_is_whole_after(llama: Any):
    guard, seen = known_model(llama).guard, []
    llama(torch.tensor([[1]]), output_hidden_states=True)
    assert any(module._forward_hooks for module in llama.modules())
    assert guard.broken() is None
    llama.model.rotary_emb.register_forward_hook(lambda *args: seen.append(guard.broken()))
    llama(torch.tensor([[1]]), output_hidden_states=True)
    llama(torch.tensor([[1]]))
    assert seen == ["outputs of modules are collected", None]


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
