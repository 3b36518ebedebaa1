"""Fields and their digest."""

import pickle

import pytest

from hf_hybrid_cache.model_identity import Identity

ONE = Identity((("weights", "a81f0000" * 8), ("dtype", "float32"), ("layers", "0-3 of 4")))
OTHER = Identity((("weights", "03bc0000" * 8), ("dtype", "bfloat16"), ("layers", "0-3 of 4")))


def test_identity_when_written_and_read_then_is_the_same():
    again = Identity.from_json(ONE.to_json())
    assert again == ONE == pickle.loads(pickle.dumps(ONE))
    assert again.digest == ONE.digest
    assert list(again.fields) == ["weights", "dtype", "layers"]


def test_digest_is_of_32_bytes_and_of_names_texts_and_order():
    (first, second, third), digest = ONE.pairs, ONE.digest
    others = [(second, first, third), (first, second), (first, ("type", "float32"), third), (first, second, ("l", "0"))]
    assert len(digest) == 32
    assert len({digest, *(Identity(pairs).digest for pairs in others)}) == 5


def test_digest_when_texts_move_between_fields_then_differs():
    assert Identity((("a", "bc"),)).digest != Identity((("ab", "c"),)).digest
    assert Identity((("a", "b"), ("c", "d"))).digest != Identity((("a", 'b"],["c","d'),)).digest


def test_differences_name_fields_with_the_beginning_of_digests():
    assert ONE.differences(OTHER) == [
        "weights: 03bc0000… there, a81f0000… here",
        "dtype: bfloat16 there, float32 here",
    ]
    assert ONE.differences(ONE) == []
    assert ONE.differences(Identity(ONE.pairs[:2])) == ["layers: nothing there, 0-3 of 4 here"]


@pytest.mark.parametrize("text", ["[]", '[["a", "b"]]', '{"a": 1}', '{"a": {}}'])
def test_text_when_it_is_no_identity_then_is_refused(text: str):
    with pytest.raises(ValueError, match="no identity"):
        Identity.from_json(text)
