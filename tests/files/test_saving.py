"""A cache that was saved and loaded goes on as the one it was saved from, wherever it lives then; its token ids too."""

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import rule
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

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
    saved_token_ids,
)
from hf_hybrid_cache.cache import contents_of
from hf_hybrid_cache.cache.files import differences
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.codecs import MinMaxCodec
from hf_hybrid_cache.layers import HybridLayer
from hf_hybrid_cache.storage.memory import host_memory
from hf_hybrid_cache.storage.memory.address_space import AddressSpace
from hf_hybrid_cache.storage.memory.host_memory import Limit

from common.caches import CACHES, QUANTIZED
from common.modes import generate
from models.image_models import model_of_images, prompt_with_picture
from models.tiny_models import FAMILIES, random_prompt, tiny_model
from operations.setups import DTYPES, setups
from operations.test_stateful import CacheMachine, run

LLAMA = tiny_model("llama")
MAKERS = CACHES | {name: pair[0] for name, pair in QUANTIZED.items()}
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="files are mapped on Linux")
declines = pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.kv"


@torch.no_grad()
def filled(
    make: Callable[..., HybridCache] | Placement,
    num_tokens: int,
    batch: int = 1,
    model: PreTrainedModel = LLAMA,
    codec: KVCodec | None = None,
) -> HybridCache:
    """Make a cache with a prompt, in a class of caches or a placement."""
    is_class = not isinstance(make, Placement)
    cache = make(model.config) if is_class else HybridCache(model.config, make, codec=codec)
    model(random_prompt(batch, num_tokens), **cache_argument(cache))
    return cache


def continued(model: PreTrainedModel, cache: Cache, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and logits of two questions after the prompts of `filled`."""
    ids = torch.cat([random_prompt(2, num_tokens), random_prompt(2, 3, seed=1)], dim=1)
    sequences, logits = generate(model, ids, cache, max_new_tokens=4)
    return sequences, logits


def assert_goes_on_like(
    original: HybridCache, loaded: HybridCache, num_tokens: int, model: PreTrainedModel = LLAMA
) -> None:
    assert all(map(torch.equal, continued(model, loaded, num_tokens), continued(model, original, num_tokens)))


def is_attended_on_cpu(cache: HybridCache) -> bool:
    return all(layer.is_attended_on_cpu for layer in cache.layers if isinstance(layer, HybridLayer) and layer.store)


def test_loaded_cache_has_memory_up_to_the_end_of_its_last_block(path: Path):
    filled(lambda config: HybridCache(config, codec=minmax(8)), 100).save(path)
    loaded = HybridCache.load(path, LLAMA.config)
    assert [layer.store_in_place().make_place() for layer in contents_of(loaded).ours] == [28] * len(loaded.layers)


@pytest.mark.default("values")
@declines
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_cache_when_continued_then_tokens_and_logits_are_the_same(family: str, name: str, path: Path):
    model, num_tokens = tiny_model(family), 188
    original = filled(MAKERS[name], num_tokens, 2, model)
    original.save(path)
    content = path.read_bytes()
    for mmap in (False, True) if is_attended_on_cpu(original) and "split" not in name else (False,):
        loaded = HybridCache.load(path, model.config, mmap=mmap)
        if mmap:
            assert loaded.memory() == HybridCache.load(path, model.config).memory()
        assert_goes_on_like(copy.deepcopy(original), loaded, num_tokens, model)
    assert path.read_bytes() == content


PLACEMENTS = {
    "device": Placement(cpu_decode=False),
    "streamed": Placement(True, cpu_decode=False),
    "whole": Placement(cpu_decode=True),
    "split": Placement(cpu_decode=True, device_tokens=192),
}


@torch.no_grad()
@pytest.mark.default("values")
@pytest.mark.parametrize("codec", [None, minmax(8, rotate=True), minmax(4)], ids=str)
@pytest.mark.parametrize("before", PLACEMENTS)
def test_file_when_saved_from_any_placement_then_is_loaded_into_any(before: str, codec: KVCodec | None, path: Path):
    question = random_prompt(2, 3, seed=1)
    original = filled(PLACEMENTS[before], 500, batch=2, codec=codec)
    original.save(path)
    caches = {name: HybridCache.load(path, LLAMA.config, each, device="cpu") for name, each in PLACEMENTS.items()}
    assert caches["split"].layers[0].store.ends.num_entries <= 192
    for cache in caches.values():
        for ours, theirs in zip(cache.layers, original.layers, strict=True):
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)
    if codec is None:  # with codes, the place of tokens decides which are quantized next
        expected = LLAMA(question, **cache_argument(original)).logits
        for cache in caches.values():
            torch.testing.assert_close(LLAMA(question, **cache_argument(cache)).logits, expected, rtol=1e-3, atol=1e-3)


NOT_THERE = r"layer 0 is not\. Pass placement=Placement\(cpu_decode=True\)"


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("whole", "split", "without device_tokens, or mmap=False"),
        ("device", "device", NOT_THERE),
        ("streamed", None, NOT_THERE),
    ],
)
def test_layers_that_cannot_be_mapped_are_refused(before: str, after: str | None, reason: str, path: Path):
    filled(PLACEMENTS[before], 10).save(path)
    options = {} if after is None else {"placement": PLACEMENTS[after]}
    with pytest.raises(CacheFileError, match=reason):
        HybridCache.load(path, LLAMA.config, mmap=True, **options)


def test_empty_cache_when_loaded_then_has_its_placement_and_length(path: Path):
    original = HybridCache(LLAMA.config, Placement(True, 2, False, 0.5, 300), 5000)
    original.save(path)
    loaded = HybridCache.load(path, LLAMA.config)
    assert loaded._stores.placement == original._stores.placement
    assert loaded._stores.capacity == original._stores.capacity
    assert loaded.get_seq_length() == 0


def test_a_codec_of_quanto_is_saved_and_loaded(path: Path):
    pytest.importorskip("optimum.quanto")
    original = filled(Placement(), 300, batch=2, codec=quanto(2, 128))
    original.save(path)
    assert_goes_on_like(original, HybridCache.load(path, LLAMA.config), 300)


def test_a_codec_without_a_description_is_refused_and_no_file_is_written(path: Path):
    keys, values = MinMaxCodec(4, 64, per_channel=True), MinMaxCodec(4, 32, per_channel=False)
    with pytest.raises(CacheFileError, match="no way to describe"):
        HybridCache(LLAMA.config, codec=KVCodec(keys, values)).save(path)
    assert not list(path.parent.iterdir())


def test_a_layer_that_holds_what_cannot_be_saved_is_refused_by_name(path: Path):
    cache, twins = (
        filled(DynamicHybridCache, 70, model=tiny_model("qwen3_next")),
        {1: torch.ones(1), "1": torch.zeros(1)},
    )
    for window, reason in ((object(), "it holds a object"), (twins, r"two of its tensors are named window\.1")):
        cache.layers[2].window = window
        with pytest.raises(CacheFileError, match=f"LinearAttentionLayer has window, .*: {reason}"):
            cache.save(path)
    assert not list(path.parent.iterdir())


def test_safetensors_finds_the_states_of_tokens_that_were_not_removed(path: Path):
    cache = filled(DynamicHybridCache, 100)
    cache.crop(-20)
    cache.save(path, random_prompt(1, 80))
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == "hf_hybrid_cache"
        keys, ids = file.get_tensor("layers.2/states.keys"), file.get_tensor("token_ids/ids")
    tokens = keys.permute(1, 2, 0, 4, 3).flatten(2, 3)
    assert torch.equal(tokens[:, :, :80], cache.layers[2].keys)
    assert not tokens[:, :, 80:].any()
    assert torch.equal(ids, random_prompt(1, 80).int())


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_a_cache_saved_and_loaded_in_inference_mode_is_used_outside(family: str, path: Path):
    model = tiny_model(family)
    with torch.inference_mode():
        filled(QuantizedHybridCache, 200, 2, model).save(path)
        loaded = HybridCache.load(path, model.config, mmap=True)
    assert_goes_on_like(HybridCache.load(path, model.config), loaded, 200, model)


def test_file_that_host_memory_cannot_hold_is_refused_and_can_be_mapped(path: Path, monkeypatch: pytest.MonkeyPatch):
    original = filled(DynamicHybridCache, 130, batch=2)
    original.save(path)
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "tightest_limit", lambda: Limit(1000, ""))
        with pytest.raises(HostMemoryError, match="130 tokens need"):
            HybridCache.load(path, LLAMA.config)
        assert HybridCache.load(path, LLAMA.config, mmap=True).get_seq_length() == 130
    # Where files cannot be mapped they are read.
    monkeypatch.setattr(AddressSpace, "map_file", lambda *arguments: False)
    assert_goes_on_like(original, HybridCache.load(path, LLAMA.config, mmap=True), 130)


# Token ids


def test_token_ids_are_kept_and_compared(path: Path):
    ids = random_prompt(2, 70)
    cache = filled(QuantizedHybridCache, 70, batch=2)
    cache.save(path, ids)
    assert torch.equal(saved_token_ids(path), ids)
    HybridCache.load(path, LLAMA.config, token_ids=torch.cat([ids, ids], dim=1))
    other = ids.clone()
    other[1, 33] += 1
    other[0, 34] += 1  # the earliest position is told
    with pytest.raises(CacheFileError, match=rf"token 33 of sequence 1 is {ids[1, 33]} in the file and {other[1, 33]}"):
        HybridCache.load(path, LLAMA.config, token_ids=other)
    for unlike in (ids[:, :69], ids[:1], ids[0]):
        with pytest.raises(CacheFileError, match=r"holds \[2, 70\] tokens"):
            HybridCache.load(path, LLAMA.config, token_ids=unlike)
    cache.save(path)
    assert saved_token_ids(path) is None
    with pytest.raises(CacheFileError, match="no token ids to compare with"):
        HybridCache.load(path, LLAMA.config, token_ids=ids)


IDS = random_prompt(1, 10)
OF_IDS, OF_DOCUMENT = r"must be integers \[batch, ", "must be an integer from 1 to the 10 stored tokens"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        *(((ids,), OF_IDS) for ids in (IDS[:, :9], IDS[0, :9], IDS.float())),
        *(((IDS, document_tokens), OF_DOCUMENT) for document_tokens in (0, 11, True)),
        ((None, 5), "goes with token_ids"),
    ],
)
def test_token_ids_that_are_not_those_of_the_tokens_are_refused(arguments: tuple[Any, ...], reason: str, path: Path):
    with pytest.raises(ValueError, match=reason):
        filled(DynamicHybridCache, 10).save(path, *arguments)


def test_rope_factor_when_repeated_in_config_then_is_no_difference():
    rotation = {"rope_type": "default", "partial_rotary_factor": 0.25}
    twice, once = {"rope_parameters": rotation, "partial_rotary_factor": 0.25}, {"rope_parameters": rotation}
    assert not differences(twice, once)
    assert not differences(once, twice)
    assert differences(twice, {"rope_parameters": rotation | {"partial_rotary_factor": 0.5}})
    assert differences({"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 0.5})


# Positions that go on from a picture, by an offset that the model keeps itself


def test_save_when_positions_go_on_from_a_picture_then_is_refused(path: Path):
    model, prompt, text = model_of_images(), prompt_with_picture(), torch.arange(40, 60)[None]
    ours, stock = DynamicHybridCache(model.config), DynamicCache(config=model.config)

    @torch.inference_mode()
    def answered(cache: Cache, model: Any = model, **given: Any) -> torch.Tensor:
        return model.generate(**given, **cache_argument(cache), max_new_tokens=6, do_sample=False)

    stored = [answered(cache, **prompt) for cache in (stock, ours)][-1]
    assert int(model.model.rope_deltas) < 0
    twin = copy.deepcopy(ours)
    for each in (ours, twin):
        with pytest.raises(CacheFileError, match=r"rope_deltas.*copy\.deepcopy"):
            each.save(path)
    assert not list(path.parent.iterdir())
    longer = torch.cat([stored, text], dim=1)
    assert torch.equal(answered(twin, input_ids=longer), answered(stock, input_ids=longer))
    # Without a picture a new model goes on.
    ours.reset()
    longer = torch.cat([answered(ours, input_ids=text), text], dim=1)
    ours.save(path)
    again = HybridCache.load(path, model.config)
    assert torch.equal(answered(again, model_of_images(), input_ids=longer), answered(ours, input_ids=longer))


# Caches after sequences of operations


class Reloaded(CacheMachine):
    """A machine that goes on with what was loaded, read or mapped, and is as it was."""

    folder: Path

    @rule(mmap=st.booleans())
    def reload(self, mmap: bool) -> None:
        path, before = self.folder / "cache.kv", self.ours
        try:
            before.save(path)
            self.content = path.read_bytes()
            self.ours = HybridCache.load(path, self.setup.config, mmap=mmap)
        except CacheFileError as error:
            # Codecs whose grouping is swapped; layers that no kernel attends to.
            assert "no way to describe" in str(error) or (mmap and "mmap=False" in str(error))  # noqa: PT017
            return
        assert self.ours.codecs == before.codecs
        if not self.setup.is_shard:
            assert self.ours._stores.placement == before._stores.placement
        self.kept = {}  # a file has no checkpoints

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "content"):
            assert (self.folder / "cache.kv").read_bytes() == self.content


@pytest.mark.soak
@declines
@pytest.mark.parametrize("is_quantized", [False, True])
def test_any_sequence_of_operations_with_files_between_leaves_the_same(is_quantized: bool, tmp_path: Path):
    of_any_type = st.sampled_from(DTYPES).flatmap(lambda dtype: setups(dtype, is_quantized))
    run(Reloaded, examples=5, folder=tmp_path, setups=of_any_type)


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
def test_save_and_mmap_when_cache_is_large_then_memory_is_bounded(path: Path):
    command = [sys.executable, "-c", PROGRAM, str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    saved_from_blocks, saved_from_a_device, mapped, read = map(int, done.stdout.split())
    assert saved_from_blocks <= 4
    assert saved_from_a_device <= 8 + 4
    assert mapped <= 4
    assert read >= 60
