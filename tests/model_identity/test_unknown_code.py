"""Code of other programs in a model: refused, unless the user names what it does."""

import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from torch.nn.modules.module import _global_forward_hooks
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_hybrid_cache import DynamicHybridCache, PrefixStore, PrefixStoreError, fuse_decode
from hf_hybrid_cache.model_identity import ModelIdentityError

from model_identity.models import adapted, differing, identity, new_llama
from models.tiny_models import random_prompt


class Steering(nn.Module):
    """Change what a module returns."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return 2 * self.module(states)


def steer(*values: Any) -> Any:
    return values[-1]


def mlp(model: Any) -> Any:
    return model.model.layers[0].mlp


def having(name: str, value: Any) -> Callable[[Any], object]:
    return lambda model: setattr(mlp(model), name, value)


def steered(model: Any) -> None:
    model.model.layers[0].mlp = Steering(mlp(model)).eval()


# What is told, and how a program does it.
CHANGES: list[tuple[str, Callable[[Any], object]]] = [
    (r"model\.layers\.0\.mlp has a forward hook", lambda model: mlp(model).register_forward_hook(steer)),
    ("lm_head has a forward hook", lambda model: model.lm_head.register_forward_pre_hook(torch.no_grad()(steer))),
    (r"model\.layers\.0\.mlp has a forward of its own", having("forward", types.MethodType(steer, 0))),
    ("has a forward of its own", lambda model: add_hook_to_module(mlp(model), AlignDevicesHook("cpu"))),
    ("has a _compiled_call_impl of its own", lambda model: mlp(model).compile()),
    (r"steps of model\.layers\.0\.mlp is of model_identity", having("steps", functools.partial(steer))),
    (r"q_proj is a peft\.", lambda model: adapted().base_model.model),
    (r"model\.layers\.0\.mlp is a .*\.Steering", steered),
    ("the model is a transformers_modules", lambda model: setattr(model, "__class__", remote(type(model)))),
]


def remote(kind: type) -> type:
    """A class as transformers makes it of the code that comes with weights (`trust_remote_code`)."""
    return type(kind.__name__, (kind,), {"__module__": "transformers_modules.somebody.modeling_llama"})


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("told", "change"), CHANGES)
def test_model_when_it_runs_code_of_others_then_needs_a_name(told: str, change: Callable[[Any], object]):
    model: Any = new_llama()
    found = change(model)
    model = found.eval() if isinstance(found, type(model)) else model
    with pytest.raises(ModelIdentityError, match=told):
        identity(model)
    assert differing(identity(model, "steering 2.0"), identity(model, "steering 3.0")) == {"identity"}


def test_model_when_all_models_run_code_of_others_then_needs_a_name(monkeypatch: pytest.MonkeyPatch):
    model = new_llama()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", steer)
    with pytest.raises(ModelIdentityError, match="the attention 'sdpa' of model_identity"):
        identity(model)
    monkeypatch.setitem(_global_forward_hooks, 0, steer)
    with pytest.raises(ModelIdentityError, match="all modules have a forward hook"):
        identity(model)


def test_model_when_nobody_else_changed_it_then_needs_no_name():
    model: Any = new_llama()
    before = identity(model)
    with torch.no_grad(), fuse_decode(model):
        model(random_prompt(1, 9), output_hidden_states=True, output_attentions=True)
        assert model.model.layers[0]._forward_hooks
        assert identity(model) == before


def test_store_when_named_then_uses_states_of_that_name_alone(tmp_path: Path):
    model, prompt = new_llama(), random_prompt(1, 300)
    steered(model)

    def found(name: str | None) -> int:
        store = PrefixStore(tmp_path, identity=name)
        return store.prefill(model, prompt, DynamicHybridCache(model.config), progress=False).num_tokens

    assert [found(name) for name in ("one", "one", "two", "one")] == [0, 299, 0, 299]
    with pytest.raises(PrefixStoreError, match=r"mlp is a .*\.Steering.*PrefixStore\(path, identity="):
        found(None)
    told = PrefixStore(tmp_path, identity="three").why(model, prompt, DynamicHybridCache(model.config))
    assert "identity: one there, three here" in told
