"""Nodes whose checksums fit and whose descriptions are of another version, or forged."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_hybrid_cache import DynamicHybridCache, HostMemoryError, PrefixStore, PrefixStoreError

from .forged import change, describe, description_of, nodes_of
from .prompts import FORMS, are_equal, prompts, read
from models.tiny_models import random_prompt, tiny_model

# The models have short contexts.
pytestmark = pytest.mark.filterwarnings("ignore:The prompt has .* context is 512")


def entries_of(tree: Any) -> Any:
    return tree["states"]["layers"][1]["states"]["entries"]


def set_sizes(**sizes: Any) -> Callable[[Any], object]:
    return lambda tree: tree["states"]["layers"][1]["states"].update(sizes)


CHANGES: dict[str, Callable[[Any], object]] = {
    "no states": lambda tree: tree.pop("states"),
    "another name": lambda tree: tree.update(identity_of=tree.pop("identity")),
    "an infinite document": lambda tree: tree.update(document_tokens=math.inf),
    "a document beyond the node": lambda tree: tree.update(document_tokens=401),
    "a token that is no integer": lambda tree: tree.update(rest=[1.5]),
    "an infinite layer of a codec": lambda tree: tree["states"].update(codecs=[[math.inf, {}]]),
    "a layer too many": lambda tree: tree["states"].update(codecs=[[99, {}]]),
    "more entries": lambda tree: entries_of(tree).update({"states": 400}),
    "entries of no kind": lambda tree: entries_of(tree).update(other=0),
    "quantized entries beyond the tokens": set_sizes(entries={"full": 64, "packed": 1000}),
    "tensors of an empty layer": lambda tree: tree["states"]["layers"][1].update(states=None),
    "no heads": set_sizes(num_kv_heads=0),
    "two sequences": set_sizes(batch=2, prefixes=2),
    "integers": set_sizes(key_dtype="int64"),
    "a section of another size": lambda tree: tree["states"]["sections"][0].__setitem__(2, [2**39, 2**39]),
    "two sections of one name": lambda tree: tree["states"]["sections"][0].__setitem__(
        0, tree["states"]["sections"][1][0]
    ),
}


def kept(folder: Path, prompt: torch.Tensor, form: str = "full", family: str = "llama") -> list[torch.Tensor]:
    """Keep a prompt in a folder, and return its states."""
    model = tiny_model(family)
    return read(folder, model, prompt, FORMS[form](model.config))[1]


@pytest.mark.parametrize("changed", CHANGES)
def test_node_when_description_is_unreadable_then_is_as_if_not_there(changed: str, tmp_path: Path):
    model, prompt = tiny_model("llama"), random_prompt(1, 400)
    cold = kept(tmp_path, prompt)
    (node,) = nodes_of(tmp_path)
    change(node, CHANGES[changed])
    store = PrefixStore(tmp_path)
    assert store.prompts() == []
    assert "0 of 400 tokens" in store.why(model, prompt, DynamicHybridCache(model.config))
    reused, states = read(tmp_path, model, prompt, DynamicHybridCache(model.config))
    assert reused == 0
    assert are_equal(states, cold)
    # It was written again in its place.
    assert read(tmp_path, model, prompt, DynamicHybridCache(model.config))[0] == 399
    assert store.verify() == []


def test_node_when_description_is_unreadable_then_verify_names_and_removes(tmp_path: Path):
    kept(tmp_path, random_prompt(1, 400))
    (node,) = nodes_of(tmp_path)
    describe(node, b"of another version")
    store = PrefixStore(tmp_path)
    with pytest.warns(UserWarning, match="is of no use to this version: .* It was removed from the store"):
        (reason,) = store.verify()
    assert node.name in reason
    assert nodes_of(tmp_path) == []


def test_nodes_before_one_that_cannot_be_read_are_used_and_can_be_removed(tmp_path: Path):
    model, (prompt, other) = tiny_model("llama"), prompts(common=2048, first=152, second=200)
    kept(tmp_path, prompt)
    change(nodes_of(tmp_path)[1], CHANGES["no states"])
    store = PrefixStore(tmp_path)
    assert [len(each.token_ids) for each in store.prompts()] == [2048]
    assert store.prefill(model, other, DynamicHybridCache(model.config), progress=False).num_tokens == 2048
    for each in store.prompts():
        store.remove(each)
    assert nodes_of(tmp_path) == []


def test_conversation_when_description_is_unreadable_then_is_not_resumed(tmp_path: Path):
    model, prompt = tiny_model("llama"), random_prompt(1, 400)
    kept(tmp_path, prompt)
    store = PrefixStore(tmp_path)
    (listed,) = store.prompts()
    change(nodes_of(tmp_path)[0], CHANGES["no states"])
    with pytest.raises(PrefixStoreError, match=r"cannot be gone on with: .* is of no use to this version"):
        store.resume(model, listed, DynamicHybridCache(model.config))


def attributes(tree: Any) -> Any:
    """The attributes of a layer with a sliding window."""
    return tree["states"]["layers"][0]["attributes"]


@pytest.mark.parametrize(
    "act",
    [
        lambda tree: attributes(tree)["keys"].update(tensor="another"),
        lambda tree: attributes(tree)["keys"].update(device=None),
        lambda tree: attributes(tree).update(keys={"dict": 7}),
        lambda tree: attributes(tree).update(sliding_window=2**40),
        lambda tree: attributes(tree).update(cumulative_length=12),
        lambda tree: attributes(tree).update(cumulative_length="12"),
        lambda tree: tree["states"]["layers"].pop(),
        lambda tree: tree["states"]["layers"][0].update(type="Other"),
    ],
)
def test_states_when_not_fitting_the_layers_then_not_used_with_a_warning(act: Any, tmp_path: Path):
    model, prompt = tiny_model("gemma3"), random_prompt(1, 400)
    cold = kept(tmp_path, prompt, family="gemma3")
    change(nodes_of(tmp_path)[0], act)
    (listed,) = PrefixStore(tmp_path).prompts()
    with pytest.warns(UserWarning, match="States of 399 tokens are not used: "):
        reused, states = read(tmp_path, model, prompt, DynamicHybridCache(model.config))
    assert reused == 0
    assert are_equal(states, cold)
    with pytest.raises(PrefixStoreError, match="cannot be gone on with"):
        PrefixStore(tmp_path).resume(model, listed, DynamicHybridCache(model.config))


def test_node_when_larger_than_memory_and_empty_then_memory_is_not_taken(tmp_path: Path):
    model, prompt = tiny_model("llama"), random_prompt(1, 400)
    kept(tmp_path, prompt)
    (node,) = nodes_of(tmp_path)
    tree, num_bytes = description_of(node), 0
    for layer in tree["states"]["layers"]:
        layer["states"].update(num_kv_heads=2**15, key_dim=2**11, value_dim=2**11)
    for section in tree["states"]["sections"]:
        section[2] = [{2: 2**15, 16: 2**11}.get(each, each) for each in section[2]]
        num_bytes += 4 * math.prod(section[2])
    describe(node, tree, sparse_bytes=num_bytes)
    with pytest.raises(HostMemoryError):
        PrefixStore(tmp_path).prefill(model, prompt, DynamicHybridCache(model.config), progress=False)


@pytest.mark.parametrize(("name", "value"), [("sink_tokens", 2**34), ("bits", [3, 4]), ("other", 7)])
def test_codec_when_it_is_not_what_was_asked_for_then_states_are_not_used(name: str, value: Any, tmp_path: Path):
    model, prompt = tiny_model("llama"), random_prompt(1, 1281)
    kept(tmp_path, prompt, "quantized")
    change(nodes_of(tmp_path)[0], lambda tree: tree["states"]["codecs"][1][1].update({name: value}))
    with pytest.warns(UserWarning, match="States of 1,280 tokens are not used: "):
        assert read(tmp_path, model, prompt, FORMS["quantized"](model.config))[0] == 0


def test_blocks_when_they_leave_no_sinks_then_states_are_not_used(tmp_path: Path):
    model, prompt = tiny_model("llama"), random_prompt(1, 1281)
    kept(tmp_path, prompt, "quantized")
    change(nodes_of(tmp_path)[1], set_sizes(entries={"full": 0, "packed": 20}))
    with pytest.warns(UserWarning, match="20 quantized blocks after 0 tokens"):
        assert read(tmp_path, model, prompt, FORMS["quantized"](model.config))[0] == 0
