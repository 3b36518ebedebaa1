"""Drafts gain where a text repeats itself, and lose next to nothing where it does not, whatever a pass costs."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_hybrid_cache.drafts import DraftLength, Index

from common.soak import search_at_random

LENGTH = 500
_random = random.Random(0)
DOCUMENT = [_random.randrange(40_000) for _ in range(3000)]
ANSWERS = {
    "a copy": DOCUMENT[1000 : 1000 + LENGTH],
    "pieces": [DOCUMENT[at + index] for at in _random.sample(range(2900), LENGTH // 10) for index in range(10)],
}
# Steps with a match, of that length; how many tokens of a draft are chosen, and whether the token after a match comes.
PHASE = st.tuples(st.integers(1, 150), st.integers(0, 16), st.integers(0, 15), st.booleans())


@search_at_random(60)
@given(row=st.floats(0.01, 2), more=st.floats(0, 4), phases=st.lists(PHASE, min_size=1, max_size=5))
def test_rejected_drafts_take_a_hundredth_of_the_time_or_are_unforeseen(
    row: float, more: float, phases: Sequence[tuple[int, int, int, bool]]
):
    """A pass of `n` drafted tokens takes `1 + more + n * row` steps, which nobody knows before the first one."""
    rule, took, tokens = DraftLength(), 0.0, 0
    for steps, length, chosen, is_next in phases:
        for _ in range(steps):
            rule.note_prediction(length, is_next)
            number = rule.tokens(length, 15)
            accepted = min(number, chosen)
            took_now = 1 + number * row + more if number else 1.0
            if number:
                rule.note_draft(number, accepted, 0.01 * took_now)
            else:
                rule.note_step(0.01)
            took, tokens = took + took_now, tokens + 1 + accepted
            assert took <= 1.01 * tokens + 1 + 6 * (row + more)


@pytest.mark.parametrize(("answer", "times"), [("a copy", 3), ("pieces", 1.2)])
def test_answer_that_repeats_the_document_takes_fewer_steps(answer: str, times: float):
    index, rule, text, took, position = Index(DOCUMENT), DraftLength(), ANSWERS[answer], 0.0, 0
    while position < LENGTH:
        match = index.newest_match()
        number = 0 if match is None else rule.tokens(match.length, min(15, LENGTH - position - 1))
        draft = [] if match is None else index.following(match.end, number)
        accepted = next((n for n in range(number) if draft[n] != text[position + n]), number)
        for token in text[position : position + 1 + accepted]:
            if (match := index.newest_match()) is not None:
                rule.note_prediction(match.length, index.following(match.end, 1) == [token])
            index.add(token)
        if number:
            rule.note_draft(number, accepted, 0.01 * (1 + 0.2 * number))
        else:
            rule.note_step(0.01)
        took, position = took + 1 + 0.2 * number, position + 1 + accepted
    assert took <= LENGTH / times


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


def test_a_first_pass_that_has_waited_does_not_end_drafts():
    rule = DraftLength()
    for _ in range(3):
        rule.note_step(1)
        rule.note_prediction(16, True)
    rule.note_draft(1, 1, 5)
    for _ in range(100):
        rule.note_step(1)
        rule.note_prediction(16, True)
    assert rule.tokens(16, 15) > 1
