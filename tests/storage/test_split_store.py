"""Both ends of a sequence on the device, the middle in host memory: who attends to it, and where there is no memory."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_hybrid_cache import HybridCache, KVCodec, OffloadedHybridCache, Placement, minmax
from hf_hybrid_cache.attention.host_attention import HostAttention
from hf_hybrid_cache.attention.queries import Queries
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.storage import Pair, Resident, Scratch, SplitStore, Store
from hf_hybrid_cache.storage.runs.streamed import Slot

from common.lazy_streams import Job, LazyStreams, copy_late
from models.tiny_models import llama, random_prompt, tiny_model

CONFIG = llama()
NUM_LAYERS = CONFIG.num_hidden_layers
full_or_codes = pytest.mark.parametrize("codec", [None, minmax(8, sink_tokens=0, rotate=True)], ids=["full", "codes"])


def states(num_tokens: int, seed: int = 0) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(2, 2, num_tokens, 16, generator=generator) for _ in range(2))
    return keys, values


def step(cache: HybridCache, num_tokens: int = 1) -> None:
    """A step of a model, each layer of which attends with one query."""
    for index in range(NUM_LAYERS):
        keys, values = cache.update(*states(num_tokens), index)
        scaled_dot_product_attention(torch.ones(2, 4, 1, 16), keys, values, enable_gqa=True)


def in_three(share: float, codec: KVCodec | None) -> HybridCache:
    return HybridCache(CONFIG, Placement(offload=True, cpu_decode=share, device_tokens=128), codec=codec)


def store_of(device_tokens: int) -> SplitStore:
    cache = HybridCache(CONFIG, Placement(cpu_decode=True, device_tokens=device_tokens))
    cache.update(*states(1), 0)
    store = cache.layers[0].store
    store.truncate(0)
    return store


def test_ends_stay_where_they_are_while_blocks_leave_them():
    """Unless somebody holds what was read of them: it stays as it was."""
    store = store_of(192)
    store.add(*states(192))
    place = store.ends.read()[0].data_ptr()
    store.add(*states(300, seed=1))
    assert store.ends.read()[0].data_ptr() == place
    held, _ = store.ends.read()
    before = held.clone()
    store.add(*states(300, seed=2))
    assert store.ends.read()[0].data_ptr() != place
    assert torch.equal(held, before)


@full_or_codes
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_what_the_cpu_attends_to_does_not_cross_the_bus(share: float, codec: KVCodec | None):
    cache = in_three(share, codec)
    step(cache, 2000)
    for _ in range(3):
        step(cache)
    before = cache.stats.bytes_to_device
    step(cache)
    streamed = cache.layers[0].store.streamed
    blocks, row_bytes = streamed.num_blocks, streamed.bytes_per_token * (64 if codec is None else 1)
    assert cache.stats.bytes_to_device - before == NUM_LAYERS * row_bytes * (blocks - int(share * blocks))


def test_cpu_fraction_when_model_is_on_cpu_then_does_not_adapt():
    cache = OffloadedHybridCache(CONFIG, device_tokens=128, cpu_decode="auto")
    for _ in range(2):
        cache.update(*states(300), 0)
    assert cache.layers[0].store.cpu_fraction is None
    assert cache.layers[0].store.streamed is None


@full_or_codes
def test_cpu_begins_before_the_bus_is_waited_for_and_does_not_wait(codec: KVCodec | None, monkeypatch):
    cache, seen = in_three(0.5, codec), list[str]()
    copy_late(cache)
    begin, attend, wait = HostAttention.part, HostAttention.partial, LazyStreams.compute_after

    def beginning(*arguments: object, **options: object) -> object:
        seen.append("begin")
        return begin(*arguments, **options)

    def attending(host: HostAttention, queries: Queries, store: Store, *arguments: object) -> object:
        fetched, result = store.streamed.fetched, attend(host, queries, store, *arguments)
        seen.append("the bus still brings" if not fetched.is_done else "the bus has brought")
        return result

    def waiting(streams: LazyStreams, event: Job | None) -> None:
        if event is not None and not event.is_done:
            seen.append("wait")
        wait(streams, event)

    for num_tokens in (1000, 1, 1):
        step(cache, num_tokens)
    with monkeypatch.context() as patch:
        patch.setattr(HostAttention, "part", beginning)
        patch.setattr(LazyStreams, "compute_after", waiting)
        step(cache)
    assert seen == ["begin", "wait"] * NUM_LAYERS
    seen.clear()
    monkeypatch.setattr(HostAttention, "partial", attending)
    # Work stays pending, as on an accelerator that computes later.
    monkeypatch.setattr(LazyStreams, "compute_after", lambda streams, event: None)
    step(cache)
    assert seen == ["the bus still brings"] * NUM_LAYERS


def no_room_on_the_device(*arguments: object, **options: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize(("bits", "refused"), [(None, (Slot, "ensure")), (8, (Slot, "ensure")), (8, (Scratch, "lend"))])
def test_streamed_middle_when_device_is_full_then_cpu_attends(
    bits: int | None, refused: tuple[type, str], monkeypatch: pytest.MonkeyPatch
):
    model, codec = tiny_model("llama"), None if bits is None else minmax(bits, rotate=True)
    ids = random_prompt(2, 700)
    whole, cache = (
        HybridCache(model.config, Placement(cpu_decode=share, device_tokens=128), codec=codec) for share in (True, 0.5)
    )
    with torch.no_grad(), monkeypatch.context() as patch:
        expected, _ = (model(ids, **cache_argument(each)).logits for each in (whole, cache))
        token = expected[:, -1:].argmax(dim=-1)
        patch.setattr(*refused, no_room_on_the_device)
        for _ in range(8):
            theirs, ours = (model(token, **cache_argument(each)).logits for each in (whole, cache))
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
            token = theirs.argmax(dim=-1)
    (decision,) = cache.stats.decisions
    assert decision == (700, "cpu_decode", 1.0, "the device has no memory for tokens that are streamed")
    assert not any(staging.slots for staging in cache._stores.stagings.values())


@pytest.mark.parametrize("steps", [[100] * 20, [2000], [1] * 600], ids=len)
def test_where_the_device_has_no_memory_fewer_tokens_stay_there(steps: list[int], monkeypatch: pytest.MonkeyPatch):
    store = store_of(1024)
    granted, reserve = [0], Resident.reserve

    def refusing(buffered: Resident, num_tokens: int) -> None:
        if num_tokens > 320:
            no_room_on_the_device()
        granted.append(num_tokens)
        reserve(buffered, num_tokens)

    # An accelerator refuses; the host's address space has no end.
    monkeypatch.setattr(Resident, "reserve", refusing)
    monkeypatch.setattr(Resident, "capacity", property(lambda buffered: max(granted)))
    keys, values = states(sum(steps))

    def add_all() -> None:
        for new in zip(keys.split(steps, 2), values.split(steps, 2), strict=True):
            store.add(*new)

    with pytest.warns(UserWarning, match="The device ran out of memory: of some layers it keeps .* tokens from now on"):
        add_all()
    assert 128 <= store.ends.num_entries <= 320
    assert store.is_intact
    decision = store._stats.decisions[-1]
    assert (decision.option, decision.value) == ("device_tokens", store.split.device_tokens)
    assert all(map(torch.equal, store.read(), (keys, values)))
