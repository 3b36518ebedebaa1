"""States of an older version of kernels, or of other libraries, are not used."""

import pytest
import torch

from hf_hybrid_cache.model_identity import fields

from .noted_sources import NOTES, code_of, current_notes
from model_identity.models import differing, identity, new_llama


def test_sources_of_numbers_when_changed_then_are_noted_anew():
    noted = NOTES.read_text(encoding="utf-8").splitlines()
    changed = sorted({line.split()[0] for line in set(noted).symmetric_difference(current_notes())})
    assert not changed, (
        f"The code of {', '.join(changed)} has changed. If its results have, even in the last bit, raise NUMBERS in "
        "hf_hybrid_cache/model_identity/fields.py: states that were kept are then not used. `make numbers` notes what "
        "the code is now."
    )


def test_code_when_only_told_otherwise_then_is_the_same():
    one = '"""Doc."""\n\ndef f(x):  # why\n    """Doc\n    on."""\n    return "# no comment"\n'
    assert code_of(one) == 'def f(x):\n    return "# no comment"'


def test_states_when_of_other_numbers_or_libraries_then_differ(monkeypatch: pytest.MonkeyPatch):
    model = new_llama()
    before = identity(model)
    monkeypatch.setattr(fields, "NUMBERS", 0)
    assert differing(identity(model), before) == {"numbers"}
    monkeypatch.setattr(torch, "__version__", "1.0.0")
    assert differing(identity(model), before) == {"numbers", "torch"}
    assert before.fields["numba"]
