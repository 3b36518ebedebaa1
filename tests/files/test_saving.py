"""A cache that was saved and loaded goes on as the one it was saved from, wherever it lives then."""

import copy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis.stateful import rule, run_state_machine_as_test
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_hybrid_cache import (
    CacheFileError,
    DynamicHybridCache,
    HostMemoryError,
    HybridCache,
    KVCodec,
    Placement,
    QuantizedHybridCache,
    minmax,
    quanto,
)
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.codecs import MinMaxCodec
from hf_hybrid_cache.files.tensor_file import NewFile, Section, TensorFile, TensorForm
from hf_hybrid_cache.layers import HybridLayer
from hf_hybrid_cache.storage.memory import host_memory
from hf_hybrid_cache.storage.memory.address_space import AddressSpace
from hf_hybrid_cache.storage.memory.host_memory import Limit

from common.caches import CACHES, QUANTIZED
from common.soak import search_at_random
from models.tiny_models import FAMILIES, random_prompt, tiny_model
from operations.test_stateful import CONFIG, CacheMachine, QuantizedCacheMachine

MAKERS = CACHES | {name: pair[0] for name, pair in QUANTIZED.items()}
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="files are mapped on Linux")
declines = pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")


@torch.no_grad()
def filled(model: PreTrainedModel, make, num_tokens: int, batch: int = 1) -> HybridCache:
    cache = make(model.config)
    model(random_prompt(batch, num_tokens), **cache_argument(cache))
    return cache


def continued(model: PreTrainedModel, cache: Cache, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and logits of two questions after the prompts of `filled`."""
    ids = torch.cat([random_prompt(2, num_tokens), random_prompt(2, 3, seed=1)], dim=1)
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **cache_argument(cache), **options)
    return output.sequences, torch.stack(output.logits)


def is_attended_on_cpu(cache: HybridCache) -> bool:
    return all(layer.is_attended_on_cpu for layer in cache.layers if isinstance(layer, HybridLayer) and layer.store)


def assert_goes_on_like(model: PreTrainedModel, loaded: HybridCache, original: HybridCache, num_tokens: int) -> None:
    assert all(map(torch.equal, continued(model, loaded, num_tokens), continued(model, original, num_tokens)))


@pytest.mark.covering(1)
@declines
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_cache_when_continued_then_tokens_and_logits_are_the_same(family: str, name: str, tmp_path: Path):
    model, path, num_tokens = tiny_model(family), tmp_path / "cache.kv", 188
    original = filled(model, MAKERS[name], num_tokens, batch=2)
    original.save(path)
    content = path.read_bytes()
    for mmap in (False, True) if is_attended_on_cpu(original) and "split" not in name else (False,):
        loaded = HybridCache.load(path, model.config, mmap=mmap)
        assert_goes_on_like(model, loaded, copy.deepcopy(original), num_tokens)
    assert path.read_bytes() == content


PLACEMENTS = {
    "device": Placement(cpu_decode=False),
    "streamed": Placement(True, cpu_decode=False),
    "whole": Placement(cpu_decode=True),
    "split": Placement(cpu_decode=True, device_tokens=192),
}


@torch.no_grad()
@pytest.mark.parametrize("codec", [None, minmax(8, rotate=True), minmax(4)], ids=str)
@pytest.mark.parametrize("before", PLACEMENTS)
def test_file_when_saved_from_any_placement_then_is_loaded_into_any(before: str, codec: KVCodec | None, tmp_path: Path):
    model, path, question = tiny_model("llama"), tmp_path / "cache.kv", random_prompt(2, 3, seed=1)
    original = filled(model, lambda config: HybridCache(config, PLACEMENTS[before], codec=codec), 500, batch=2)
    original.save(path)
    caches = {name: HybridCache.load(path, model.config, each, device="cpu") for name, each in PLACEMENTS.items()}
    assert caches["split"].layers[0].store.ends.num_entries <= 192
    for cache in caches.values():
        for ours, theirs in zip(cache.layers, original.layers, strict=True):
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)
    if codec is None:  # with codes, the place of tokens decides which are quantized next
        expected = model(question, **cache_argument(original)).logits
        for cache in caches.values():
            torch.testing.assert_close(model(question, **cache_argument(cache)).logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("before", "options", "reason"),
    [
        ("whole", {"placement": PLACEMENTS["split"]}, "without device_tokens, or mmap=False"),
        (
            "device",
            {"placement": PLACEMENTS["device"]},
            r"layer 0 is not\. Pass placement=Placement\(cpu_decode=True\)",
        ),
        ("streamed", {}, r"layer 0 is not\. Pass placement=Placement\(cpu_decode=True\)"),
    ],
)
def test_layers_that_cannot_be_mapped_are_refused(before: str, options: dict[str, Any], reason: str, tmp_path: Path):
    model, path = tiny_model("llama"), tmp_path / "cache.kv"
    filled(model, lambda config: HybridCache(config, PLACEMENTS[before]), 10).save(path)
    with pytest.raises(CacheFileError, match=reason):
        HybridCache.load(path, model.config, mmap=True, **options)


@torch.no_grad()
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 127, 128, 150, 191, 192, 193, 300])
@pytest.mark.parametrize(
    ("bits", "dtype"), [(None, torch.bfloat16), (8, torch.float32), (4, torch.bfloat16), (2, torch.float32)]
)
def test_cache_of_any_length_when_saved_then_goes_on_as_if_it_was_not(
    bits: int | None, dtype: torch.dtype, num_tokens: int, tmp_path: Path
):
    model = tiny_model("llama", dtype)
    make = partial(QuantizedHybridCache, bits=bits) if bits else DynamicHybridCache
    cache = filled(model, make, num_tokens)
    cache.save(tmp_path / "cache.kv")
    loaded = HybridCache.load(tmp_path / "cache.kv", model.config)
    pieces = random_prompt(1, 200, seed=1).split([1, 66, 133], dim=1)
    logits = [[model(piece, **cache_argument(each)).logits for piece in pieces] for each in (cache, loaded)]
    assert loaded.codecs == cache.codecs
    assert all(map(torch.equal, *logits))


@pytest.mark.parametrize("bits", [8, 4, 2, (4, 2)])
@pytest.mark.parametrize("options", [(), (16,), (32, 0), (64, 128, False)])
def test_load_when_saved_with_placement_and_codecs_then_restores_both(
    bits: int | tuple[int, int], options: tuple[Any, ...], tmp_path: Path
):
    model, path = tiny_model("llama"), tmp_path / "cache.kv"
    codecs = {1: minmax(bits, *options), 3: minmax((8, 4))}
    original = HybridCache(model.config, Placement(True, 2, 1, None, [1, 3]), 5000, codecs)
    original.save(path)
    loaded = HybridCache.load(path, model.config)
    assert loaded._stores.placement == original._stores.placement
    assert loaded._stores.codecs == original._stores.codecs
    assert loaded._stores.capacity == original._stores.capacity
    assert loaded.get_seq_length() == 0


def test_a_codec_of_quanto_is_saved_and_loaded(tmp_path: Path):
    pytest.importorskip("optimum.quanto")
    codec = quanto(2, 128)
    model, path = tiny_model("llama"), tmp_path / "cache.kv"
    original = filled(model, lambda config: HybridCache(config, codec=codec), 300, batch=2)
    original.save(path)
    assert_goes_on_like(model, HybridCache.load(path, model.config), original, 300)


def test_a_codec_without_a_description_is_refused_and_no_file_is_written(tmp_path: Path):
    keys = MinMaxCodec(4, 64, per_channel=True)
    cache = HybridCache(tiny_model("llama").config, codec=KVCodec(keys, MinMaxCodec(4, 32, per_channel=False)))
    with pytest.raises(CacheFileError, match="no way to describe"):
        cache.save(tmp_path / "cache.kv")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("window", "reason"),
    [
        (object(), "it holds a object"),
        ({1: torch.ones(1), "1": torch.zeros(1)}, r"two of its tensors are named window\.1"),
    ],
    ids=["object", "two names"],
)
def test_a_layer_that_holds_what_cannot_be_saved_is_refused_by_name(window: object, reason: str, tmp_path: Path):
    cache = filled(tiny_model("gemma3"), DynamicHybridCache, 70)
    cache.layers[2].window = window
    with pytest.raises(CacheFileError, match=f"DynamicSlidingWindowLayer has window, .*: {reason}"):
        cache.save(tmp_path / "cache.kv")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mmap", [False, pytest.param(True, marks=needs_linux)])
@pytest.mark.parametrize("codec", [None, minmax(4)], ids=str)
def test_index_of_keys_of_an_earlier_version_is_skipped(codec: KVCodec | None, mmap: bool, tmp_path: Path):
    model, path, num_tokens = tiny_model("llama"), tmp_path / "cache.kv", 500
    original = filled(model, lambda config: HybridCache(config, codec=codec), num_tokens, batch=2)
    original.save(path)
    with_index = tmp_path / "index.kv"
    with TensorFile(path, path.open("rb", buffering=0)) as file, with_index.open("wb") as new:
        sections = [copied_section(file, name) for name in file.sections]
        index = {"index.1/blocks": TensorForm("uint8", (5, 2, 2, 3))}  # packed blocks of two sequences and two KV heads
        sections.append(Section("index.1", index, lambda: [[bytes(60)]]))
        metadata = {name: text for name, text in file.metadata.items() if not name.startswith("checksum ")}
        NewFile(metadata, sections).write(new)
    loaded = HybridCache.load(with_index, model.config, mmap=mmap)
    assert_goes_on_like(model, loaded, copy.deepcopy(original), num_tokens)
    loaded.save(with_index)
    with TensorFile(with_index, with_index.open("rb", buffering=0)) as file:
        assert "index.1" not in file.sections


def copied_section(file: TensorFile, name: str) -> Section:
    forms = {each: placed.form for each, placed in file.tensors(name).items()}
    data = {each: bytearray(form.num_bytes) for each, form in forms.items()}
    file.read(name, {each: memoryview(content) for each, content in data.items()})
    return Section(name, forms, lambda: ([content] for content in data.values()))


def test_safetensors_finds_the_states_of_tokens_that_were_not_removed(tmp_path: Path):
    cache, path = filled(tiny_model("llama"), DynamicHybridCache, 100), tmp_path / "cache.kv"
    cache.crop(-20)
    cache.save(path, random_prompt(1, 80))
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == "hf_hybrid_cache"
        keys, ids = file.get_tensor("layers.2/states.keys"), file.get_tensor("token_ids/ids")
    tokens = keys.permute(1, 2, 0, 4, 3).flatten(2, 3)
    assert torch.equal(tokens[:, :, :80], cache.layers[2].keys)
    assert not tokens[:, :, 80:].any()
    assert torch.equal(ids, random_prompt(1, 80).int())


def test_a_file_may_be_replaced_by_the_cache_that_is_mapped_from_it(tmp_path: Path):
    model, path = tiny_model("llama"), tmp_path / "cache.kv"
    original = filled(model, DynamicHybridCache, 130, batch=2)
    original.save(path)
    for _ in range(2):
        mapped = HybridCache.load(path, model.config, mmap=True)
        assert mapped.memory() == HybridCache.load(path, model.config).memory()
        mapped.save(path)
    assert_goes_on_like(model, HybridCache.load(path, model.config, mmap=True), original, 130)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_a_cache_saved_and_loaded_in_inference_mode_is_used_outside(family: str, tmp_path: Path):
    model, path = tiny_model(family), tmp_path / "cache.kv"
    with torch.inference_mode():
        original = filled(model, QuantizedHybridCache, 200, batch=2)
        original.save(path)
        loaded = HybridCache.load(path, model.config, mmap=True)
    assert_goes_on_like(model, loaded, HybridCache.load(path, model.config), 200)


def test_file_that_host_memory_cannot_hold_is_refused_and_can_be_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model, path = tiny_model("llama"), tmp_path / "cache.kv"
    filled(model, DynamicHybridCache, 130).save(path)
    monkeypatch.setattr(host_memory, "tightest_limit", lambda: Limit(1000, ""))
    with pytest.raises(HostMemoryError, match="130 tokens need"):
        HybridCache.load(path, model.config)
    assert HybridCache.load(path, model.config, mmap=True).get_seq_length() == 130


def test_where_files_cannot_be_mapped_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, path = tiny_model("llama"), tmp_path / "cache.kv"
    original = filled(model, DynamicHybridCache, 130, batch=2)
    original.save(path)
    monkeypatch.setattr(AddressSpace, "map_file", lambda *arguments: False)
    assert_goes_on_like(model, HybridCache.load(path, model.config, mmap=True), original, 130)


# Caches after sequences of operations


class Reloaded:
    """Rules that a machine of operations gets besides: from then on it works on what was loaded."""

    folder: Path
    mmap: bool

    @rule()
    def reload(self) -> None:
        path = self.folder / "cache.kv"
        self.ours.save(path)
        self.ours = HybridCache.load(path, CONFIG, mmap=self.mmap)
        self.content = path.read_bytes()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "content"):
            assert (self.folder / "cache.kv").read_bytes() == self.content


@pytest.mark.soak
@declines
@pytest.mark.usefixtures("exact_kernels")
@pytest.mark.parametrize(
    ("kind", "variant", "mmap"),
    [
        (CacheMachine, "dynamic", False),
        (CacheMachine, "offloaded_partly", False),
        (CacheMachine, "default", True),
        (QuantizedCacheMachine, "quantized_streamed", False),
        (QuantizedCacheMachine, "quantized_8", True),
        (QuantizedCacheMachine, "quantized_2", False),
    ],
)
def test_any_sequence_of_operations_with_files_between_leaves_the_same(kind, variant: str, mmap: bool, tmp_path: Path):
    machine = type("Machine", (Reloaded, kind), {"variant": variant, "folder": tmp_path, "mmap": mmap})
    run_state_machine_as_test(machine, settings=search_at_random(6, 100, stateful_step_count=15))


# Memory


PROGRAM = """
import re, sys, threading, torch
from pathlib import Path
from transformers import LlamaConfig
from hf_hybrid_cache import DynamicHybridCache, HybridCache, Placement

def mebibytes(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024

# 64 MiB in 8 layers.
config, path = LlamaConfig(num_hidden_layers=8, num_attention_heads=8, hidden_size=512), Path(sys.argv[1])
states = torch.ones(1, 8, 2048, 64)
# What is on a device is in another layout than a file; here the device is the CPU.
for cpu_decode in (True, False):
    cache = DynamicHybridCache(config, cpu_decode=cpu_decode)
    for layer in range(8):
        cache.update(states, states, layer)
    cache.save(path)
    for thread in threading.enumerate():  # which take memory too
        if thread.name.startswith("compile"):
            thread.join()
    Path("/proc/self/clear_refs").write_text("5")
    before = mebibytes("VmRSS")
    cache.save(path)
    print(mebibytes("VmHWM") - before)
for mmap in (True, False):
    before = mebibytes("RssAnon")
    cache = HybridCache.load(path, config, Placement(cpu_decode=True), mmap=mmap)
    print(mebibytes("RssAnon") - before)
"""


@needs_linux
def test_save_and_mmap_when_cache_is_large_then_memory_is_bounded(tmp_path: Path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "cache.kv")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    saved_from_blocks, saved_from_a_device, mapped, read = map(int, done.stdout.split())
    assert saved_from_blocks <= 4
    assert saved_from_a_device <= 8 + 4
    assert mapped <= 4
    assert read >= 60
