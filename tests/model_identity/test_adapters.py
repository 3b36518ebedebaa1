"""Adapters of PEFT, which need a name: each that changes what a model computes has an identity of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_hybrid_cache import DynamicHybridCache, PrefixStore
from hf_hybrid_cache.model_identity import identity_of

from model_identity.models import adapted, identity, new_llama
from models.tiny_models import random_prompt

peft = pytest.importorskip("peft")

# Of peft, about transformers.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def first_layer(model: Any) -> Any:
    return model.get_base_model().model.layers[0].self_attn.q_proj


def use_both(model: Any) -> None:
    model.base_model.set_adapter(["german", "french"])


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another": lambda model: model.set_adapter("french"),
    "both": use_both,
    "none": lambda model: model.base_model.disable_adapter_layers(),
    "merged": lambda model: model.merge_adapter(),
    "trained": lambda model: first_layer(model).lora_B["german"].weight[0, 0].add_(1),
    "merged and unloaded": lambda model: model.merge_and_unload(),
}


@pytest.mark.default("values")
@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_whose_adapters_are_used_otherwise_differs(change: str, use_dora: bool):
    model = adapted(use_dora=use_dora)
    base = model.get_base_model()
    before, prompt = identity(base, "lora"), random_prompt(1, 9)
    with torch.no_grad():
        logits = base(prompt).logits
        CHANGES[change](model)
        model.eval()
        assert not torch.equal(base(prompt).logits, logits)
    assert identity(base, None if "unloaded" in change else "lora") != before


@pytest.mark.parametrize("kind", ["LoraConfig", "PromptTuningConfig", "PrefixTuningConfig"])
def test_a_wrapper_of_peft_is_refused_with_the_way_out(kind: str, tmp_path: Path):
    options = {} if kind == "LoraConfig" else {"num_virtual_tokens": 4}
    model = peft.get_peft_model(new_llama(), getattr(peft, kind)(task_type="CAUSAL_LM", **options)).eval()
    cache = DynamicHybridCache(model.get_base_model().config)
    with pytest.raises(TypeError, match="virtual tokens"):
        identity_of(model, cache)
    with pytest.raises(TypeError, match="get_base_model"):
        PrefixStore(tmp_path).prefill(model, random_prompt(1, 9), cache)
