"""Nodes whose checksums fit and whose descriptions are of another version, or forged: they go, and are kept anew."""

import math
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_hybrid_cache import DynamicHybridCache, PrefixStore, PrefixStoreError

from .forged import change, describe, nodes_of
from .prompts import FORMS, are_equal, prompts, read
from models.tiny_models import random_prompt, tiny_model

# The models have short contexts, and the database is gone.
pytestmark = pytest.mark.filterwarnings("ignore:The prompt has .* context is 512")

STATES: dict[str, Callable[[Any], object]] = {
    "none": lambda tree: tree.pop("states"),
    "of another form": lambda tree: tree["states"].update(layers=7),
    "of fewer layers": lambda tree: tree["states"]["layers"].pop(),
    "of another layer": lambda tree: tree["states"]["layers"][0].update(type="Other"),
}
DESCRIPTIONS: dict[str, Callable[[Any], object]] = {
    "no identity": lambda tree: tree.pop("identity"),
    "an infinite document": lambda tree: tree.update(document_tokens=math.inf),
    "a token that is no integer": lambda tree: tree.update(rest=[1.5]),
}


def kept(folder: Path, prompt: torch.Tensor, form: str = "full") -> list[torch.Tensor]:
    """Keep a prompt in a folder, and return its states."""
    model = tiny_model("llama")
    return read(folder, model, prompt, FORMS[form](model.config))[1]


@pytest.mark.parametrize("form", ["full", "quantized"])
@pytest.mark.parametrize("forged", STATES)
def test_states_when_forged_then_go_with_a_warning_and_are_kept_anew(forged: str, form: str, tmp_path: Path):
    model, prompt = tiny_model("llama"), random_prompt(1, 1281)
    cold = kept(tmp_path, prompt, form)
    change(nodes_of(tmp_path)[-1], STATES[forged])
    with pytest.warns(UserWarning, match="It was removed from the store|are not used, and removed"):
        _, states = read(tmp_path, model, prompt, FORMS[form](model.config))
    assert are_equal(states, cold)
    assert read(tmp_path, model, prompt, FORMS[form](model.config))[0] == 1280
    assert PrefixStore(tmp_path).verify() == []


@pytest.mark.parametrize("forged", DESCRIPTIONS)
def test_description_when_unreadable_then_not_listed_and_verify_removes(forged: str, tmp_path: Path):
    kept(tmp_path, random_prompt(1, 400))
    (node,) = nodes_of(tmp_path)
    change(node, DESCRIPTIONS[forged])
    store = PrefixStore(tmp_path)
    assert store.prompts() == []
    with pytest.warns(UserWarning, match="is of no use to this version: .* It was removed from the store"):
        (reason,) = store.verify()
    assert node.name in reason
    assert nodes_of(tmp_path) == []


def test_nodes_before_one_that_cannot_be_read_are_used_and_can_be_removed(tmp_path: Path):
    model, (prompt, other) = tiny_model("llama"), prompts(common=2048, first=152, second=200)
    kept(tmp_path, prompt)
    describe(nodes_of(tmp_path)[1], b"of another version".decode())
    store = PrefixStore(tmp_path)
    assert store.prefill(model, other, DynamicHybridCache(model.config), progress=False).num_tokens == 2048
    with pytest.warns(UserWarning, match="is of no use to this version"):
        store.verify()
    assert [len(each.token_ids) for each in store.prompts()] == [2247]
    for each in store.prompts():
        store.remove(each)
    assert nodes_of(tmp_path) == []


def test_conversation_when_its_states_are_unreadable_then_is_not_resumed(tmp_path: Path):
    model, prompt = tiny_model("llama"), random_prompt(1, 400)
    kept(tmp_path, prompt)
    store = PrefixStore(tmp_path)
    (listed,) = store.prompts()
    change(nodes_of(tmp_path)[0], STATES["none"])
    with (
        pytest.warns(UserWarning, match="is gone. It is made again from the files"),
        pytest.raises(PrefixStoreError, match="cannot be gone on with: "),
    ):
        store.resume(model, listed, DynamicHybridCache(model.config))


def test_nodes_in_a_circle_are_no_prompt(tmp_path: Path):
    model, prompt, store = tiny_model("llama"), random_prompt(1, 501), PrefixStore(tmp_path)
    for tokens in (301, 401, 501):
        store.prefill(model, prompt[:, :tokens], DynamicHybridCache(model.config), progress=False)
    assert [len(each.token_ids) for each in store.prompts()] == [500]
    with closing(sqlite3.connect(tmp_path / "prompts.sqlite")) as connection, connection:
        first, second, _ = (row[0] for row in connection.execute("SELECT id FROM node ORDER BY start"))
        connection.execute("UPDATE node SET parent = ? WHERE id = ?", (second, first))
    assert store.prompts() == []
