"""Drafts gain where a text repeats itself, and lose next to nothing where it does not, whatever a pass costs."""

import random
from collections.abc import Callable

import pytest

from hf_hybrid_cache.drafts import DraftLength, Index

Cost = Callable[[int], float]
# Steps that a pass of so many rows takes.
COSTS: dict[str, Cost] = {
    "a call": lambda rows: 1 + 0.2 * (rows - 1),
    "a call, long context": lambda rows: 1 + 0.05 * (rows - 1),
    "outside of the call": lambda rows: 1 if rows == 1 else 4 + 0.4 * rows,
    "as many steps": lambda rows: rows,
}
LENGTH = 500
_random = random.Random(0)
DOCUMENT = [_random.randrange(40_000) for _ in range(3000)]
ANSWERS = {
    "other words": [_random.randrange(40_000) for _ in range(LENGTH)],
    "few words": [_random.randrange(7) for _ in range(LENGTH)],
    "a copy": DOCUMENT[1000 : 1000 + LENGTH],
    "pieces": [DOCUMENT[at + index] for at in _random.sample(range(2900), LENGTH // 10) for index in range(10)],
}


def steps_taken(answer: list[int], cost: Cost) -> float:
    """Decode an answer that is given, with drafts; return what it took, in steps."""
    index, rule, took, position = Index(DOCUMENT), DraftLength(), 0.0, 0
    while position < len(answer):
        match = index.newest_match()
        number = 0 if match is None else rule.tokens(match.length, min(15, len(answer) - position - 1))
        draft = [] if match is None else index.following(match.end, number)
        accepted = next((n for n in range(number) if draft[n] != answer[position + n]), number)
        for token in answer[position : position + 1 + accepted]:
            if (match := index.newest_match()) is not None:
                rule.note_prediction(match.length, index.following(match.end, 1) == [token])
            index.add(token)
        if number:
            rule.note_draft(number, accepted, 0.01 * cost(1 + number))
        else:
            rule.note_step(0.01 * cost(1))
        took, position = took + cost(1 + number), position + 1 + accepted
    return took


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("answer", ANSWERS)
def test_answer_takes_a_hundredth_and_a_draft_more_at_most(answer: str, cost: str):
    first_draft = COSTS[cost](6) - 1  # of which nothing was measured before
    assert steps_taken(ANSWERS[answer], COSTS[cost]) <= LENGTH * 1.01 + 1 + first_draft


@pytest.mark.parametrize(("answer", "times"), [("a copy", 3), ("pieces", 1.2)])
def test_answer_that_repeats_the_document_takes_fewer_steps(answer: str, times: float):
    assert steps_taken(ANSWERS[answer], COSTS["a call"]) <= LENGTH / times


def test_drafts_become_longer_where_they_are_accepted_and_end_elsewhere():
    rule = DraftLength()
    for _ in range(3):
        rule.note_step(1)
    first = rule.tokens(3, 15)
    for _ in range(30):
        rule.note_prediction(3, False)
        rule.note_prediction(16, True)
        rule.note_draft(5, 5, 2)
    assert rule.tokens(3, 15) == 0 < first < rule.tokens(16, 15) == 15
    assert rule.tokens(16, 4) == 4
