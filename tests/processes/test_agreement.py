"""Processes go on together or fail together, whichever of them fails, and wherever."""

from collections.abc import Iterator

import pytest
from torch import distributed

from hf_hybrid_cache import OutOfStepError
from hf_hybrid_cache.processes import Agreement, Peers

from .groups import Group


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
