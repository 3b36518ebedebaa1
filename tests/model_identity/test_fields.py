"""Everything that states depend on changes its field, and nothing else does."""

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from hf_hybrid_cache import (
    DynamicHybridCache,
    HybridCache,
    OffloadedHybridCache,
    QuantizedHybridCache,
    Selection,
    minmax,
)
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.model_identity import ModelIdentityError, identity_of, longest_text
from hf_hybrid_cache.model_identity.modules import name_of_class

from common.channel_scaled import channel_scaled
from model_identity.models import differing, identity, new_llama
from models.tiny_models import FAMILIES, random_prompt, tiny_model

# --- models


@pytest.mark.parametrize("family", FAMILIES)
def test_identity_when_the_model_is_loaded_or_has_generated_then_is_same(family: str, tmp_path: Path):
    model = tiny_model(family)
    before = identity(model)
    model.save_pretrained(tmp_path)
    assert differing(identity(AutoModelForCausalLM.from_pretrained(tmp_path).eval()), before) == set()
    model.generate(random_prompt(1, 70), max_new_tokens=3, do_sample=False)
    assert differing(identity(model), before) == set()


@pytest.mark.parametrize(
    "rotation",
    [{"rope_theta": 20_000.0}, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 2.0}],
    ids=str,
)
def test_model_when_it_turns_keys_otherwise_then_differs(rotation: dict[str, Any]):
    rotation = {"rope_type": "default", "rope_theta": 10_000.0} | rotation
    found = differing(identity(new_llama(rope_parameters=rotation)), identity(new_llama()))
    assert {"config", "weights"} <= found <= {"config", "weights", "modules"}


def test_model_when_in_autocast_then_differs_in_dtype():
    model = new_llama()
    before = identity(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert differing(identity(model), before) == {"dtype"}
    assert identity(model) == before


# Fields that differ after a change of a model.
CHANGES: dict[str, tuple[set[str], Callable[[Any], Any]]] = {
    "_name_or_path": (set(), lambda model: setattr(model.config, "_name_or_path", "another")),
    "architectures": (set(), lambda model: setattr(model.config, "architectures", ["another"])),
    "transformers_version": (set(), lambda model: setattr(model.config, "transformers_version", "another")),
    "use_cache": (set(), lambda model: setattr(model.config, "use_cache", False)),
    "bfloat16": ({"dtype", "weights"}, lambda model: model.to(torch.bfloat16)),
    "float16": ({"dtype", "weights"}, lambda model: model.to(torch.float16)),
    "weights": ({"weights"}, lambda model: model.load_state_dict(new_llama(seed=1).state_dict())),
    "setting": ({"config"}, lambda model: setattr(model.config, "rms_norm_eps", 1e-5)),
    "attention": ({"attention"}, lambda model: model.set_attn_implementation("eager")),
    "number": ({"modules"}, lambda model: setattr(model.model.layers[1].self_attn, "scaling", 0.5)),
    "module": ({"modules"}, lambda model: setattr(model.model.layers[1].mlp, "act_fn", nn.GELU().eval())),
}


@pytest.mark.parametrize("change", CHANGES)
def test_model_when_changed_then_differs_where_states_depend_on_it(change: str):
    model = new_llama()
    before = identity(model)
    fields, change_model = CHANGES[change]
    change_model(model)
    assert differing(identity(model), before) == fields


def test_code_of_others_counts_and_not_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    names = []
    for number, source in enumerate(("class Attention: ...", "class Attention: ...", "class Attention: 'Other'")):
        (tmp_path / f"identity_code_{number}.py").write_text(source)
        names.append(name_of_class(importlib.import_module(f"identity_code_{number}").Attention))
    assert names[0] == names[1] != names[2]
    assert name_of_class(nn.Linear) == "Linear"


# --- caches

SCALED = channel_scaled(minmax(4), 2, 16, 16, seed=0)
FORMS: dict[str, Callable[[Any], HybridCache]] = {
    "8 bits": lambda config: QuantizedHybridCache(config, bits=8),
    "4 bits": QuantizedHybridCache,
    "other values": lambda config: QuantizedHybridCache(config, bits=(8, 4)),
    "one layer": lambda config: QuantizedHybridCache(config, bits={1: 4}),
    "no sinks": lambda config: HybridCache(config, codec=minmax(4, sink_tokens=0)),
    "rotated": lambda config: HybridCache(config, codec=minmax(4, rotate=True)),
    "scaled": lambda config: HybridCache(config, codec=SCALED),
    "scaled otherwise": lambda config: HybridCache(config, codec=channel_scaled(minmax(4), 2, 16, 16, seed=1)),
}


def test_caches_when_of_other_codecs_then_differ_in_codecs_alone():
    model = tiny_model("llama")
    identities = [identity(model), *(identity_of(model, make(model.config)) for make in FORMS.values())]
    for index, one in enumerate(identities):
        assert all(differing(one, other) == {"codecs"} for other in identities[:index])
    again = [identity(model), *(identity_of(model, make(model.config)) for make in FORMS.values())]
    assert again == identities


def test_cache_when_it_has_chosen_its_codecs_then_has_the_same_identity():
    model = tiny_model("llama")
    cache = QuantizedHybridCache(model.config)
    before = identity_of(model, cache)
    with torch.no_grad():
        model(random_prompt(1, 300), **cache_argument(cache))
    assert all(codec.is_fitted for codec in cache.codecs.values())
    assert identity_of(model, cache) == identity_of(model, copy.deepcopy(cache)) == before
    cache.reset()
    assert identity_of(model, cache) == before


def test_cache_when_it_selects_pages_then_differs_in_selection_alone():
    model = tiny_model("llama")
    selections = [None, Selection(), Selection(top_p=0.9), Selection(dense_layers=[0])]
    found = [identity_of(model, OffloadedHybridCache(model.config, selection=each)) for each in selections]
    assert found[0] == identity(model)
    for index, one in enumerate(found):
        assert all(differing(one, other) == {"selection"} for other in found[:index])


# --- refused


def test_model_when_training_or_turning_keys_by_length_then_is_refused():
    model: Any = new_llama()
    model.model.layers[1].train()
    with pytest.raises(ModelIdentityError, match=r"model\.eval\(\)"):
        identity(model)
    rotation: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    with pytest.raises(ModelIdentityError, match="dynamic"):
        identity(new_llama(rope_parameters=rotation))


def test_model_when_longrope_has_read_a_long_text_then_is_the_same():
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rotation = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 256, "factor": 2.0}
    model = new_llama(rope_parameters={**rotation, **factors})
    before = identity(model)
    with torch.no_grad():
        model(random_prompt(1, 300))
    assert identity(model) == before
    assert (longest_text(model), longest_text(new_llama())) == (256, None)


def test_what_is_no_model_or_cache_of_ours_then_is_refused():
    model = new_llama()
    with pytest.raises(TypeError, match="Linear"):
        identity_of(nn.Linear(2, 2), DynamicHybridCache(model.config))
    with pytest.raises(TypeError, match="DynamicCache"):
        identity_of(model, DynamicCache(config=model.config))
