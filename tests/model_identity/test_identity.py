"""Fields and their digest."""

import pickle
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given

from hf_hybrid_cache.model_identity import Identity, fields

from .noted_sources import NOTES, code_of, current_notes
from common.soak import search_at_random
from model_identity.models import differing, identity, new_llama

ONE = Identity((("weights", "a81f0000" * 8), ("dtype", "float32"), ("layers", "0-3 of 4")))
OTHER = Identity((("weights", "03bc0000" * 8), ("dtype", "bfloat16"), ("layers", "0-3 of 4")))
PAIRS = st.dictionaries(st.sampled_from("abc"), st.text(max_size=3), max_size=3).map(lambda each: (*each.items(),))


@search_at_random(50)
@given(st.lists(PAIRS, min_size=2, max_size=2))
@example([(("a", "bc"),), (("ab", "c"),)])
@example([(("a", "b"), ("c", "d")), (("a", 'b"],["c","d'),)])
@example([(("a", "b"), ("c", "d")), (("c", "d"), ("a", "b"))])
def test_digest_when_names_texts_or_order_differ_then_differs(pairs: list[tuple[tuple[str, str], ...]]):
    one, other = map(Identity, pairs)
    assert (one.digest == other.digest) == (pairs[0] == pairs[1])
    for each in (one, other):
        again = Identity.from_json(each.to_json())
        assert again == each == pickle.loads(pickle.dumps(each))
        assert again.digest == each.digest
        assert len(each.digest) == 32


def test_differences_name_fields_with_the_beginning_of_digests():
    assert ONE.differences(OTHER) == [
        "weights: 03bc0000… there, a81f0000… here",
        "dtype: bfloat16 there, float32 here",
    ]
    forms = (
        "none",
        "0-9: minmax bits=[4, 4] group_size=64",
        "0-9: minmax bits=[8, 8] group_size=64",
        "0-9: quanto bits=4",
    )
    told = ("full precision there, 4 bits here", "4 bits there, 8 bits here", "minmax 8 bits group_size=64 there")
    for (before, after), text in zip(pairwise(forms), told, strict=True):
        (line,) = Identity((("codecs", after),)).differences(Identity((("codecs", before),)))
        assert line.startswith(f"codecs: {text}")
    assert ONE.differences(ONE) == []
    assert ONE.differences(Identity(ONE.pairs[:2])) == ["layers: nothing there, 0-3 of 4 here"]


@pytest.mark.parametrize("text", ["[]", '[["a", "b"]]', '{"a": 1}', '{"a": {}}'])
def test_a_text_that_is_no_identity_is_refused(text: str):
    with pytest.raises(ValueError, match="no identity"):
        Identity.from_json(text)


# States of an older version of kernels, or of other libraries, are not used


def test_sources_of_numbers_that_changed_are_noted_anew():
    noted = NOTES.read_text(encoding="utf-8").splitlines()
    changed = sorted({line.split()[0] for line in set(noted).symmetric_difference(current_notes())})
    assert not changed, (
        f"The code of {', '.join(changed)} has changed. If its results have, even in the last bit, raise NUMBERS in "
        "hf_hybrid_cache/model_identity/fields.py: states that were kept are then not used. `make numbers` notes what "
        "the code is now."
    )


def test_comments_and_docstrings_do_not_count_as_code():
    one = '"""Doc."""\n\ndef f(x):  # why\n    """Doc\n    on."""\n    return "# no comment"\n'
    assert code_of(one) == 'def f(x):\n    return "# no comment"'


def test_states_of_other_numbers_or_libraries_differ(monkeypatch: pytest.MonkeyPatch):
    model = new_llama()
    before = identity(model)
    monkeypatch.setattr(fields, "NUMBERS", 0)
    assert differing(identity(model), before) == {"numbers"}
    monkeypatch.setattr(torch, "__version__", "1.0.0")
    assert differing(identity(model), before) == {"numbers", "torch"}
    assert before.fields["numba"]
