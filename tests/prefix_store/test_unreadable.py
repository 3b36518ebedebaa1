"""Nodes whose checksums fit and whose descriptions are of another version, or forged: they go, and are kept anew."""

import math
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
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

# The models have short contexts, and the database is gone.
pytestmark = pytest.mark.filterwarnings("ignore:The prompt has .* context is 512")
Change = Callable[[Any], object]
Keep = Callable[..., list[torch.Tensor]]


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


def change(path: Path, act: Change) -> None:
    """Change the description of a node, as JSON has it, in place."""
    tree = description_of(path)
    act(tree)
    describe(path, tree)


def set_states(*layers: int, **values: Any) -> Change:
    """Change the numbers of some layers."""
    return lambda tree: [tree["states"]["layers"][layer]["states"].update(values) for layer in layers]


def set_layer(**values: Any) -> Change:
    return lambda tree: tree["states"]["layers"][1].update(values)


def set_attributes(act: Change) -> Change:
    """Change the attributes of a layer of transformers' own."""
    return lambda tree: act(tree["states"]["layers"][0]["attributes"])


def set_codec(name: str, value: Any) -> Change:
    return lambda tree: tree["states"]["codecs"]["1"].update({name: value})


def set_first_rows(row: float) -> Change:
    return lambda tree: tree["states"].update(first_rows={"layers.0/states.keys": row})


# By the family, the form of cache, the number of tokens, and the node that is forged.
STATES: dict[tuple[str, str, int, int], list[Change]] = {
    ("llama", "full", 320, -1): [
        lambda tree: tree.pop("states"),
        *(lambda tree, text=text: tree.update(states=text) for text in ("[]", "{}", "NaN", "", "[" * 100_000)),
        lambda tree: tree["states"].pop("layers"),
        lambda tree: tree["states"].update(layers=7),
        lambda tree: tree["states"]["layers"].pop(),
        lambda tree: tree["states"].update(codecs={"99": {}}),
        lambda tree: tree["states"].update(codecs={"inf": {}}),
        *map(set_first_rows, (-1, 11, math.inf)),
        set_layer(states=None),
        set_layer(type="Other"),
        set_states(1, entries={"states": 256}),
        set_states(1, entries={"states": 320, "other": 0}),
        set_states(1, entries={"full": 64, "packed": 1000}),
        set_states(1, num_kv_heads=0),
        set_states(1, num_kv_heads=2**20),
        set_states(1, batch=2, prefixes=2),
        set_states(1, key_dtype="int64"),
        set_states(1, key_dtype="complex64"),
        set_states(1, other=1),
        set_states(0, 1, 2, 3, num_kv_heads=3),
        set_states(0, 1, 2, 3, num_kv_heads=2**15, key_dim=2**15),
        set_states(0, 1, 2, 3, value_dtype="float16"),
        set_states(0, 1, 2, 3, device="meta"),
        set_states(0, 1, 2, 3, device="no such"),
        set_states(0, 1, 2, 3, entries={"full": 320 - 64, "packed": 1}),
    ],
    ("llama", "quantized", 1280, -1): [
        lambda tree: tree["states"]["layers"].pop(),
        set_layer(type="Other"),
        set_states(0, 1, 2, 3, entries={"full": 0, "packed": 20}),
    ],
    ("llama", "quantized", 1280, 0): [
        set_codec("sink_tokens", 2**34),
        set_codec("bits", [3, 4]),
        set_codec("other", 7),
        set_codec("name", []),
    ],
    ("gemma3", "full", 320, -1): [
        set_attributes(lambda attributes: attributes["keys"].update(tensor="another")),
        set_attributes(lambda attributes: attributes["keys"].update(device=None)),
        set_attributes(lambda attributes: attributes.update(keys={"dict": 7})),
        set_attributes(lambda attributes: attributes.update(sliding_window=2**40)),
        set_attributes(lambda attributes: attributes.update(cumulative_length=12)),
        set_attributes(lambda attributes: attributes.update(cumulative_length="12")),
        set_attributes(lambda attributes: attributes.update(update=1)),
        set_attributes(lambda attributes: attributes.pop("keys")),
    ],
}


@pytest.mark.parametrize(
    ("what", "number"), [(what, at) for what in STATES for at in range(len(STATES[what]))], ids=str
)
def test_states_when_forged_then_go_with_a_warning_and_are_kept_anew(
    what: tuple[str, str, int, int], number: int, kept: Keep, tmp_path: Path
):
    family, form, length, node = what
    model, prompt = tiny_model(family), random_prompt(1, length + 1)
    cold = kept(prompt, family, form)
    change(nodes_of(tmp_path)[node], STATES[what][number])
    with pytest.warns(UserWarning, match="It was removed from the store|are not used, and removed"):
        _, states = read(tmp_path, model, prompt, FORMS[form](model.config))
    assert are_equal(states, cold)
    assert read(tmp_path, model, prompt, FORMS[form](model.config))[0] == length
    assert PrefixStore(tmp_path).verify() == []


@pytest.mark.filterwarnings("ignore:.*made again")
def test_states_when_sparse_and_larger_than_memory_then_take_none(kept: Keep, tmp_path: Path):
    model, prompt = tiny_model("llama"), random_prompt(1, 129)
    kept(prompt)
    (node,) = nodes_of(tmp_path)
    change(node, set_states(0, 1, 2, 3, num_kv_heads=2**15, key_dim=2**15, value_dim=2**15))
    (header, data), end, of_keys = parts_of(node), 0, 0
    tensors = {name: each for name, each in header.items() if name != "__metadata__"}
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = tensor["data_offsets"]
        if "/states." in name:
            of_keys = of_keys or end
            sizes = [2**15, *(2**15 if size == 16 else size for size in tensor["shape"][3:])]
            stop += (stop - start) * (math.prod(sizes) // math.prod(tensor["shape"][2:]) - 1)
            tensor["shape"][2:] = sizes
        tensor["data_offsets"] = [end, end := end + stop - start]
    write(node, header, data[: of_keys + 4], hole=end - of_keys - 4)
    with pytest.raises(HostMemoryError):
        read(tmp_path, model, prompt, DynamicHybridCache(model.config))


@pytest.mark.parametrize(
    "forged",
    [
        lambda tree: tree.pop("identity"),
        lambda tree: tree.update(document_tokens=math.inf),
        lambda tree: tree.update(rest=[1.5]),
    ],
)
def test_description_when_unreadable_then_not_listed_and_verify_removes(forged: Change, kept: Keep, tmp_path: Path):
    kept(random_prompt(1, 400))
    (node,) = nodes_of(tmp_path)
    change(node, forged)
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
    change(nodes_of(tmp_path)[0], lambda tree: tree.pop("states"))
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
