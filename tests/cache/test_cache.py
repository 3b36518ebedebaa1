"""Memory, flags, operations and refusals of the caches. That they hold the right states tells tests/operations."""

import copy
import gc
import weakref

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, T5Config, T5ForConditionalGeneration

from hf_hybrid_cache import (
    DynamicHybridCache,
    HostMemoryError,
    HybridCache,
    OffloadedHybridCache,
    Placement,
    QuantizedHybridCache,
)
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.layers import HybridLayer, move_tensors_of, tensors_of

from common.caches import CACHES
from models.tiny_models import gemma3, llama, random_prompt, tiny_model

CONFIG = llama()
SHAPE = (2, 2, 5, 16)
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4


def fill(cache: HybridCache, shape: tuple[int, ...] = SHAPE) -> HybridCache:
    for layer in range(len(cache)):
        cache.update(torch.ones(shape), torch.ones(shape), layer)
    return cache


@pytest.fixture(params=CACHES)
def cache(request: pytest.FixtureRequest) -> HybridCache:
    return CACHES[request.param](CONFIG)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_layers_of_transformers_note_where_they_are_moved(family: str):
    model = tiny_model(family)
    cache = DynamicHybridCache(model.config)
    with torch.no_grad():
        model(random_prompt(1, 20), **cache_argument(cache))
    stock = [layer for layer in cache.layers if not isinstance(layer, HybridLayer)]
    assert stock
    for layer in stock:
        move_tensors_of(layer, torch.device("meta"), torch.float64)
        moved = {(each.device.type, each.dtype) for each in tensors_of(layer) if each.is_floating_point()}
        assert moved == {("meta", torch.float64)}
        assert layer.device.type == "meta"
        assert getattr(layer, "dtype", torch.float64) == torch.float64


@pytest.mark.parametrize("cpu_decode", [False, True])
def test_memory_on_the_host_is_that_of_whole_blocks(cpu_decode: bool):
    report = fill(DynamicHybridCache(CONFIG, cpu_decode=cpu_decode)).memory()
    assert (report.device_bytes, report.host_bytes, report.num_tokens) == (0, 64 * 4 * TOKEN_BYTES, 5)
    assert report.bytes_per_token == 64 * 4 * TOKEN_BYTES / 5


@pytest.mark.parametrize("make", [DynamicHybridCache, OffloadedHybridCache, QuantizedHybridCache])
def test_host_memory_when_within_model_context_then_never_moves(make: type[HybridCache]):
    config = llama()
    config.num_hidden_layers, config.num_key_value_heads, config.max_position_embeddings = 1, 1, 131_072
    cache = make(config, cpu_decode=True)
    places = []
    for num_tokens in (300, 130_772, 1):
        states = torch.ones(1, 1, num_tokens, 16)
        cache.update(states, states, 0)
        store = cache.layers[0].store
        places.append([buffer.stored_rows(1).data_ptr() for buffer in (store.packed or store.dense).buffers()])
    assert cache.get_seq_length() == 131_073
    assert places[0] == places[1] == places[2]


def test_memory_counts_the_staging_slots_of_an_offloaded_cache():
    cache = fill(OffloadedHybridCache(CONFIG, cpu_decode=False))
    slots = [slot for staging in cache._stores.stagings.values() for slot in staging.slots]
    staged = sum(slot.keys.num_bytes + slot.values.num_bytes for slot in slots)
    assert staged > 0
    assert cache.memory().host_bytes == 64 * 4 * TOKEN_BYTES + staged


def test_memory_counts_layers_of_transformers_own():
    model = tiny_model("gemma3")
    cache = DynamicHybridCache(model.config, cpu_decode=False)
    ids = random_prompt(1, 40)
    model.generate(ids, attention_mask=torch.ones_like(ids), **cache_argument(cache), max_new_tokens=2, do_sample=False)
    stored = sum(  # whole blocks of 64 tokens in ours
        (layer.keys.nbytes + layer.values.nbytes) * (1 if layer.is_sliding else 64 / 41) for layer in cache.layers
    )
    windows = sum(8 for layer in cache.layers if layer.is_sliding)
    assert cache.memory().host_bytes == stored + windows


def test_reset_gives_memory_back_and_the_cache_serves_other_inputs(cache: HybridCache):
    empty = cache.memory()
    assert (empty.device_bytes, empty.host_bytes, empty.num_tokens, empty.bytes_per_token) == (0, 0, 0, 0.0)
    fill(cache)
    cache.reset()
    assert cache.memory() == empty
    assert cache.get_seq_length() == 0
    assert cache.stats.bytes_to_host == 0
    assert fill(cache, (3, 2, 7, 16)).get_seq_length() == 7


QUANTIZED_PLACES = {
    "quantized": {},
    "quantized on device": {"cpu_decode": False},
    "quantized streamed": {"offload": True, "cpu_decode": False},
    "quantized split": {"offload": True, "device_tokens": 128},
    "quantized in three": {"offload": True, "device_tokens": 128, "cpu_decode": 0.5},
}


def bytes_of(buffers: list[weakref.ref]) -> int:
    return sum(buffer.num_bytes for reference in buffers if (buffer := reference()) is not None)


@pytest.mark.parametrize("operation", ["reset", "to", "repeat and reset"])
@pytest.mark.parametrize("place", ["dynamic", "offloaded", "split_in_three", *QUANTIZED_PLACES])
def test_reset_or_move_when_done_then_all_buffers_of_before_are_gone(place: str, operation: str):
    is_quantized = place in QUANTIZED_PLACES
    cache = QuantizedHybridCache(CONFIG, bits=4, **QUANTIZED_PLACES[place]) if is_quantized else CACHES[place](CONFIG)
    with torch.no_grad():
        for num_tokens in (300, 1):
            tiny_model("llama")(random_prompt(1, num_tokens), **cache_argument(cache), logits_to_keep=1)
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
        else:
            cache.reset()
        assert bytes_of(before) == 0
    finally:
        gc.enable()


def test_a_cache_that_is_dropped_gives_memory_back_at_once(cache: HybridCache):
    layers = fill(cache).layers
    gone = [weakref.ref(buffer) for layer in layers for buffer in layer.store.buffers()]
    gone += [weakref.ref(slot) for staging in cache._stores.stagings.values() for slot in staging.slots]
    gc.disable()
    try:
        while layers:
            del layers[-1]
        vars(cache).clear()
        assert [reference() for reference in gone] == [None] * len(gone)
    finally:
        gc.enable()


def test_only_full_attention_layers_are_ours(cache: HybridCache):
    kinds = [type(layer).__name__ for layer in type(cache)(gemma3()).layers]
    assert kinds == ["DynamicSlidingWindowLayer", "HybridLayer", "DynamicSlidingWindowLayer", "HybridLayer"]


def test_cache_flags_when_read_then_tell_the_truth(cache: HybridCache):
    fill(cache)
    assert not cache.is_compileable
    assert cache.is_croppable
    assert cache.is_sliding == [False] * 4
    assert cache.is_initialized
    assert cache.get_max_length() == -1
    assert cache.get_mask_sizes(3, 0) == (8, 0)
    cache.activate_past_recording()
    assert cache.get_seq_length() == 5


def test_early_initialization_allocates_nothing_and_knows_the_shape(cache: HybridCache):
    cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
    assert cache.is_initialized
    assert cache.memory().host_bytes == 0
    assert fill(cache).get_seq_length() == 5


def test_iteration_gives_keys_and_values_like_dynamic_cache(cache: HybridCache):
    stock = DynamicCache(config=CONFIG)
    for ours, theirs in zip(fill(cache), fill(stock), strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
        assert ours[2] is theirs[2] is None


def test_a_copy_does_not_ask_again_for_what_it_holds(cache: HybridCache):
    twin = copy.deepcopy(fill(cache))
    assert twin.stats is not cache.stats
    for store in (layer.store for layer in twin.layers):
        stores, is_split = twin._stores, store.ends is not None
        part, budget = (store.ends, stores.device_budget) if is_split else (store.dense, stores.budget)
        assert part._budget is budget
        assert budget._held[part] == (5, TOKEN_BYTES)


def test_selection_takes_masks_lists_and_negative_indices(cache: HybridCache):
    fill(cache, (4, 2, 5, 16))
    cache.batch_select_indices(torch.tensor([True, False, True, True]))
    cache.batch_select_indices(torch.tensor([-1, 0]))
    assert cache.layers[0].keys.shape[0] == 2


def test_operations_on_an_empty_cache_do_nothing(cache: HybridCache):
    cache.crop(-3)
    cache.crop(0)
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0]))
    cache.reset()
    assert cache.get_seq_length() == 0


def test_an_encoder_decoder_model_takes_a_hybrid_cache_for_its_decoder(cache: HybridCache):
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=99, decoder_start_token_id=0, **sizes)).eval()
    decoders, outputs = [DynamicCache(config=model.config), type(cache)(model.config)], []
    for decoder in decoders:
        both = EncoderDecoderCache(decoder, DynamicCache(config=model.config))
        outputs.append(
            model.generate(random_prompt(1, 9) % 99, **cache_argument(both), max_new_tokens=9, do_sample=False)
        )
        both.crop(-2)
    assert torch.equal(*outputs)
    assert decoders[0].get_seq_length() == decoders[1].get_seq_length() == outputs[0].shape[1] - 3


# What is refused


WRONG_STATES = {
    "other batch": (torch.ones(3, 2, 1, 16), None),
    "other heads": (torch.ones(2, 4, 1, 16), None),
    "other width": (torch.ones(2, 2, 1, 8), None),
    "other type": (torch.ones(SHAPE).bfloat16(), None),
    "other length of values": (torch.ones(2, 2, 3, 16), torch.ones(2, 2, 4, 16)),
    "no batch": (torch.ones(2, 3, 16), None),
}


@pytest.mark.parametrize("name", WRONG_STATES)
def test_states_that_do_not_fit_are_refused_and_nothing_is_stored(cache: HybridCache, name: str):
    keys, values = WRONG_STATES[name]
    fits_itself = values is None and keys.dim() == 4
    message = r"Layer 1 holds 5 tokens of batch 2, 2 KV heads, head_dim 16, .*float32.*new states are"
    with pytest.raises(ValueError, match=message if fits_itself else "Keys and values must be"):
        fill(cache).update(keys, keys if values is None else values, 1)
    assert cache.get_seq_length(1) == 5


def test_keys_and_values_may_differ_in_dtype_and_width(cache: HybridCache):
    keys, values = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 8).bfloat16()
    if cache._stores.placement.cpu_decode is True:
        with pytest.raises(ValueError, match=r"cpu_decode needs keys and values of one type.*32 and torch.bfloat16"):
            cache.update(keys, values, 0)
        return
    cache.update(keys, values, 0)
    ours = cache.update(keys, values, 0)
    assert torch.equal(ours[0], torch.cat([keys, keys], dim=2))
    assert torch.equal(ours[1], torch.cat([values, values], dim=2))


def test_a_number_of_tokens_to_remove_may_be_a_tensor(cache: HybridCache):
    fill(cache)
    cache.crop(torch.tensor(-2))
    assert type(cache.get_seq_length()) is int
    assert cache.get_seq_length() == 3
    fill(cache)
    assert cache.get_seq_length() == 8


REFUSED = {
    "crop to a length": (lambda cache: cache.crop(5), ValueError, r"To keep 5 of 20 tokens, use crop\(-15\)"),
    "crop with edits that are lost": (lambda cache: (assign_keys_alone(cache), cache.crop(-1)), ValueError, None),
    "beams that are not there": (lambda cache: cache.reorder_cache(torch.tensor([0, 5])), IndexError, None),
    "sequences that are not there": (lambda cache: cache.batch_select_indices([7]), IndexError, None),
    "a mask of another length": (lambda cache: cache.batch_select_indices(torch.ones(3, dtype=bool)), IndexError, None),
    "negative repeats": (lambda cache: cache.batch_repeat_interleave(-1), ValueError, None),
    "states of another width": (lambda cache: cache.update(*torch.ones(2, 3, 2, 1, 8), 1), ValueError, None),
}


def assign_keys_alone(cache: HybridCache) -> None:
    cache.layers[3].keys = torch.ones(SHAPE)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("make", [DynamicHybridCache, OffloadedHybridCache])
def test_operation_on_all_layers_when_one_refuses_it_then_none_has_changed(make: type[HybridCache], name: str):
    model, (operation, error, message) = tiny_model("gemma3"), REFUSED[name]
    untouched, cache = make(model.config), make(model.config)
    # Beyond the window transformers' layers refuse any crop, and say another reason.
    batch, num_tokens = (1 if name == "states of another width" else 2), (20 if name == "crop to a length" else 10)
    for each in (untouched, cache):
        with torch.no_grad():
            model(random_prompt(batch, num_tokens), **cache_argument(each))
    with pytest.raises(error, match=message):
        operation(cache)
    if name == "crop with edits that are lost":
        cache.layers[3].set(untouched.layers[3].keys, untouched.layers[3].values)
    with torch.no_grad():
        logits = [model(random_prompt(batch, 1), **cache_argument(each)).logits for each in (untouched, cache)]
    assert torch.equal(*logits)


def test_states_that_need_gradients_are_refused_but_not_without_grad_mode(cache: HybridCache):
    states = torch.ones(SHAPE, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
        cache.update(states, states, 0)
    with torch.no_grad():
        cache.update(states, states, 0)
    assert not cache.layers[0].keys.requires_grad


def test_a_context_that_cannot_fit_is_refused_before_anything_is_stored(cache: HybridCache):
    fill(cache)
    before = cache.memory()
    # A view of one number: asking for 2**40 tokens costs the test nothing.
    endless = torch.ones(1).expand(2, 2, 2**40, 16)
    with pytest.raises(HostMemoryError, match=r"tokens need [\d.]+ GiB more host memory and [\d.]+ GiB are free"):
        cache.update(endless, endless, 0)
    is_split = cache.layers[0].store.ends is not None  # capacity on the device is taken first, and stays
    assert cache.memory() == before or (is_split and cache.get_seq_length() == 5)
    assert fill(cache).get_seq_length() == 10


def test_repeating_more_than_fits_is_refused_before_anything_changes(cache: HybridCache):
    fill(cache)
    before = cache.memory()
    with pytest.raises(HostMemoryError, match=r"copies of 5 tokens need"):
        cache.batch_repeat_interleave(2**40)
    assert cache.memory() == before

    def asked_for() -> int:
        return sum(tokens * size for tokens, size in cache._stores.budget._held.values())

    asked = asked_for()
    cache.batch_repeat_interleave(4)
    assert asked_for() == 4 * asked


@pytest.mark.parametrize(("count", "expected"), [(0, set()), (1, {0}), (2, {0, 4}), (3, {0, 2, 5}), (8, set(range(8)))])
def test_resident_layers_are_spread_evenly(count: int, expected: set[int]):
    assert Placement(offload=True, resident_layers=count).resident_ordinals(8) == expected
