"""Configs that a user, another version or a crash has altered: an error of one sentence, or results that make sense."""

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from fuzz.altered import ANY_JSON, NO_JSON, altered
from hf_hybrid_cache.models import ModelLoadError, load, load_config
from hf_hybrid_cache.planning import CostError, Machine, PlanError, make_plans, model_cost

from common.soak import count, search_at_random
from models.tiny_models import FAMILIES, tiny_model

pytestmark = pytest.mark.soak
MACHINE = Machine(2**30, 2**34)


def of_a_size_that_can_be_built(content: Any) -> bool:
    return not isinstance(content, dict) or content.get("num_hidden_layers") in (None, *range(-3, 10))


@search_at_random(4)
@given(data=st.data(), family=st.sampled_from(list(FAMILIES)))
def test_a_config_is_refused_in_one_line_or_gives_plans_and_a_model(
    data: st.DataObject, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HYBRID_CACHE_HOME", str(tmp_path))
    if not (tmp_path / "model.safetensors").exists():
        tiny_model("llama").save_pretrained(tmp_path)
    valid = json.loads(FAMILIES[family]().to_json_string())
    content = data.draw(st.one_of(altered(valid), altered(valid), ANY_JSON, NO_JSON))
    assume(of_a_size_that_can_be_built(content))
    (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    count("JSON files")

    def plan() -> None:
        model = model_cost(load_config(str(tmp_path)))
        make_plans(model, model.max_context, MACHINE)

    # The file of weights is one of llama.
    for use in (plan, lambda: family == "llama" and load(str(tmp_path), device_map="cpu")):
        try:
            use()
        except (ModelLoadError, CostError, PlanError) as error:
            message = str(error)
            assert message.splitlines() == [message]
