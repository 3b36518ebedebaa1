"""Several sequences continue one prompt, whose blocks are stored once and read once."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.cache_utils import Cache

from hf_hybrid_cache import (
    DynamicHybridCache,
    HybridCache,
    OffloadedHybridCache,
    Placement,
    minmax,
)
from hf_hybrid_cache.storage import SharedPrefix

from common.caches import MakeCache, quantized, stock
from common.modes import generate, read
from models.tiny_models import random_prompt, tiny_model

CONFIG = LlamaConfig(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, hidden_size=64, vocab_size=8)
TOKENS = 500


PAIRS: dict[str, tuple[MakeCache, MakeCache]] = {
    "host": (DynamicHybridCache, stock),
    "device": (partial(DynamicHybridCache, cpu_decode=False), stock),
    "streamed": (partial(OffloadedHybridCache, cpu_decode=False), stock),
    "split": (partial(OffloadedHybridCache, cpu_decode=True, device_tokens=192), stock),
    "quantized": quantized(minmax(4, rotate=True)),
    "quantized_from_the_first": quantized(minmax(8, sink_tokens=0, rotate=True)),
    "quantized_split": quantized(minmax(8, rotate=True), Placement(cpu_decode=True, device_tokens=192)),
    "quantized_to_2_bits": quantized(minmax(2, rotate=True)),
}
EACH = pytest.mark.parametrize("kind", [kind for kind in PAIRS if kind != "quantized_to_2_bits"])


def add(caches: tuple[Cache, ...], batch: int, num_tokens: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(batch, 2, num_tokens, 16, generator=generator) for _ in range(2))
    for cache in caches:
        cache.update(keys, values, 0)


def filled(kind: str, batch: int = 1, num_tokens: int = TOKENS) -> tuple[HybridCache, Cache]:
    ours, reference = (make(CONFIG) for make in PAIRS[kind])
    add((ours, reference), batch, num_tokens, seed=0)
    return ours, reference


def continued(kind: str, batch: int = 1, repeats: int = 3) -> tuple[HybridCache, Cache]:
    ours, reference = filled(kind, batch)
    for cache in (ours, reference):
        cache.batch_repeat_interleave(repeats)
    assert is_shared(ours)
    return ours, reference


def is_shared(cache: HybridCache) -> bool:
    return isinstance(cache.layers[0].store, SharedPrefix)


def require_same(ours: HybridCache, reference: Cache) -> None:
    assert ours.get_seq_length() == reference.get_seq_length()
    assert torch.equal(ours.layers[0].keys, reference.layers[0].keys)
    assert torch.equal(ours.layers[0].values, reference.layers[0].values)


@EACH
def test_cropped_anywhere_sequences_have_the_prompt_and_their_own_tokens(kind: str):
    longer = continued(kind)
    add(longer, 3, 100, seed=1)
    require_same(*longer)
    for left in (0, 1, 64, 127, 129, 192, 383, 449, TOKENS, TOKENS + 70):
        caches = copy.deepcopy(longer)
        for cache in caches:
            cache.crop(left - TOKENS - 100)
        if left:
            require_same(*caches)
        # Tokens of a block that was cut in host memory go on on the device, so they are quantized later.
        is_quantized_alike = (kind, left) != ("quantized_split", 127)
        add(caches, 3, 150 if is_quantized_alike else 1, seed=2)
        require_same(*caches)
    require_same(*longer)


@EACH
def test_selected_repeated_and_copied_sequences_keep_their_prompt(kind: str):
    longer = continued(kind, batch=2)
    add(longer, 6, 100, seed=1)
    for indices in ([0, 0, 2, 4, 5, 5], [1], [4, 1, 4, 1]):
        caches = copy.deepcopy(longer)
        for cache in caches:
            cache.batch_select_indices(torch.tensor(indices))
        require_same(*caches)
        add(caches, len(indices), 70, seed=2)
        for cache in caches:
            cache.batch_repeat_interleave(2)
        require_same(*caches)
        assert is_shared(caches[0])
        for cache in caches:
            cache.crop(-300)
        add(caches, 2 * len(indices), 70, seed=3)
        require_same(*caches)
    require_same(*longer)


@pytest.mark.parametrize("kind", PAIRS)
def test_states_of_continuations_that_are_set_are_those_of_a_new_layer(kind: str):
    ours, reference = continued(kind)
    add((ours, reference), 3, 10, seed=1)
    keys, values = ours.layers[0].keys.clone(), ours.layers[0].values
    keys[:, :, 192] = 0
    ours.layers[0].set(keys, values)
    reference.crop(-TOKENS - 10)
    reference.update(keys, values, 0)
    add((ours, reference), 3, 1, seed=2)
    require_same(ours, reference)


def test_edit_that_continuations_cannot_store_then_changes_nothing():
    ours, reference = continued("quantized")
    keys, values = ours.layers[0].keys.clone(), ours.layers[0].values.clone()
    keys[:, :, 300] = torch.nan
    with pytest.raises(ValueError, match="no codes"):
        ours.layers[0].set(keys, values)
    assert ours.get_seq_length() == TOKENS
    add((ours, reference), 3, 1, seed=1)
    assert torch.allclose(ours.layers[0].keys, reference.layers[0].keys, atol=0.2)


@pytest.mark.parametrize("kind", ["host", "streamed", "quantized", "split"])
def test_eight_sequences_take_little_more_memory_than_one_and_read_it_once(kind: str):
    ours, _ = filled(kind, num_tokens=20_000)
    alone = ours.memory()
    ours.batch_repeat_interleave(8)
    shared = ours.memory()
    # Tokens that are not whole blocks of 64, and of quantized layers those not quantized yet, are each one's own.
    of_each = 4 * 2 * 2 * 16 * 192
    assert shared.host_bytes + shared.device_bytes <= alone.host_bytes + alone.device_bytes + 8 * 2 * of_each
    if kind == "streamed":
        ours.stats.clear()
        ours.layers[0].store.prefix.dense.slot = None
        add((ours,), 8, 1, seed=1)
        assert ours.stats.bytes_to_device == 2 * 2 * 16 * 4 * 19_968


@pytest.mark.parametrize("kind", ["host", "quantized"])
def test_a_mapped_prompt_is_continued_without_being_copied(kind: str, tmp_path: Path):
    ours, reference = filled(kind)
    ours.save(tmp_path / "cache.kv")
    mapped = HybridCache.load(tmp_path / "cache.kv", CONFIG, mmap=True)
    keys = mapped.layers[0].store.buffers()
    before = [buffer.stored_rows(1).data_ptr() for buffer in keys]
    for cache in (mapped, reference):
        cache.batch_repeat_interleave(3)
    assert [buffer.stored_rows(1).data_ptr() for buffer in mapped.layers[0].store.prefix.buffers()] == before
    add((mapped, reference), 3, 150, seed=1)
    require_same(mapped, reference)
    mapped.save(tmp_path / "three.kv")
    require_same(HybridCache.load(tmp_path / "three.kv", CONFIG, mmap=True), reference)


@pytest.mark.parametrize("options", [{"num_beams": 4}, {"num_return_sequences": 3, "do_sample": True}], ids=str)
def test_generate_continues_one_stored_sequence_by_several(options: dict[str, object]):
    model, ids = tiny_model("llama"), random_prompt(1, 300)
    results = []
    for make in PAIRS["quantized_from_the_first"]:
        cache = make(model.config)
        read(model, ids[:, :-4], cache)
        if isinstance(cache, HybridCache):
            ours = cache
        else:  # transformers' cache ends in an error without this
            cache.batch_repeat_interleave(4 if "num_beams" in options else 3)
        torch.manual_seed(0)
        results.append(generate(model, ids, cache, **options))
    assert is_shared(ours)
    assert torch.equal(results[0][0], results[1][0])


def test_a_short_prompt_is_copied():
    ours, reference = filled("host", num_tokens=127)
    for cache in (ours, reference):
        cache.batch_repeat_interleave(2)
    assert not is_shared(ours)
    require_same(ours, reference)


def test_sequences_that_are_no_continuations_of_one_are_refused():
    ours, _ = filled("host", batch=2)
    with pytest.raises(ValueError, match="batch_repeat_interleave"):
        add((ours,), 4, 1, seed=1)
