"""Files that a user, another version or a crash has altered: an error of one sentence, or results that make sense."""

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from experiments.sweep import store, table
from experiments.sweep.points import points, shortages
from fuzz.altered import ANY_JSON, NO_JSON, altered
from hf_hybrid_cache.models import ModelLoadError, load, load_config
from hf_hybrid_cache.planning import CostError, Machine, PlanError, make_plans, model_cost

from common.soak import count, search_at_random
from measurements.test_context_sweep import CELL, record_of
from models.tiny_models import FAMILIES, tiny_model

pytestmark = pytest.mark.soak
MACHINE = Machine(2**30, 2**34)


def as_bytes(content: Any) -> bytes:
    return content if isinstance(content, bytes) else json.dumps(content).encode()


def check_message(error: Exception) -> None:
    """Check that the message is one line."""
    assert str(error)
    assert "\n" not in str(error)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HYBRID_CACHE_HOME", str(tmp_path))


RECORD = {"experiment": store.EXPERIMENT, "schema_version": store.SCHEMA_VERSION, **record_of(CELL)}


@search_at_random(80, 500)
@given(content=st.one_of(altered(RECORD), ANY_JSON, NO_JSON))
def test_a_record_of_the_sweep_is_named_or_can_be_shown(content: Any, tmp_path: Path):
    path = tmp_path / f"{CELL.name}.json"
    path.write_bytes(as_bytes(content))
    count("JSON files")
    stored = store.read(tmp_path)
    assert len(stored.records) + len(stored.damaged) == 1
    assert all("\n" not in reason for reason in stored.damaged.values())
    found = stored.records.values()
    for shown in (points, shortages, lambda found: [table.row(record) for record in found]):
        shown(found)
    store.write_summary(tmp_path)


def test_a_folder_in_the_place_of_a_record_is_named(tmp_path: Path):
    (tmp_path / "a.json").mkdir()
    assert "Is a directory" in store.read(tmp_path).damaged[tmp_path / "a.json"]


def of_a_size_that_can_be_built(content: Any) -> bool:
    return not isinstance(content, dict) or content.get("num_hidden_layers") in (None, *range(-3, 10))


@search_at_random(12, 500)
@given(data=st.data(), family=st.sampled_from(list(FAMILIES)))
def test_a_config_is_refused_or_gives_plans(data: st.DataObject, family: str, tmp_path: Path):
    valid = json.loads(FAMILIES[family]().to_json_string())
    content = data.draw(st.one_of(altered(valid), altered(valid), ANY_JSON, NO_JSON))
    assume(of_a_size_that_can_be_built(content))
    (tmp_path / "config.json").write_bytes(as_bytes(content))
    count("JSON files")
    try:
        model = model_cost(load_config(str(tmp_path)))
        make_plans(model, model.max_context, MACHINE)
    except (ModelLoadError, CostError, PlanError) as error:
        check_message(error)


@search_at_random(8, 500)
@given(data=st.data())
def test_a_model_with_another_config_loads_or_is_refused(data: st.DataObject, tmp_path: Path):
    model = tiny_model("llama")
    if not (tmp_path / "model.safetensors").exists():
        model.save_pretrained(tmp_path)
    content = data.draw(st.one_of(altered(json.loads(model.config.to_json_string())), NO_JSON))
    assume(of_a_size_that_can_be_built(content))
    (tmp_path / "config.json").write_bytes(as_bytes(content))
    count("JSON files")
    try:
        load(str(tmp_path), device_map="cpu")
    except ModelLoadError as error:
        check_message(error)
