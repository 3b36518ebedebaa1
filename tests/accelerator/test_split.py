"""Attention on the device and on the CPU at the same time: what goes wrong in one place is known in the other."""

import copy
import itertools
import threading
import time

import pytest
import torch
from contracts.decoding import decode
from transformers.cache_utils import DynamicCache

from hf_hybrid_cache import OffloadedHybridCache, QuantizedHybridCache
from hf_hybrid_cache.attention import host_attention, stored_attention
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.kernels import Workspace
from hf_hybrid_cache.storage import Issued, SplitStore, cpu_fraction

from accelerator.orders import DEVICE, ORDERS, in_order
from models.tiny_models import random_prompt, tiny_model


@pytest.fixture
def cache_and_step():
    """Yield a cache with tokens in both places, and a function that runs a decode step."""
    model = copy.deepcopy(tiny_model("llama")).to(DEVICE)
    cache = OffloadedHybridCache(model.config, device_tokens=128, cpu_decode=True)
    with torch.no_grad(), in_order(ORDERS[-1]):
        model(random_prompt(1, 300).to(DEVICE), **cache_argument(cache))
        yield cache, lambda: model(random_prompt(1, 1).to(DEVICE), **cache_argument(cache)).logits


def test_the_kernel_runs_beside_the_thread_of_the_model(cache_and_step, monkeypatch: pytest.MonkeyPatch):
    threads, attend = set(), Workspace.attend

    def noted(*arguments, **options):
        threads.add(threading.get_ident())
        return attend(*arguments, **options)

    monkeypatch.setattr(Workspace, "attend", noted)
    cache_and_step[1]()
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_slots_of_the_prompt_are_given_back_with_the_first_token_after_it(cache_and_step):
    cache, step = cache_and_step
    before = cache.memory().device_bytes
    step()
    assert not any(staging.slots for staging in cache._stores.stagings.values())
    assert cache.memory().device_bytes < before


def let_one_side_be_last(last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel wait until the device has ended, or the device begin when the kernel has."""
    ended, attend, note, number = threading.Event(), Workspace.attend, SplitStore.note_ended, itertools.count()

    def wait() -> None:
        assert ended.wait(60)
        ended.clear()

    class Ordered(Issued):
        """Each layer issues the copy of its queries, and then all other work."""

        def __init__(self, device: torch.device):
            is_work = next(number) % 2 == 1
            if is_work and last == "device":
                wait()
            super().__init__(device)
            if is_work and last == "cpu":
                ended.set()

    def attending(*arguments, **options):
        wait()
        torch.accelerator.synchronize()
        return attend(*arguments, **options)

    def noting(*arguments):
        note(*arguments)
        ended.set()

    monkeypatch.setattr(host_attention, "Issued", Ordered)
    if last == "cpu":
        monkeypatch.setattr(Workspace, "attend", attending)
    else:
        monkeypatch.setattr(SplitStore, "note_ended", noting)


@pytest.mark.parametrize(("last", "direction"), [("cpu", -1), ("device", 1)])
def test_cpu_fraction_when_a_side_ends_last_then_it_gets_fewer_tokens(
    last: str, direction: int, monkeypatch: pytest.MonkeyPatch
):
    model = copy.deepcopy(tiny_model("llama")).to(DEVICE)
    cache = OffloadedHybridCache(model.config, cpu_decode="auto")
    for name, number in (("_NOT_COUNTED", 2), ("_COUNTED", 6)):
        monkeypatch.setattr(cpu_fraction, name, number)
    ids = random_prompt(1, 500)
    expected = decode(model, ids, DynamicCache(config=model.config))
    let_one_side_be_last(last, monkeypatch)
    assert torch.equal(decode(model, ids, cache), expected)
    shares = [0.5, *(decision.value for decision in cache.stats.decisions)]
    assert len(shares) > 2
    assert shares == sorted(shares)[::direction]


def test_an_error_of_the_kernel_reaches_the_model_and_the_cache_goes_on(cache_and_step, monkeypatch):
    cache, step = cache_and_step
    expected = step()
    cache.crop(-1)

    def failing(*arguments, **options):
        raise MemoryError("no room to work in")

    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "attend", failing)
        with pytest.raises(MemoryError, match="no room to work in"):
            step()
    cache.drop_unfinished()
    torch.testing.assert_close(step(), expected)


def test_whatever_ends_attention_on_the_device_the_kernel_is_waited_for(cache_and_step, monkeypatch):
    _, step = cache_and_step
    ended, attend = [], Workspace.attend

    def slow(*arguments, **options):
        time.sleep(0.2)
        result = attend(*arguments, **options)
        ended.append(True)
        return result

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(Workspace, "attend", slow)
    monkeypatch.setattr(stored_attention, "attend_to_states", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step()
    assert ended


@pytest.mark.parametrize("make", [OffloadedHybridCache, QuantizedHybridCache])
def test_device_memory_when_cpu_attends_after_chunks_then_is_given_back(make):
    model = copy.deepcopy(tiny_model("llama")).to(DEVICE)
    cache = make(model.config, cpu_decode=True)
    with torch.no_grad(), in_order(ORDERS[-1]):
        for num_tokens in (256, 192, 1):
            model(random_prompt(1, num_tokens).to(DEVICE), **cache_argument(cache))
        assert cache.memory().device_bytes == 0
