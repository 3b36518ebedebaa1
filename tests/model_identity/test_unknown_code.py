"""Code of other programs in a model: refused, unless the user names what it does."""

import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook, add_hook_to_module
from torch import nn
from torch.nn.modules.module import _global_forward_hooks
from torch.nn.utils import prune
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from hf_hybrid_cache import DynamicHybridCache, PrefixStore, PrefixStoreError
from hf_hybrid_cache.model_identity import ModelIdentityError, identity_of

from model_identity.models import differing, identity, new_llama
from models.tiny_models import random_prompt


class Steering:
    """Change what a module returns, in the ways that programs do it."""

    def __init__(self, strength: float):
        self.strength = strength

    def __call__(self, module: Any, inputs: Any, output: Any) -> Any:
        return output + self.strength

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states * self.strength


class Doubling(ModelHook):
    def post_forward(self, module: Any, output: Any) -> Any:
        return output * 2


def mlp(model: Any) -> Any:
    return model.model.layers[0].mlp


Change = Callable[[Any, pytest.MonkeyPatch], Any]


def hooked(hook: Any) -> Change:
    return lambda model, _: mlp(model).register_forward_hook(hook)


def having(name: str, value: Any) -> Change:
    return lambda model, _: setattr(mlp(model), name, value)


def patched(owner: Any, name: str) -> Change:
    return lambda _, monkeypatch: monkeypatch.setattr(owner, name, lambda *args: args[0])


# What is told, and how a program does it.
CHANGES: list[tuple[str, Change]] = [
    (r"forward hook of model\.layers\.0\.mlp \(<lambda>", hooked(lambda module, inputs, output: output + 2.0)),
    ("forward hook .*an object of Steering", hooked(Steering(2.0))),
    ("forward hook .*lambda", hooked(torch.no_grad()(lambda module, inputs, output: output + 2.0))),
    ("forward hook .*lambda", lambda model, _: mlp(model).register_forward_pre_hook(lambda module, inputs: inputs)),
    ("forward hook of all", lambda _, monkeypatch: monkeypatch.setitem(_global_forward_hooks, 0, Steering(2.0))),
    (r"forward of model\.layers\.0\.mlp .*lambda", having("forward", types.MethodType(lambda self, states: states, 0))),
    (r"forward of model\.layers\.0\.mlp", having("forward", Steering(2.0).forward)),
    (r"forward of model\.layers\.0\.mlp", having("forward", torch.compile(Steering(2.0).forward))),
    ("steps of .*an object of Steering", having("steps", [functools.partial(Steering(2.0))])),
    ("_steering of .*an object of Steering", having("_steering", Steering(2.0))),
    ("hidden of .* Linear is no part", having("hidden", [nn.Linear(2, 2).eval()])),
    (r"LlamaMLP\.forward", patched(modeling_llama.LlamaMLP, "forward")),
    (r"modeling_llama\.repeat_kv", patched(modeling_llama, "repeat_kv")),
    (
        "attention 'sdpa'",
        lambda _, monkeypatch: monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", lambda *args: args),
    ),
    (
        "_hf_hook of .*Doubling",
        lambda model, _: add_hook_to_module(mlp(model), SequentialHook(ModelHook(), Doubling())),
    ),
]


@pytest.mark.parametrize(("told", "change"), CHANGES, ids=lambda each: each if isinstance(each, str) else "")
def test_a_model_that_runs_code_of_others_needs_a_name(told: str, change: Change, monkeypatch: pytest.MonkeyPatch):
    model = new_llama()
    cache = DynamicHybridCache(model.config)
    change(model, monkeypatch)
    with pytest.raises(ModelIdentityError, match=told) as raised:
        identity_of(model, cache)
    assert 'PrefixStore(path, identity="steering 2.0")' in str(raised.value)
    one, other = identity_of(model, cache, "steering 2.0"), identity_of(model, cache, "steering 3.0")
    assert differing(one, other) == {"identity"}


def test_a_model_on_which_libraries_have_hung_hooks_needs_no_name():
    model: Any = new_llama()
    add_hook_to_module(mlp(model), AlignDevicesHook("cpu", io_same_device=True))
    before = identity(model)
    with torch.no_grad():
        model(random_prompt(1, 9), output_hidden_states=True, output_attentions=True)
    assert model.model.layers[0]._forward_hooks
    assert identity(model) == before
    model.enable_input_require_grads()
    prune.l1_unstructured(model.lm_head, "weight", 0.5)
    identity(model)


def test_a_model_needs_no_name_where_another_of_its_class_was_compiled(monkeypatch: pytest.MonkeyPatch):
    """torch.compile leaves functions of such a name in the file of the class."""
    model = new_llama()
    before = identity(model)
    monkeypatch.setattr(modeling_llama, "__compiled_fn_1_of_another", lambda *inputs: inputs, raising=False)
    assert identity(model) == before


def test_a_class_without_a_source_needs_a_name():
    model = new_llama()
    head = type("Head", (nn.Linear,), {"__module__": "a_notebook"})
    model.lm_head = head(64, 128, bias=False).eval()
    with pytest.raises(ModelIdentityError, match="class of a_notebook, which has no file of source"):
        identity(model)
    assert identity_of(model, DynamicHybridCache(model.config), "head").fields["identity"] == "head"


def test_a_named_store_uses_states_of_that_name_alone(tmp_path: Path):
    model, prompt = new_llama(), random_prompt(1, 300)
    mlp(model).register_forward_hook(Steering(2.0))

    def found(name: str | None) -> int:
        store = PrefixStore(tmp_path, identity=name)
        return store.prefill(model, prompt, DynamicHybridCache(model.config), progress=False).num_tokens

    assert [found(name) for name in ("one", "one", "two", "one")] == [0, 299, 0, 299]
    with pytest.raises(PrefixStoreError, match="Steering"):
        found(None)
    told = PrefixStore(tmp_path, identity="three").why(model, prompt, DynamicHybridCache(model.config))
    assert "identity: one there, three here" in told
