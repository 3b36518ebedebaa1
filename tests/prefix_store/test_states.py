"""Nodes are written from a cache and fill another one with the same bits; forged ones are refused or harmless."""

import json
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_hybrid_cache import CacheFileError, HostMemoryError, HybridCache
from hf_hybrid_cache.cache import contents_of
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.files.tensor_file import NewFile, Section, TensorForm
from hf_hybrid_cache.prefix_store.filling import fill
from hf_hybrid_cache.prefix_store.states import NodeStates, states_since
from hf_hybrid_cache.storage import GRANULE

from .forged import parts_of, write
from .prompts import FORMS, Written, are_equal, held, next_logits
from models.tiny_models import random_prompt, tiny_model

# The models have short contexts.
pytestmark = pytest.mark.filterwarnings("ignore:The prompt has .* context is 512")
PROMPT = random_prompt(1, 1400)
ENDS = [300, 640, 1281]


@torch.no_grad()
def written(folder: Path, family: str, form: str, ends: list[int] = ENDS) -> list[Written]:
    """Read a prompt in passes, and write a node after each of them."""
    model, parts, before = tiny_model(family), list[Written](), None
    cache, start = FORMS[form](model.config), 0
    tokens = Section("tokens", {"tokens": TensorForm("int32", (1,))}, lambda: [[b"1234"]])
    for end in ends:
        model(PROMPT[:, cache.get_seq_length() : end], **cache_argument(cache))
        contents = contents_of(cache)
        contents.settle()
        before, sections = states_since(start // GRANULE * GRANULE, before, contents.layers, contents.stores)
        path = folder / f"{end}"
        with path.open("wb") as file:
            NewFile({"states": before.to_json()}, [tokens, *sections], alignment=64).write(file)
        parts.append(Written(path, end))
        start = end
    return parts


@torch.no_grad()
def read(family: str, form: str, ends: list[int]) -> HybridCache:
    """Read a prompt in passes, without nodes."""
    model = tiny_model(family)
    cache = FORMS[form](model.config)
    for end in ends:
        model(PROMPT[:, cache.get_seq_length() : end], **cache_argument(cache))
        contents_of(cache).settle()
    return cache


def filled(family: str, form: str, parts: list[Written]) -> HybridCache:
    cache = FORMS[form](tiny_model(family).config)
    fill(contents_of(cache), parts)
    return cache


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_nodes_fill_another_cache_with_the_same_bits(family: str, form: str, tmp_path: Path):
    parts, model = written(tmp_path, family, form), tiny_model(family)
    for number in range(1, len(parts) + 1):
        cache, cold = filled(family, form, parts[:number]), read(family, form, ENDS[:number])
        assert are_equal(held(cache), held(cold))
        prompt = PROMPT[:, : ENDS[number - 1] + 70]
        assert torch.equal(next_logits(model, prompt, cache), next_logits(model, prompt, cold))


def test_a_beginning_of_the_last_node_is_enough_in_full_precision(tmp_path: Path):
    parts = written(tmp_path, "llama", "full")
    cache = filled("llama", "full", [*parts[:2], parts[2]._replace(end=700)])
    assert cache.get_seq_length() == 700
    assert are_equal(held(cache), [each[:, :, :700] for each in held(read("llama", "full", ENDS))])


@pytest.mark.parametrize("position", [100, 5000, 50_000, -2])
def test_a_damaged_node_is_refused(position: int, tmp_path: Path):
    parts = written(tmp_path, "llama", "quantized")
    path = tmp_path / f"{ENDS[1]}"
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    with pytest.raises(CacheFileError, match=r"was altered|not a safetensors file"):
        filled("llama", "quantized", parts)


def forged(part: Written, change: Callable[[Any], object]) -> Written:
    """Give a node a copy with other states, and the checksums that fit."""
    tree = json.loads(part.states().to_json())
    change(tree)
    header, data = parts_of(part.path)
    header["__metadata__"]["states"] = json.dumps(tree)
    copy = part.path.with_name(f"forged {part.path.name}")
    write(copy, header, data)
    return part._replace(path=copy)


def set_states(**values: Any) -> Callable[[Any], object]:
    return lambda tree: tree["layers"][1]["states"].update(values)


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree.pop("layers"),
        lambda tree: tree.update(codecs={"99": {}}),
        lambda tree: tree.update(codecs={"inf": {}}),
        lambda tree: tree.update(first_rows={"layers.0/states.keys": -1}),
        lambda tree: tree.update(first_rows={"layers.0/states.keys": math.inf}),
        set_states(entries={"states": 1280}),
        set_states(entries={"states": 1281, "other": 0}),
        set_states(entries={"full": 64, "packed": 1000}),
        set_states(num_kv_heads=0),
        set_states(num_kv_heads=2**20),
        set_states(batch=2, prefixes=2),
        set_states(key_dtype="int64"),
        set_states(key_dtype="complex64"),
        set_states(other=1),
    ],
)
def test_a_forged_description_is_refused_before_it_is_used(change: Any, tmp_path: Path):
    *_, last = written(tmp_path, "llama", "full")
    with pytest.raises(ValueError, match=r"\w"):
        forged(last, change).states()
    for text in ("[]", "{}", "NaN", "[" * 100_000, ""):
        with pytest.raises(ValueError, match=r"\w"):
            NodeStates.from_json(text)


def set_all(**values: Any) -> Callable[[Any], object]:
    return lambda tree: [layer["states"].update(values) for layer in tree["layers"]]


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree["layers"][1].update(states=None),
        lambda tree: tree["layers"].pop(),
        lambda tree: tree["layers"][1].update(type="Other"),
        lambda tree: tree["first_rows"].update({"layers.1/states.keys": 11}),
        set_all(num_kv_heads=3),
        set_all(num_kv_heads=2**15, key_dim=2**15),
        set_all(value_dtype="float16"),
        set_all(device="meta"),
        set_all(device="no such"),
        set_all(entries={"full": 1281 - 64, "packed": 1}),
    ],
)
def test_states_that_do_not_fit_the_layers_are_refused(change: Any, tmp_path: Path):
    *parts, last = written(tmp_path, "llama", "full")
    with pytest.raises(ValueError, match=r"\w"):
        filled("llama", "full", [*parts, forged(last, change)._replace(end=last.end)])


@pytest.mark.parametrize(
    "change",
    [
        lambda attributes: attributes["keys"].update(tensor="another"),
        lambda attributes: attributes["keys"].update(device=None),
        lambda attributes: attributes.update(keys={"dict": 7}),
        lambda attributes: attributes.update(sliding_window=2**40),
        lambda attributes: attributes.update(cumulative_length=12),
        lambda attributes: attributes.update(cumulative_length="12"),
        lambda attributes: attributes.update(update=1),
        lambda attributes: attributes.pop("keys"),
    ],
)
def test_attributes_that_do_not_fit_the_layers_are_refused(change: Any, tmp_path: Path):
    (last,) = written(tmp_path, "gemma3", "full", [300])
    with pytest.raises(ValueError, match=r"\w"):
        filled("gemma3", "full", [forged(last, lambda tree: change(tree["layers"][0]["attributes"]))])


@pytest.mark.parametrize(("name", "value"), [("sink_tokens", 2**34), ("bits", [3, 4]), ("other", 7), ("name", [])])
def test_codecs_that_were_not_asked_for_are_refused(name: str, value: Any, tmp_path: Path):
    (last,) = written(tmp_path, "llama", "quantized", [640])
    with pytest.raises(ValueError, match=r"\w"):
        filled("llama", "quantized", [forged(last, lambda tree: tree["codecs"]["1"].update({name: value}))])


def test_blocks_that_leave_no_sinks_are_refused(tmp_path: Path):
    *parts, last = written(tmp_path, "llama", "quantized", [640, 1280])
    with pytest.raises(ValueError, match="20 quantized blocks after 0 tokens"):
        filled("llama", "quantized", [*parts, forged(last, set_all(entries={"full": 0, "packed": 20}))])


def test_a_sparse_node_larger_than_memory_takes_no_memory(tmp_path: Path):
    (last,) = written(tmp_path, "llama", "full", [64])
    states = forged(last, set_all(num_kv_heads=2**15, key_dim=2**15, value_dim=2**15)).states()
    tree, end = dict[str, Any](__metadata__={"states": states.to_json()}), 0
    for index in range(len(states.layers)):
        for role, dims in (("keys", (2**15, GRANULE)), ("values", (GRANULE, 2**15))):
            shape = 1, 1, 2**15, *dims
            offsets = [end, end := end + 4 * math.prod(shape)]
            tree[f"layers.{index}/states.{role}"] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
    tree["checksum"] = {"dtype": "U8", "shape": [4], "data_offsets": [end, end + 4]}
    text = json.dumps(tree).encode()
    header = len(text).to_bytes(8, "little") + text
    with (tmp_path / "sparse").open("wb") as file:
        file.write(header)
        file.seek(len(header) + end)
        file.write(zlib.crc32(header).to_bytes(4, "little"))
    with pytest.raises(HostMemoryError):
        filled("llama", "full", [Written(tmp_path / "sparse", 64)])
