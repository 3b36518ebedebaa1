"""The index of n-grams finds what a search of the whole text finds."""

from hypothesis import given
from hypothesis import strategies as st

from hf_hybrid_cache.drafts import Index

from common.soak import search_at_random


def searched(text: list[int]) -> tuple[int, int] | None:
    """Return end and length of the newest match of the last 5 tokens, or 4, or 3, by comparing all places."""
    for size in (5, 4, 3):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:] and len(text) > size:
                length = size
                while length < min(16, end) and text[end - length - 1] == text[-length - 1]:
                    length += 1
                return end, length
    return None


@search_at_random(60)
@given(st.data())
def test_match_is_that_of_a_search_of_the_whole_text(data: st.DataObject):
    token = st.integers(0, data.draw(st.sampled_from([1, 2, 5])))
    text = data.draw(st.lists(token, max_size=80))
    index = Index(text)
    for added in [None, *data.draw(st.lists(token, max_size=40))]:
        if added is not None:
            index.add(added)
            text = [*text, added]
        assert index.newest_match() == searched(text)


def test_tokens_that_follow_repeat_after_the_end_of_the_text():
    index = Index([7, 1, 2, 3, 4, 1, 2, 3])
    end, length = index.newest_match() or (0, 0)
    assert (end, length) == (4, 3)
    assert index.following(end, 6) == [4, 1, 2, 3, 4, 1]
