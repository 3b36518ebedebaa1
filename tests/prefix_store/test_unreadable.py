"""Nodes whose checksums fit and whose descriptions are of another version, or forged: they go, and are kept anew."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_hybrid_cache import DynamicHybridCache, PrefixStore, PrefixStoreError

from .forged import describe, description_of, nodes_of
from .prompts import prompts, read
from models.tiny_models import tiny_model

# The models have short contexts.
pytestmark = pytest.mark.filterwarnings("ignore:The prompt has .* context is 512")
PROMPTS = prompts(common=2048, first=152, second=200)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A folder with a prompt of two nodes."""
    model, (prompt, _) = tiny_model("llama"), PROMPTS
    read(tmp_path, model, prompt, DynamicHybridCache(model.config))
    return tmp_path


def forge(path: Path, change: Callable[[Any], object]) -> None:
    """Change the description of a node, as JSON has it."""
    tree = description_of(path)
    change(tree)
    describe(path, tree)


@pytest.mark.parametrize("values", [{"identity": None}, {"document_tokens": math.inf}, {"rest": [1.5]}])
def test_description_when_unreadable_then_not_listed_and_verify_removes(values: dict[str, Any], kept: Path):
    first, second = nodes_of(kept)
    forge(second, lambda tree: tree.update(values))
    store = PrefixStore(kept)
    assert store.prompts() == []
    with pytest.warns(UserWarning, match="is of no use to this version: .* It was removed from the store"):
        (reason,) = store.verify()
    assert second.name in reason
    assert nodes_of(kept) == [first]


def test_nodes_before_an_unreadable_one_are_used_and_can_be_removed(kept: Path):
    model, store = tiny_model("llama"), PrefixStore(kept)
    describe(nodes_of(kept)[1], "of another version")
    assert store.prefill(model, PROMPTS[1], DynamicHybridCache(model.config), progress=False).num_tokens == 2048
    with pytest.warns(UserWarning, match="is of no use to this version"):
        store.verify()
    (stored,) = store.prompts()
    assert len(stored.token_ids) == 2247
    store.remove(stored)
    assert nodes_of(kept) == []


def test_conversation_when_its_states_are_unreadable_then_is_not_resumed(kept: Path):
    model, store = tiny_model("llama"), PrefixStore(kept)
    (listed,) = store.prompts()
    forge(nodes_of(kept)[0], lambda tree: tree.pop("states"))
    with pytest.raises(PrefixStoreError, match="cannot be gone on with: "):
        store.resume(model, listed, DynamicHybridCache(model.config))
