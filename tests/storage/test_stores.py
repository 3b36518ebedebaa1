"""Every store of keys and values: on the device, in host memory, streamed, split, quantized and shared."""

import pytest
import torch
from contracts.stores import StoreMachine, Variant, machine_of, random_states
from hypothesis.stateful import run_state_machine_as_test
from torch import distributed

from hf_hybrid_cache.storage import Store

from common.interruptions import Interruption
from common.soak import search_at_random

STREAMED = {"offload": True, "cpu_decode": False}
PLACES = {
    "on the device": Variant({"cpu_decode": False}),
    "in host memory": Variant({"cpu_decode": True}),
    "in host memory, copied late": Variant({"cpu_decode": True}, copies_late=True),
    "streamed": Variant(STREAMED),
    "streamed, copied late": Variant(STREAMED, copies_late=True),
    "split": Variant({"cpu_decode": True}, is_split=True),
    "split, copied late": Variant({"cpu_decode": True}, is_split=True, copies_late=True),
    "split and streamed": Variant(STREAMED, is_split=True),
    "split and streamed, copied late": Variant(STREAMED, is_split=True, copies_late=True),
    "split in three": Variant({"offload": True, "cpu_decode": 0.5}, is_split=True),
}
VARIANTS = PLACES | {f"quantized, {name}": each._replace(is_quantized=True) for name, each in PLACES.items()}
if distributed.is_available():
    VARIANTS["shared with nobody"] = Variant({"cpu_decode": True}, is_shared=True)
AT_ONCE = {name: each for name, each in VARIANTS.items() if not each.copies_late}
each_at_once = pytest.mark.parametrize("variant", AT_ONCE.values(), ids=AT_ONCE)


def run(machine: type[StoreMachine]) -> None:
    run_state_machine_as_test(machine, settings=search_at_random(50, 500, stateful_step_count=12))


@pytest.mark.soak
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_any_history_of_a_store_leaves_what_plain_tensors_hold(variant: Variant):
    run(machine_of(variant))


@pytest.mark.soak
@pytest.mark.parametrize("is_quantized", [False, True])
def test_any_history_of_a_shard_leaves_its_part_of_plain_tensors(is_quantized: bool):
    run(machine_of(Variant({"cpu_decode": True}, is_quantized=is_quantized), is_divided=True))


@pytest.mark.parametrize("lengths", [[1], [300], [1, 64, 65, 300, 1000]], ids=str)
@each_at_once
def test_planned_bytes_are_those_that_its_buffers_hold(variant: Variant, lengths: list[int]):
    store, _ = variant.make()
    planned = sum(num_bytes for _, num_bytes in store.planned_bytes(lengths))
    for seed, length in enumerate(lengths):
        store.add(*random_states(length - store.num_tokens, seed))
    held = sum(buffer.num_bytes for buffer in store.buffers())
    # Room for the tokens of a quantized layer that stay in full precision is planned whole.
    assert planned == held if not variant.is_quantized or lengths[-1] >= 300 else planned >= held


CHANGES = {"append": random_states(140, 1), "truncate": (100,), "select": (torch.tensor([1]),)}


@pytest.mark.parametrize("change", CHANGES)
@each_at_once
def test_store_when_interrupted_anywhere_then_is_whole_or_says_not(variant: Variant, change: str):
    def trial(at_line: int | None) -> tuple[Interruption, Store]:
        store, _ = variant.filled(300)
        fault = Interruption(at_line=at_line, folder="storage")
        fault.run(lambda: getattr(store, change)(*CHANGES[change]))
        return fault, store

    whole, after = trial(None)
    before, _ = variant.filled(300)
    for at_line in range(0, whole.lines, max(1, whole.lines // 40)):
        fault, store = trial(at_line)
        if store.is_intact:
            possible = [each.read() for each in (before, after) if each.num_tokens == store.num_tokens]
            assert any(all(map(torch.equal, store.read(), each)) for each in possible), fault.place
