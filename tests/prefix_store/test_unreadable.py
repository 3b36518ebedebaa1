"""Nodes whose checksums fit and whose descriptions are of another version, or forged: they go, and are kept anew."""

import math
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from files.forged import parts_of, write

from hf_hybrid_cache import DynamicHybridCache, HostMemoryError, PrefixStore, PrefixStoreError

from .forged import describe, description_of, nodes_of
from .prompts import FORMS, are_equal, prompts, read
from models.tiny_models import random_prompt, tiny_model

# The models have short contexts.
pytestmark = pytest.mark.filterwarnings("ignore:The prompt has .* context is 512")
Keep = Callable[..., list[torch.Tensor]]
Change = Callable[[Any], object]


@pytest.fixture
def kept(tmp_path: Path) -> Keep:
    """Keep a prompt in a folder, and return its states."""

    def keep(prompt: torch.Tensor, family: str = "llama", form: str = "full") -> list[torch.Tensor]:
        folder, states = _kept(family, form, tuple(prompt[0].tolist()), tmp_path.parent)
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
        return states

    return keep


@cache
def _kept(family: str, form: str, tokens: tuple[int, ...], folder: Path) -> tuple[Path, list[torch.Tensor]]:
    model, path = tiny_model(family), folder / f"{family} {form} {len(tokens)}"
    return path, read(path, model, torch.tensor([tokens]), FORMS[form](model.config))[1]


def forge(path: Path, change: Change) -> None:
    """Change the description of a node, as JSON has it."""
    tree = description_of(path)
    change(tree)
    describe(path, tree)


def of_all_layers(**changes: Any) -> Change:
    return lambda tree: [layer["states"].update(changes) for layer in tree["states"]["layers"]]


def of_window(**changes: Any) -> Change:
    return lambda tree: tree["states"]["layers"][0]["attributes"].update(changes)


# What tests/fuzz/test_nodes.py tries at random: a family and a form, and what is forged.
FORGED: list[tuple[str, Change]] = [
    ("llama", lambda tree: tree.pop("states")),
    ("llama", lambda tree: tree.update(states="[" * 100_000)),
    ("llama", lambda tree: tree["states"]["layers"].pop()),
    ("llama", lambda tree: tree["states"]["layers"][1].update(states=None)),
    ("llama", lambda tree: tree["states"]["first_rows"].update({"layers.0/states.keys": math.inf})),
    ("llama", of_all_layers(num_kv_heads=2**15, key_dim=2**15)),
    ("llama", of_all_layers(value_dtype="float16")),
    ("llama", of_all_layers(device="no such")),
    ("llama", of_all_layers(entries={"full": 320 - 64, "packed": 1})),
    ("llama quantized", lambda tree: tree["states"]["codecs"]["1"].update(sink_tokens=2**34)),
    ("llama quantized", lambda tree: tree["states"]["codecs"]["1"].update(name=[])),
    ("gemma3", of_window(keys={"dict": 7})),
    ("gemma3", of_window(sliding_window=2**40)),
]


@pytest.mark.parametrize(("what", "change"), FORGED)
def test_states_when_forged_then_go_with_a_warning_and_are_kept_anew(
    what: str, change: Change, kept: Keep, tmp_path: Path
):
    family, _, form = what.partition(" ")
    make, model, prompt = FORMS[form or "full"], tiny_model(family), random_prompt(1, 321)
    cold = kept(prompt, family, form or "full")
    forge(nodes_of(tmp_path)[-1], change)
    with pytest.warns(UserWarning, match="It was removed from the store|are not used, and removed"):
        _, states = read(tmp_path, model, prompt, make(model.config))
    assert are_equal(states, cold)
    assert read(tmp_path, model, prompt, make(model.config))[0] == 320
    assert PrefixStore(tmp_path).verify() == []


def test_states_when_sparse_and_larger_than_memory_then_take_none(kept: Keep, tmp_path: Path):
    model, prompt = tiny_model("llama"), random_prompt(1, 129)
    kept(prompt)
    (node,) = nodes_of(tmp_path)
    forge(node, of_all_layers(num_kv_heads=2**15, key_dim=2**15, value_dim=2**15))
    (header, data), end = parts_of(node), 0
    tensors = {name: each for name, each in header.items() if name != "__metadata__"}
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = tensor["data_offsets"]
        if "/states." in name:
            sizes = [2**15, *(2**15 if size == 16 else size for size in tensor["shape"][3:])]
            stop += (stop - start) * (math.prod(sizes) // math.prod(tensor["shape"][2:]) - 1)
            tensor["shape"][2:] = sizes
        tensor["data_offsets"] = [end, end := end + stop - start]
    write(node, header, data[:4], hole=end - 4)
    with pytest.raises(HostMemoryError):
        read(tmp_path, model, prompt, DynamicHybridCache(model.config))


@pytest.mark.parametrize("values", [{"identity": None}, {"document_tokens": math.inf}, {"rest": [1.5]}])
def test_description_when_unreadable_then_not_listed_and_verify_removes(
    values: dict[str, Any], kept: Keep, tmp_path: Path
):
    kept(random_prompt(1, 400))
    (node,) = nodes_of(tmp_path)
    forge(node, lambda tree: tree.update(values))
    store = PrefixStore(tmp_path)
    assert store.prompts() == []
    with pytest.warns(UserWarning, match="is of no use to this version: .* It was removed from the store"):
        (reason,) = store.verify()
    assert node.name in reason
    assert nodes_of(tmp_path) == []


def test_nodes_before_an_unreadable_one_are_used_and_can_be_removed(kept: Keep, tmp_path: Path):
    model, (prompt, other) = tiny_model("llama"), prompts(common=2048, first=152, second=200)
    kept(prompt)
    describe(nodes_of(tmp_path)[1], "of another version")
    store = PrefixStore(tmp_path)
    assert store.prefill(model, other, DynamicHybridCache(model.config), progress=False).num_tokens == 2048
    with pytest.warns(UserWarning, match="is of no use to this version"):
        store.verify()
    assert [len(each.token_ids) for each in store.prompts()] == [2247]
    for each in store.prompts():
        store.remove(each)
    assert nodes_of(tmp_path) == []


def test_conversation_when_its_states_are_unreadable_then_is_not_resumed(kept: Keep, tmp_path: Path):
    model, store = tiny_model("llama"), PrefixStore(tmp_path)
    kept(random_prompt(1, 400))
    (listed,) = store.prompts()
    forge(nodes_of(tmp_path)[0], lambda tree: tree.pop("states"))
    with pytest.raises(PrefixStoreError, match="cannot be gone on with: "):
        store.resume(model, listed, DynamicHybridCache(model.config))
