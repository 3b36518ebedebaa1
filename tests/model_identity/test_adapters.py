"""Adapters of PEFT: each that changes what a model computes has an identity of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_hybrid_cache import DynamicHybridCache, PrefixStore
from hf_hybrid_cache.model_identity import identity_of

from model_identity.models import differing, identity, new_llama
from models.tiny_models import random_prompt

peft = pytest.importorskip("peft")

# Of peft, about transformers.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def lora(**changes: Any) -> Any:
    return peft.LoraConfig(**{"target_modules": ["q_proj", "v_proj"], "r": 4, "init_lora_weights": False} | changes)


def adapted(**changes: Any) -> Any:
    """A small model with the adapters "german", which is active, and "french"."""
    torch.manual_seed(1)
    model = peft.get_peft_model(new_llama(), lora(**changes), adapter_name="german")
    model.add_adapter("french", lora(**changes))
    return model.eval()


def use_another(model: Any) -> None:
    model.set_adapter("french")


def use_both(model: Any) -> None:
    model.base_model.set_adapter(["german", "french"])


def disable(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def scale(model: Any) -> None:
    model.get_base_model().model.layers[0].self_attn.q_proj.set_scale("german", 3.0)


def merge(model: Any) -> None:
    model.merge_adapter()


def train(model: Any) -> None:
    with torch.no_grad():
        model.get_base_model().model.layers[0].self_attn.q_proj.lora_B["german"].weight[0, 0] += 1


def add_weighted(model: Any) -> None:
    model.add_weighted_adapter(["german", "french"], [0.5, 0.5], "mixed", combination_type="linear")
    model.set_adapter("mixed")


def merge_and_unload(model: Any) -> None:
    model.merge_and_unload()


CHANGES = [use_another, use_both, disable, scale, merge, train, add_weighted, merge_and_unload]


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_model_when_adapters_are_used_otherwise_then_differs(change: Callable[[Any], None], use_dora: bool):
    model = adapted(use_dora=use_dora)
    base = model.get_base_model()
    before, prompt = identity(base), random_prompt(1, 9)
    with torch.no_grad():
        logits = base(prompt).logits
        change(model)
        model.eval()
        assert not torch.equal(base(prompt).logits, logits)
    assert identity(base) != before


def test_adapters_are_told_by_their_names():
    model = adapted()
    base = model.get_base_model()
    assert identity(new_llama()).fields["adapters"] == "none"
    assert identity(base).fields["adapters"].startswith("german (")
    with model.disable_adapter():
        assert identity(base).fields["adapters"].startswith("disabled (")
    use_both(model)
    assert identity(base).fields["adapters"].startswith("french, german (")
    merge(model)
    assert identity(base).fields["adapters"].startswith("french merged, german merged (")


def test_adapter_when_off_and_on_again_then_is_the_same():
    model = adapted()
    base = model.get_base_model()
    before = identity(base)
    with model.disable_adapter():
        assert differing(identity(base), before) == {"adapters"}
    assert identity(base) == before


def test_adapter_when_injected_into_the_model_then_has_the_same_names():
    model = new_llama()
    peft.inject_adapter_in_model(lora(), model, adapter_name="german")
    assert identity(model.eval()).fields["adapters"].startswith("german (")


def test_adapter_when_it_keeps_tensors_beside_buffers_then_they_count():
    models = []
    for seed in (0, 1, 1):
        config = peft.FourierFTConfig(target_modules=["q_proj"], n_frequency=9, random_loc_seed=seed)
        torch.manual_seed(0)
        models.append(peft.get_peft_model(new_llama(), config).eval().get_base_model())
        for name, weight in models[-1].named_parameters():
            if "fourierft" in name:
                weight.data.fill_(1.0)
    first, second, third = map(identity, models)
    assert differing(first, second) == {"modules"}
    assert second == third


@pytest.mark.parametrize("config", ["lora", "prompt tuning", "prefix tuning"])
def test_wrapper_of_peft_when_passed_then_refused_with_the_way_out(config: str, tmp_path: Path):
    configs = {
        "lora": lora,
        "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    }
    model = peft.get_peft_model(new_llama(), configs[config]()).eval()
    cache = DynamicHybridCache(model.get_base_model().config)
    with pytest.raises(TypeError, match="virtual tokens"):
        identity_of(model, cache)
    with pytest.raises(TypeError, match="get_base_model"):
        PrefixStore(tmp_path).prefill(model, random_prompt(1, 9), cache)
