"""JSON with some parts replaced, renamed or left out."""

import copy
from typing import Any

import hypothesis.strategies as st

NUMBERS = st.one_of(
    st.integers(-3, 9), st.sampled_from([2**31, 2**63, 10**30, 10**400, 1e-320, 1e308]), st.floats(allow_nan=True)
)
# Of paths, devices, attributes and types.
TEXTS = st.sampled_from(
    ["/etc/passwd", "../x", "cuda:0", "meta", "__class__", "update", "keys", "x/y", "\ud800", "F32"]
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS, st.text(max_size=20))
ANY_JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
# Not of any JSON, or of too deep a one.
NO_JSON = st.one_of(
    st.binary(max_size=200), st.sampled_from([b"", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe{", b"1e999"])
)


@st.composite
def altered(draw: st.DrawFn, valid: Any) -> Any:
    """`valid`, of which one or a few parts are replaced, renamed or left out."""
    content = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(content))
        if not places:
            break
        holder, key = draw(st.sampled_from(places))
        if draw(st.booleans()):
            holder[key] = draw(ANY_JSON)
        else:
            part = holder.pop(key)
            if isinstance(holder, dict) and draw(st.booleans()):
                holder[draw(TEXTS)] = part
    return content


def _places(content: Any) -> Any:
    """Yield each part of some JSON, as its container and its key."""
    if isinstance(content, (dict, list)):
        keys = list(content) if isinstance(content, dict) else range(len(content))
        for key in keys:
            yield content, key
            yield from _places(content[key])
