"""Every store of keys and values: on the device, in host memory, streamed, split, quantized and shared."""

import pytest
import torch
from contracts.stores import StoreMachine, Variant, machine_of, random_states
from hypothesis.stateful import run_state_machine_as_test
from torch import distributed

from hf_hybrid_cache.storage import OneSequence

from common.interruptions import Interruption
from common.soak import search_at_random

STREAMED = {"offload": True, "cpu_decode": False}
PLACES = {
    "on the device": Variant({"cpu_decode": False}),
    "in host memory": Variant({"cpu_decode": True}),
    "streamed": Variant(STREAMED),
    "split": Variant({"cpu_decode": True}, is_split=True),
    "split and streamed": Variant(STREAMED, is_split=True),
    "split in three": Variant({"offload": True, "cpu_decode": 0.5}, is_split=True),
}
if distributed.is_available():
    PLACES["shared with nobody"] = Variant({"cpu_decode": True}, is_shared=True)
each_place = pytest.mark.parametrize("variant", PLACES.values(), ids=PLACES)
in_both_forms = pytest.mark.parametrize("is_quantized", [False, True], ids=["full", "quantized"])


def run(machine: type[StoreMachine]) -> None:
    run_state_machine_as_test(machine, settings=search_at_random(6, stateful_step_count=12))


@pytest.mark.soak
@pytest.mark.default("pairs")
@each_place
@in_both_forms
@pytest.mark.parametrize("copies_late", [False, True], ids=["copied at once", "copied late"])
def test_any_history_of_a_store_leaves_what_plain_tensors_hold(variant: Variant, is_quantized: bool, copies_late: bool):
    run(machine_of(variant._replace(is_quantized=is_quantized, copies_late=copies_late)))


@pytest.mark.soak
@in_both_forms
def test_any_history_of_a_shard_leaves_its_part_of_plain_tensors(is_quantized: bool):
    run(machine_of(Variant({"cpu_decode": True}, is_quantized=is_quantized), is_divided=True))


@pytest.mark.parametrize("lengths", [[300], [1, 64, 65, 300, 1000]], ids=str)
@each_place
@in_both_forms
def test_planned_bytes_are_those_that_its_buffers_hold(variant: Variant, is_quantized: bool, lengths: list[int]):
    store, _ = variant._replace(is_quantized=is_quantized).make()
    planned = sum(num_bytes for _, num_bytes in store.planned_bytes(lengths))
    for seed, length in enumerate(lengths):
        store.add(*random_states(length - store.num_tokens, seed))
    assert planned == sum(buffer.num_bytes for buffer in store.buffers())


CHANGES = {"append": random_states(140, 1), "truncate": (100,), "select": (torch.tensor([1]),)}


@pytest.mark.default("pairs")
@pytest.mark.parametrize("change", CHANGES)
@each_place
@in_both_forms
def test_store_when_interrupted_anywhere_then_is_whole_or_says_not(variant: Variant, is_quantized: bool, change: str):
    made = variant._replace(is_quantized=is_quantized)

    def trial(at_line: int | None) -> tuple[Interruption, OneSequence]:
        store, _ = made.filled(300)
        fault = Interruption(at_line=at_line, folder="storage")
        fault.run(lambda: getattr(store, change)(*CHANGES[change]))
        return fault, store

    whole, after = trial(None)
    before, _ = made.filled(300)
    for at_line in range(0, whole.lines, max(1, whole.lines // 25)):
        fault, store = trial(at_line)
        if store.is_intact:
            possible = [each.read() for each in (before, after) if each.num_tokens == store.num_tokens]
            assert any(all(map(torch.equal, store.read(), each)) for each in possible), fault.place
