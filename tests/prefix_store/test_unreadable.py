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
Keep = Callable[..., list[torch.Tensor]]
# In a description: where parts of it are, by keys with a space between, "*" for all; and what they have there then.
Forged = tuple[str, dict[Any, Any]]
GONE = object()


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


def forge(path: Path, forged: Forged) -> None:
    """Change the description of a node, as JSON has it."""
    tree, (place, values) = description_of(path), forged
    parts = [tree]
    for key in place.split():
        parts = [
            each
            for part in parts
            for each in (part if key == "*" else [part[int(key) if isinstance(part, list) else key]])
        ]
    for part in parts:
        for name, value in values.items():
            if value is GONE:
                part.pop(name)
            else:
                part[name] = value
    describe(path, tree)


ONE, ALL, ATTRIBUTES = "states layers 1 states", "states layers * states", "states layers 0 attributes"
# By the family, the form of cache, the number of tokens, and the node that is forged.
STATES: dict[tuple[str, str, int, int], list[Forged]] = {
    ("llama", "full", 320, -1): [
        *(("", {"states": each}) for each in (GONE, "[]", "{}", "NaN", "", "[" * 100_000)),
        *(("states", {"layers": each}) for each in (GONE, 7)),
        *(("states", {"codecs": {each: {}}}) for each in ("99", "inf")),
        *(("states", {"first_rows": {"layers.0/states.keys": row}}) for row in (-1, 11, math.inf)),
        ("states layers", {-1: GONE}),
        ("states layers 1", {"states": None}),
        ("states layers 1", {"type": "Other"}),
        *((ONE, {"entries": each}) for each in ({"states": 256}, {"states": 320, "other": 0}, {"full": 64})),
        *((ONE, {"num_kv_heads": each}) for each in (0, 2**20)),
        *((ONE, {"key_dtype": each}) for each in ("int64", "complex64")),
        (ONE, {"batch": 2, "prefixes": 2}),
        (ONE, {"other": 1}),
        (ALL, {"num_kv_heads": 3}),
        (ALL, {"num_kv_heads": 2**15, "key_dim": 2**15}),
        (ALL, {"value_dtype": "float16"}),
        *((ALL, {"device": each}) for each in ("meta", "no such")),
        (ALL, {"entries": {"full": 320 - 64, "packed": 1}}),
    ],
    ("llama", "quantized", 1280, -1): [
        ("states layers", {-1: GONE}),
        ("states layers 1", {"type": "Other"}),
        (ALL, {"entries": {"full": 0, "packed": 20}}),
    ],
    ("llama", "quantized", 1280, 0): [
        ("states codecs 1", each) for each in ({"sink_tokens": 2**34}, {"bits": [3, 4]}, {"other": 7}, {"name": []})
    ],
    ("gemma3", "full", 320, -1): [
        *((f"{ATTRIBUTES} keys", each) for each in ({"tensor": "another"}, {"device": None})),
        *((ATTRIBUTES, {"keys": each}) for each in (GONE, {"dict": 7})),
        *((ATTRIBUTES, {"cumulative_length": each}) for each in (12, "12")),
        (ATTRIBUTES, {"sliding_window": 2**40}),
        (ATTRIBUTES, {"update": 1}),
    ],
}


@pytest.mark.parametrize(("what", "forged"), [(what, each) for what in STATES for each in STATES[what]])
def test_states_when_forged_then_go_with_a_warning_and_are_kept_anew(
    what: tuple[str, str, int, int], forged: Forged, kept: Keep, tmp_path: Path
):
    family, form, length, node = what
    model, prompt = tiny_model(family), random_prompt(1, length + 1)
    cold = kept(prompt, family, form)
    forge(nodes_of(tmp_path)[node], forged)
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
    forge(node, (ALL, {"num_kv_heads": 2**15, "key_dim": 2**15, "value_dim": 2**15}))
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


@pytest.mark.parametrize("values", [{"identity": GONE}, {"document_tokens": math.inf}, {"rest": [1.5]}])
def test_description_when_unreadable_then_not_listed_and_verify_removes(
    values: dict[Any, Any], kept: Keep, tmp_path: Path
):
    kept(random_prompt(1, 400))
    (node,) = nodes_of(tmp_path)
    forge(node, ("", values))
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
    forge(nodes_of(tmp_path)[0], ("", {"states": GONE}))
    with (
        pytest.warns(UserWarning, match="is gone. It is made again from the files"),
        pytest.raises(PrefixStoreError, match="cannot be gone on with: "),
    ):
        store.resume(model, listed, DynamicHybridCache(model.config))


def test_nodes_in_a_circle_are_no_prompt(tmp_path: Path):
    model, store = tiny_model("llama"), PrefixStore(tmp_path)
    store.prefill(model, random_prompt(1, 1301), DynamicHybridCache(model.config), progress=False)
    assert [len(each.token_ids) for each in store.prompts()] == [1300]
    with closing(sqlite3.connect(tmp_path / "prompts.sqlite")) as connection, connection:
        first, second, _ = (row[0] for row in connection.execute("SELECT id FROM node ORDER BY start"))
        connection.execute("UPDATE node SET parent = ? WHERE id = ?", (second, first))
    assert store.prompts() == []
