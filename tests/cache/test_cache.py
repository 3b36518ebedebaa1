"""Memory, flags, operations and refusals of the caches. That they hold the right states tells tests/operations."""

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache

from hf_hybrid_cache import (
    DynamicHybridCache,
    HostMemoryError,
    HybridCache,
    OffloadedHybridCache,
    QuantizedHybridCache,
)
from hf_hybrid_cache.storage import SplitStore
from hf_hybrid_cache.storage.memory import host_memory
from hf_hybrid_cache.storage.memory.host_memory import Limit

from common import modes
from common.caches import CACHES, CHOOSING, QUANTIZED
from models.tiny_models import gemma3, llama, random_prompt, tiny_model

CONFIG = llama()
SHAPE = (2, 2, 5, 16)
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
ALL: dict[str, Callable[[PreTrainedConfig], HybridCache]] = {
    **CACHES,
    **CHOOSING,
    **{name: ours for name, (ours, _) in QUANTIZED.items()},
}


def fill(cache: Cache, shape: tuple[int, ...] = SHAPE) -> Cache:
    for layer in range(len(cache)):
        cache.update(torch.ones(shape), torch.ones(shape), layer)
    return cache


def read(cache: HybridCache, num_tokens: int, batch: int = 1, family: str = "llama") -> torch.Tensor:
    """Let a model read a prompt; return its logits."""
    return modes.read(tiny_model(family), random_prompt(batch, num_tokens), cache)


@pytest.fixture(params=CACHES)
def cache(request: pytest.FixtureRequest) -> HybridCache:
    return CACHES[request.param](CONFIG)


# Memory


@pytest.mark.parametrize("make", [DynamicHybridCache, CACHES["dynamic"], CACHES["offloaded"]])
def test_memory_is_that_of_whole_blocks_and_of_staging_slots(make: Callable[..., HybridCache]):
    cache = fill(make(CONFIG))
    slots = [slot for staging in cache._stores.stagings.values() for slot in staging.slots]
    staged = sum(slot.keys.num_bytes + slot.values.num_bytes for slot in slots)
    report = cache.memory()
    assert (report.device_bytes, report.num_tokens) == (0, 5)
    assert report.host_bytes == 64 * 4 * TOKEN_BYTES + staged == 5 * report.bytes_per_token
    assert (staged > 0) == (make is CACHES["offloaded"])


@pytest.mark.parametrize("make", [DynamicHybridCache, OffloadedHybridCache, QuantizedHybridCache])
def test_host_memory_when_within_model_context_then_never_moves(make: type[HybridCache]):
    config = llama()
    config.num_hidden_layers, config.num_key_value_heads, config.max_position_embeddings = 1, 1, 131_072
    cache, places = make(config, cpu_decode=True), set()
    for num_tokens in (700, 130_372, 1):
        states = torch.ones(1, 1, num_tokens, 16)
        cache.update(states, states, 0)
        store = cache.layers[0].store
        places.add(tuple(buffer.stored_rows(1).data_ptr() for buffer in (store.packed or store.dense).buffers()))
    assert cache.get_seq_length() == 131_073
    assert len(places) == 1


def bytes_of(buffers: list[weakref.ref]) -> int:
    return sum(buffer.num_bytes for reference in buffers if (buffer := reference()) is not None)


@pytest.mark.default("values")
@pytest.mark.parametrize("operation", ["reset", "to", "repeat and reset", "drop"])
@pytest.mark.parametrize("place", sorted(ALL))
def test_all_buffers_are_gone_at_once_after_a_reset_or_a_move(place: str, operation: str):
    cache = ALL[place](CONFIG)
    for num_tokens in (300, 1):
        read(cache, num_tokens)
    if operation == "repeat and reset":
        cache.batch_repeat_interleave(2)
    before = [weakref.ref(buffer) for layer in cache.layers for buffer in layer.buffers()]
    if operation != "to":  # slots are shared, and stay for the next states
        before += [weakref.ref(slot.keys) for staging in cache._stores.stagings.values() for slot in staging.slots]
    assert bytes_of(before) > 0
    gc.disable()
    try:
        if operation == "to":
            cache.to(torch.bfloat16)
        elif operation == "drop":
            cache.layers.clear()
            del cache
        else:
            cache.reset()
        assert bytes_of(before) == 0
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:Host memory will end")
def test_a_copy_asks_only_for_what_it_adds(cache: HybridCache, monkeypatch: pytest.MonkeyPatch):
    twin = copy.deepcopy(fill(cache, (2, 2, 640, 16)))
    # Less than half of what the copy holds.
    monkeypatch.setattr(host_memory, "tightest_limit", lambda: Limit(300 * 4 * TOKEN_BYTES, ""))
    assert fill(twin, (2, 2, 1, 16)).get_seq_length() == 641
    assert cache.get_seq_length() == 640


# What a cache says and does


def test_a_cache_tells_of_itself_what_stock_tells(cache: HybridCache):
    stock = DynamicCache(config=CONFIG)
    for ours, theirs in zip(fill(cache), fill(stock), strict=True):
        assert all(torch.equal(*pair) for pair in zip(ours[:2], theirs[:2], strict=True))
        assert ours[2] is theirs[2] is None
    for name in ("is_compileable", "is_sliding", "is_initialized"):
        assert getattr(cache, name) == getattr(stock, name)
    assert cache.is_croppable
    assert cache.get_max_length() == -1
    assert cache.get_mask_sizes(3, 0) == stock.get_mask_sizes(3, 0) == (8, 0)
    cache.activate_past_recording()
    assert cache.get_seq_length() == 5


def test_sequences_and_numbers_are_named_as_torch_allows_it(cache: HybridCache):
    fill(cache, (4, 2, 5, 16))
    cache.batch_select_indices(torch.tensor([True, False, True, True]))
    cache.batch_select_indices(torch.tensor([-1, 0]))
    assert cache.layers[0].keys.shape[0] == 2
    cache.crop(torch.tensor(-2))
    assert type(cache.get_seq_length()) is int
    assert fill(cache).get_seq_length() == 8


def test_operations_on_an_empty_cache_do_nothing(cache: HybridCache):
    cache.crop(-3)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_select_indices(torch.tensor([0]))
    cache.reset()
    cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
    assert cache.is_initialized
    assert cache.memory().host_bytes == 0 == cache.get_seq_length()
    assert fill(cache).get_seq_length() == 5


def test_keys_and_values_may_differ_in_dtype_and_width(cache: HybridCache):
    keys, values = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 8).bfloat16()
    if cache._stores.placement.cpu_decode not in (None, False):
        with pytest.raises(ValueError, match=r"cpu_decode needs keys and values of one type.*32 and torch.bfloat16"):
            cache.update(keys, values, 0)
        return
    cache.update(keys, values, 0)
    ours = cache.update(keys, values, 0)
    assert torch.equal(ours[0], torch.cat([keys, keys], dim=2))
    assert torch.equal(ours[1], torch.cat([values, values], dim=2))


# What is refused


def test_states_that_do_not_fit_are_refused_and_nothing_is_stored(cache: HybridCache):
    fill(cache)
    for shape in ((3, 2, 1, 16), (2, 4, 1, 16), (2, 2, 1, 8), SHAPE):
        states = torch.ones(shape, dtype=torch.bfloat16 if shape == SHAPE else torch.float32)
        message = r"Layer 1 holds 5 tokens of batch 2, 2 KV heads, head_dim 16, .*float32.*new states are"
        with pytest.raises(ValueError, match=message):
            cache.update(states, states, 1)
    for keys, values in ((torch.ones(2, 2, 3, 16), torch.ones(2, 2, 4, 16)), torch.ones(2, 2, 3, 16)):
        with pytest.raises(ValueError, match="Keys and values must be"):
            cache.update(keys, values, 1)
    assert cache.get_seq_length(1) == 5


REFUSED = {
    "crop to a length": (lambda cache: cache.crop(5), ValueError, r"To keep 5 of 20 tokens, use crop\(-15\)"),
    "beams that are not there": (lambda cache: cache.reorder_cache(torch.tensor([0, 5])), IndexError, None),
    "sequences that are not there": (lambda cache: cache.batch_select_indices([7]), IndexError, None),
    "a mask of another length": (lambda cache: cache.batch_select_indices(torch.ones(3, dtype=bool)), IndexError, None),
    "negative repeats": (lambda cache: cache.batch_repeat_interleave(-1), ValueError, None),
    "states of another width": (lambda cache: cache.update(*torch.ones(2, 3, 2, 1, 8), 1), ValueError, None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_operation_on_all_layers_when_one_refuses_it_then_none_has_changed(name: str):
    untouched, cache = OffloadedHybridCache(gemma3()), OffloadedHybridCache(gemma3())
    operation, error, message = REFUSED[name]
    # Beyond the window transformers' layers refuse any crop, and say another reason.
    batch, num_tokens = (1 if name == "states of another width" else 2), (20 if name == "crop to a length" else 10)
    for each in (untouched, cache):
        read(each, num_tokens, batch, "gemma3")
    with pytest.raises(error, match=message):
        operation(cache)
    assert torch.equal(*(read(each, 1, batch, "gemma3") for each in (untouched, cache)))


def test_states_that_need_gradients_are_refused_but_not_without_grad_mode(cache: HybridCache):
    states = torch.ones(SHAPE, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"under torch\.no_grad\(\) .* train with transformers' DynamicCache"):
        cache.update(states, states, 0)
    with torch.no_grad():
        cache.update(states, states, 0)
    assert not cache.layers[0].keys.requires_grad


@pytest.mark.parametrize("name", ALL)
def test_a_context_that_cannot_fit_is_refused_before_it_is_stored(name: str, monkeypatch: pytest.MonkeyPatch):
    cache = ALL[name](CONFIG)
    read(cache, 300)
    before, many = cache.memory(), torch.zeros(1, 2, 20_000, 16)
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "tightest_limit", lambda: Limit(0, ""))
        with pytest.raises(HostMemoryError, match=r"tokens .*need.* [\d.]+ GiB more .* 0\.00 GiB are free"):
            cache.update(many, many, 0)
    is_split = isinstance(cache.layers[0].store, SplitStore)  # capacity on the device is taken first, and stays
    assert cache.memory() == before or is_split
    read(cache, 5)
    assert cache.get_seq_length() == 305


def test_repeating_more_than_fits_is_refused_before_anything_changes(cache: HybridCache):
    before = fill(cache).memory()
    with pytest.raises(HostMemoryError, match=r"copies of 5 tokens need"):
        cache.batch_repeat_interleave(2**40)
    assert cache.memory() == before
