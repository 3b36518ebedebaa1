"""Processes go on together or fail together, whichever of them fails, and wherever."""

import pytest
from torch import distributed

from hf_hybrid_cache.processes import Agreement, Peers

from .groups import NEEDS_GROUPS, Group

pytestmark = [pytest.mark.xdist_group("groups"), NEEDS_GROUPS]


class FailedError(Exception):
    """An agreement raises it where another process has failed."""


def agreement_of_all() -> Agreement:
    return Agreement(Peers(distributed.group.WORLD), lambda rank: FailedError(f"rank {rank} failed"))


def outcomes(failing_rank: int, place: str) -> list[str]:
    """Do something in several steps, of which a process fails in one, and once more without; return what was raised."""
    agreement, outcomes = agreement_of_all(), []

    def fail_at(here: str) -> None:
        if here == place and distributed.get_rank() == failing_rank:
            raise ValueError("own")

    def act() -> None:
        for piece in agreement.in_turns(range(3)):
            fail_at(f"piece {piece}")
        fail_at("after")
        agreement.together(lambda: None)

    for _ in range(2):
        try:
            agreement.together(act)
            outcomes.append("done")
        except (FailedError, ValueError) as error:
            outcomes.append(str(error))
        place = "nowhere"
    return outcomes


@pytest.mark.parametrize("failing_rank", [0, 1])
@pytest.mark.parametrize("place", ["piece 1", "after"])
def test_a_failure_is_told_once_and_nobody_is_left_waiting(failing_rank: int, place: str, group: Group):
    expected = [f"rank {failing_rank} failed"] * 2
    expected[failing_rank] = "own"
    assert group.call(outcomes, failing_rank, place) == [[each, "done"] for each in expected]
