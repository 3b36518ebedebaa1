"""Processes go on together or fail together, whichever of them fails, and wherever."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed

from hf_hybrid_cache import DynamicHybridCache, HybridCache, OutOfStepError, QuantizedHybridCache
from hf_hybrid_cache.cache import contents_of
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.files.tensor_file import NewFile
from hf_hybrid_cache.prefix_store.filling import fill
from hf_hybrid_cache.prefix_store.states import states_since
from hf_hybrid_cache.processes import Agreement, Peers

from .groups import Group
from models.tiny_models import random_prompt, tiny_model
from prefix_store.prompts import Written, held


class FailedError(Exception):
    """An agreement raises it where another process has failed."""


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    with Group(2) as group:
        yield group


def agreement_of_all() -> Agreement:
    return Agreement(Peers(distributed.group.WORLD), lambda rank: FailedError(f"rank {rank} failed"))


def outcome(agreement: Agreement, failing_rank: int, place: str) -> str:
    """Do something in several steps, of which a process fails in one; return what each raises."""

    def act() -> None:
        for piece in agreement.in_turns(range(3)):
            if place == "between" and piece == 1 and distributed.get_rank() == failing_rank:
                raise ValueError("own")
        if place == "after" and distributed.get_rank() == failing_rank:
            raise ValueError("own")
        agreement.together(lambda: None)

    try:
        agreement.together(act)
    except (FailedError, ValueError) as error:
        return str(error)
    return "done"


def outcomes(failing_rank: int, place: str) -> list[str]:
    agreement = agreement_of_all()
    return [outcome(agreement, failing_rank, place), outcome(agreement, -1, "nowhere")]


@pytest.mark.parametrize("failing_rank", [0, 1])
@pytest.mark.parametrize("place", ["between", "after"])
def test_a_failure_is_told_once_and_nobody_is_left_waiting(failing_rank: int, place: str, group: Group):
    expected = [f"rank {failing_rank} failed"] * 2
    expected[failing_rank] = "own"
    assert group.call(outcomes, failing_rank, place) == [[each, "done"] for each in expected]


def told() -> tuple[list[int], str]:
    agreement, rank = agreement_of_all(), distributed.get_rank()
    _, numbers = agreement.numbers(lambda: rank + 5, int)
    assert agreement.same(lambda: "same", len) == "same"
    try:
        agreement.same(lambda: rank, int)
    except OutOfStepError as error:
        return numbers, str(error)
    return numbers, ""


def test_numbers_are_told_to_all_and_compared(group: Group):
    for numbers, error in group.call(told):
        assert numbers == [5, 6]
        assert "have different prompts, tokens or codes (0 and 1 of 2)" in error


def test_a_single_process_agrees_with_itself():
    agreement = Agreement(None, lambda rank: FailedError())
    assert agreement.numbers(lambda: "result", len) == ("result", [6])
    assert list(agreement.in_turns([1, 2])) == [1, 2]
    with pytest.raises(ZeroDivisionError):
        agreement.together(lambda: 1 // 0)


CACHES = {"full": DynamicHybridCache, "quantized": QuantizedHybridCache}


@torch.no_grad()
def filled_again(form: str, folder: str) -> list[bool]:
    """Write the own shard of a prompt in three nodes, fill another cache from each; return whether states are equal."""
    model, prompt, before, start, parts, are_equal = tiny_model("llama"), random_prompt(1, 1000), None, 0, [], []

    def new() -> HybridCache:
        return CACHES[form](model.config, group=distributed.group.WORLD)

    cache = new()
    for end in (300, 610, 1000):
        model(prompt[:, cache.get_seq_length() : end], **cache_argument(cache))
        contents, path = contents_of(cache), Path(folder, f"{distributed.get_rank()}.{end}")
        contents.settle()
        before, sections = states_since(start // 64 * 64, before, contents.layers, contents.stores)
        with path.open("wb") as file:
            NewFile({"states": before.to_json()}, sections, 64).write(file)
        parts.append(Written(path, end))
        start, again = end, new()
        fill(contents_of(again), parts)
        are_equal.append(all(map(torch.equal, held(again), held(cache))))
    return are_equal


@pytest.mark.parametrize("form", CACHES)
def test_nodes_of_shards_fill_shards_with_the_same_bits(form: str, group: Group, tmp_path: Path):
    assert group.call(filled_again, form, str(tmp_path)) == [[True] * 3] * 2
