"""Both ends of a sequence on the device, the middle in host memory: where tokens are, and when they leave."""

import copy
import itertools

import pytest
import torch

from hf_hybrid_cache import (
    HostMemoryError,
    HybridCache,
    OffloadedHybridCache,
    Placement,
    QuantizedHybridCache,
    minmax,
)
from hf_hybrid_cache.attention.host_attention import HostAttention
from hf_hybrid_cache.attention.queries import Queries
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.layers import HybridLayer
from hf_hybrid_cache.storage import Resident, Scratch, Store
from hf_hybrid_cache.storage.memory import host_memory
from hf_hybrid_cache.storage.memory.host_memory import Limit
from hf_hybrid_cache.storage.runs.streamed import Slot

from common.lazy_streams import Job, LazyStreams
from models.tiny_models import llama, random_prompt, tiny_model
from operations.test_stateful import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, with_lazy_streams

CONFIG = llama()


def states(num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(2, 2, num_tokens, 16, generator=generator) for _ in range(2))
    return keys, values


def step_through(cache: HybridCache, num_tokens: int) -> None:
    """A step of a model with that many tokens, each layer of which attends with one query."""
    for index in range(NUM_LAYERS):
        new = (torch.randn(1, NUM_KV_HEADS, num_tokens, HEAD_DIM) for _ in range(2))
        keys, values = cache.update(*new, index)
        query = torch.ones(1, 2 * NUM_KV_HEADS, 1, HEAD_DIM)
        torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)


def store_of(placement: Placement, bits: int | None = None) -> Store:
    cache = HybridCache(CONFIG, placement, codec=None if bits is None else minmax(bits, sink_tokens=64))
    cache.update(*states(1), 0)
    store = cache.layers[0].store
    assert isinstance(store, Store)
    assert store.ends is not None
    store.truncate(0)
    return store


@pytest.mark.parametrize("device_tokens", [128, 129, 192, 300, 1024])
@pytest.mark.parametrize("steps", [[1] * 700, [64, 65, 1, 1, 63, 500, 1], [3000], [100, 2000, 1]], ids=len)
def test_split_layer_when_filled_then_has_ends_on_device_rest_on_host(device_tokens: int, steps: list[int]):
    store = store_of(Placement(cpu_decode=True, device_tokens=device_tokens))
    keys, values = states(sum(steps))
    end = 0
    for count in steps:
        store.add(keys[:, :, end : end + count], values[:, :, end : end + count])
        end += count
        middle = store.middle_tokens
        assert middle % 64 == 0
        # An eighth leaves at once, so that the others are moved seldom.
        most_missing = max(64, device_tokens // 8)
        assert min(end, device_tokens - most_missing) <= store.ends.num_entries <= device_tokens
        for role, whole in enumerate((keys, values)):
            on_device, on_host = store.ends.read()[role], store.read_middle()[role]
            assert torch.equal(on_device[:, :, :64], whole[:, :, : min(64, end)])
            assert torch.equal(on_host, whole[:, :, 64 : 64 + middle])
            assert torch.equal(on_device[:, :, 64:], whole[:, :, 64 + middle : end])


def test_every_token_leaves_the_device_once():
    cache = OffloadedHybridCache(CONFIG, device_tokens=256, cpu_decode=True)
    keys, values = states(2000)
    lengths = set()
    for at in range(2000):
        cache.update(keys[:, :, at : at + 1], values[:, :, at : at + 1], 0)
        store = cache.layers[0].store
        lengths.add(store.middle_tokens)
        assert store.middle_tokens == at + 1 - store.ends.num_entries
    # 64 tokens leave at a time.
    assert lengths == set(range(0, store.middle_tokens + 1, 64))


def test_tokens_when_copied_to_host_then_are_not_overwritten_first():
    cache = with_lazy_streams(1, 0, cpu_decode=True, device_tokens=192)
    keys, values = (torch.randn(1, NUM_KV_HEADS, 330, HEAD_DIM) for _ in range(2))
    for start, end in itertools.pairwise([0, 255, *range(256, 331)]):
        for layer in range(NUM_LAYERS):
            cache.update(keys[:, :, start:end], values[:, :, start:end], layer)
    for layer in cache.layers:
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_what_the_cpu_attends_to_does_not_cross_the_bus(share: float, bits: int | None):
    placement = Placement(offload=True, cpu_decode=share, device_tokens=128)
    cache = HybridCache(CONFIG, placement, codec=None if bits is None else minmax(bits, sink_tokens=0, rotate=True))
    indices = [index for index, layer in enumerate(cache.layers) if isinstance(layer, HybridLayer)]
    assert len(indices) > 2  # so that layers take turns in slots

    def step(num_tokens: int, seed: int) -> None:
        for index in indices:
            keys, values = cache.update(*states(num_tokens, seed), index)
            torch.nn.functional.scaled_dot_product_attention(torch.ones(2, 4, 1, 16), keys, values, enable_gqa=True)

    step(2000, 0)
    for seed in range(3):
        step(1, seed)
    before = cache.stats.bytes_to_device
    step(1, 9)
    store = cache.layers[indices[0]].store
    entries = store.streamed
    blocks = entries.num_blocks
    row_bytes = entries.bytes_per_token * (64 if bits is None else 1)
    assert cache.stats.bytes_to_device - before == len(indices) * row_bytes * (blocks - int(share * blocks))


def test_cpu_fraction_when_model_is_on_cpu_then_does_not_adapt():
    cache = OffloadedHybridCache(CONFIG, device_tokens=128, cpu_decode="auto")
    for _ in range(2):
        cache.update(*states(300), 0)
    store = cache.layers[0].store
    assert store.cpu_fraction is None
    assert store.streamed is None


@pytest.mark.parametrize("bits", [None, 8])
def test_the_cpu_does_not_wait_for_what_the_bus_still_brings(bits: int | None, monkeypatch: pytest.MonkeyPatch):
    codec = None if bits is None else minmax(bits, sink_tokens=0, rotate=True)
    cache = with_lazy_streams(1, 0, cpu_decode=0.5, device_tokens=128, codec=codec)
    under_way, partial = [], HostAttention.partial

    def noted(host: HostAttention, queries: Queries, store: Store, *arguments: object) -> object:
        fetched = store.streamed.fetched
        result = partial(host, queries, store, *arguments)
        under_way.append(not fetched.is_done)
        return result

    def late(streams: LazyStreams, event: Job | None) -> None:
        """Leave work pending, as an accelerator does that computes later."""

    step_through(cache, 1000)
    step_through(cache, 1)
    monkeypatch.setattr(HostAttention, "partial", noted)
    monkeypatch.setattr(LazyStreams, "compute_after", late)
    step_through(cache, 1)
    assert under_way == [True] * NUM_LAYERS


@pytest.mark.parametrize("bits", [None, 8])
def test_the_cpu_has_begun_before_the_device_waits_for_the_bus(bits: int | None, monkeypatch: pytest.MonkeyPatch):
    codec = None if bits is None else minmax(bits, sink_tokens=0, rotate=True)
    cache = with_lazy_streams(1, 0, cpu_decode=0.5, device_tokens=128, codec=codec)
    seen, begin, wait = [], HostAttention.part, LazyStreams.compute_after

    def beginning(*arguments: object, **options: object) -> object:
        seen.append("begin")
        return begin(*arguments, **options)

    def waiting(streams: LazyStreams, event: Job | None) -> None:
        if event is not None and not event.is_done:
            seen.append("wait")
        wait(streams, event)

    step_through(cache, 1000)
    for _ in range(2):
        step_through(cache, 1)
    monkeypatch.setattr(HostAttention, "part", beginning)
    monkeypatch.setattr(LazyStreams, "compute_after", waiting)
    step_through(cache, 1)
    assert seen == ["begin", "wait"] * NUM_LAYERS


@pytest.mark.parametrize(("bits", "refused"), [(None, (Slot, "ensure")), (8, (Slot, "ensure")), (8, (Scratch, "lend"))])
def test_streamed_middle_when_device_is_full_then_cpu_attends(
    bits: int | None, refused: tuple[type, str], monkeypatch: pytest.MonkeyPatch
):
    model, codec = tiny_model("llama"), None if bits is None else minmax(bits, rotate=True)
    ids = random_prompt(2, 700)
    whole, cache = (
        HybridCache(model.config, Placement(cpu_decode=share, device_tokens=128), codec=codec) for share in (True, 0.5)
    )

    def refusing(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with torch.no_grad(), monkeypatch.context() as patch:
        expected, _ = (model(ids, **cache_argument(each)).logits for each in (whole, cache))
        token = expected[:, -1:].argmax(dim=-1)
        patch.setattr(*refused, refusing)
        for _ in range(8):
            theirs, ours = (model(token, **cache_argument(each)).logits for each in (whole, cache))
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
            token = theirs.argmax(dim=-1)
    (decision,) = cache.stats.decisions
    assert decision == (700, "cpu_decode", 1.0, "the device has no memory for tokens that are streamed")
    assert not any(staging.slots for staging in cache._stores.stagings.values())


def test_sinks_when_device_tokens_exceed_them_then_stay_on_the_device():
    for device_tokens, first in ((128, 64), (191, 64)):
        assert store_of(Placement(cpu_decode=True, device_tokens=device_tokens), bits=8).layout.first_tokens == first
    cache = HybridCache(CONFIG, Placement(cpu_decode=True, device_tokens=256), codec=minmax(4, sink_tokens=256))
    cache.update(*states(400), 0)
    store = cache.layers[0].store
    assert (store.first_tokens, store.sink_tokens) == (0, 256)


def test_what_does_not_fit_into_host_memory_stays_on_the_device(monkeypatch: pytest.MonkeyPatch):
    store = store_of(Placement(cpu_decode=True, device_tokens=128))
    store.add(*states(100))
    before = [each.clone() for each in store.read()]
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "tightest_limit", lambda: Limit(0, ""))
        with pytest.raises(HostMemoryError):
            store.add(*states(5000, seed=1))
    assert store.is_intact
    assert (store.num_tokens, store.middle_tokens) == (100, 0)
    for ours, expected in zip(store.read(), before, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("steps", [[100] * 20, [2000], [1] * 600], ids=len)
def test_where_the_device_has_no_memory_fewer_tokens_stay_there(steps: list[int], monkeypatch: pytest.MonkeyPatch):
    store = store_of(Placement(cpu_decode=True, device_tokens=1024))
    granted, reserve = [0], Resident.reserve

    def refusing(buffered: Resident, num_tokens: int) -> None:
        if num_tokens > 320:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        granted.append(num_tokens)
        reserve(buffered, num_tokens)

    # An accelerator refuses; the host's address space has no end.
    monkeypatch.setattr(Resident, "reserve", refusing)
    monkeypatch.setattr(Resident, "capacity", property(lambda buffered: max(granted)))
    keys, values = states(sum(steps))

    def extend_all() -> None:
        end = 0
        for count in steps:
            store.add(keys[:, :, end : end + count], values[:, :, end : end + count])
            end += count

    with pytest.warns(UserWarning, match="The device ran out of memory: of some layers it keeps .* tokens from now on"):
        extend_all()
    assert 128 <= store.ends.num_entries <= 320
    assert store.is_intact
    decision = store._stats.decisions[-1]
    assert (decision.option, decision.value) == ("device_tokens", store.layout.device_tokens)
    for ours, expected in zip(store.read(), (keys, values), strict=True):
        assert torch.equal(ours, expected)


def test_a_device_without_memory_when_any_is_needed_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch):
    store = store_of(Placement(cpu_decode=True, device_tokens=128))  # the fewest there can be
    store.add(*states(100))

    def refusing(buffered: Resident, num_tokens: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Resident, "reserve", refusing)
    with pytest.raises(torch.OutOfMemoryError):
        store.add(*states(2000, seed=1))
    assert (store.is_intact, store.num_tokens, store.middle_tokens) == (True, 100, 0)


def test_a_copy_has_tokens_of_its_own_in_both_places():
    store = store_of(Placement(cpu_decode=True, device_tokens=128))
    store.add(*states(300))
    twin = copy.deepcopy(store)
    store.truncate(10)
    store.add(*states(200, seed=1))
    for ours, expected in zip(twin.read(), states(300), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OffloadedHybridCache(CONFIG, device_tokens=127), "at least 128"),
        (lambda: OffloadedHybridCache(CONFIG, device_tokens=-1), "device_tokens must be an integer of at least 0"),
        (lambda: OffloadedHybridCache(CONFIG, device_tokens=128.0), "device_tokens must be an integer of at least 0"),
        (
            lambda: OffloadedHybridCache(CONFIG, cpu_decode=1.0),
            "For all tokens in host memory use True, for none False",
        ),
        (lambda: OffloadedHybridCache(CONFIG, cpu_decode=-0.5), "is not a share between 0 and 1"),
        (lambda: OffloadedHybridCache(CONFIG, cpu_decode=float("nan")), "is not a share between 0 and 1"),
        (lambda: OffloadedHybridCache(CONFIG, cpu_decode="all"), "a share between 0 and 1 or a collection"),
        (lambda: Placement(cpu_decode=True, adapts=True), "pass one, such as cpu_decode=0.5"),
        (lambda: QuantizedHybridCache(CONFIG, device_tokens=512), "Pass offload=True or cpu_decode=True"),
        (lambda: HybridCache(CONFIG, Placement(device_tokens=512)), "all tokens would be on the device"),
    ],
)
def test_numbers_of_tokens_that_cannot_be_are_refused_with_a_way_out(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()
