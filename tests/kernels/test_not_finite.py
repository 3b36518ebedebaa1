"""Numbers that are infinite, not a number, or nearly so: the result is one where torch's attention gives one."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hf_hybrid_cache.kernels import BLOCK
from kernels.calls import BOUND, EVERY_WAY, OF_BFLOAT16, OF_INTEGERS, Stored, make, query_of_prompt, run
from kernels.reference import ELEMENTS, Case, as_torch_mask, attention, stored

from common.soak import count, search_at_random

STORAGES = list(ELEMENTS)
BAD = [np.nan, np.inf, -np.inf]
TOKENS = 3 * BLOCK + 10


def torch_attention(case: Case, masks: dict[str, np.ndarray]) -> np.ndarray:
    """Attend by torch's plain operations in float32: its fused kernel loses infinite scores in half precision."""
    query, keys, values = (torch.from_numpy(part).float() for part in (case.query, case.keys, case.values))
    mask = as_torch_mask(case, **masks)
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(query, keys, values, mask, scale=0.125, enable_gqa=True).numpy()


def check_like_torch(case: Case, bits: Stored, way: str = "few", **masks: np.ndarray) -> None:
    """Check that the result is finite where torch's is, and then the same."""
    if way == "many":
        case = Case(query_of_prompt(case, bits), case.keys, case.values)
    (out, _), expected = run(case, bits, way=way, **masks), torch_attention(case, masks)
    finite = np.isfinite(expected)
    assert (np.isfinite(out) == finite).all()
    bound = {"few": BOUND, "integers": OF_INTEGERS, "many": max(BOUND, 2 * OF_BFLOAT16)}[way]
    largest = np.abs(case.values[np.isfinite(case.values)]).max()
    np.testing.assert_allclose(out[finite], expected[finite], rtol=0, atol=2 * bound * largest)
    count("calls with numbers that are not finite")


def in_storage(case: Case, storage: str) -> Stored:
    """Return what is stored, after keys and values of a case were changed."""
    return Stored(stored(case.keys, storage)[0], stored(case.values, storage)[0])


@EVERY_WAY
@pytest.mark.soak
@search_at_random(60)
@given(data=st.data())
def test_bad_numbers_anywhere_give_what_torch_gives(way: str, data: st.DataObject):
    """A mask may hide one of them from few queries, or with one token all. Some tokens may be codes."""
    draw, storage = data.draw, data.draw(st.sampled_from(STORAGES))
    coded = 3 if way == "integers" else draw(st.sampled_from([0, 0, 3]))
    tokens = draw(st.sampled_from([1, BLOCK, TOKENS]) | st.integers(1, 200))
    form = {"first": 1, "coded": coded, "bits": draw(st.sampled_from([(8, 4), (4, 2), (2, 8)]))} if coded else {}
    length = draw(st.integers(1, min(tokens, 70 if way == "many" else 3)))
    case, bits = make(storage, tokens, 2, 2, draw(st.integers(1, 5)), length, seed=draw(st.integers(0, 9)), **form)
    in_full = bits.keys.shape[2]
    token = draw(st.sampled_from([0, in_full - 1, min(BLOCK - 1, in_full - 1)]) | st.integers(0, in_full - 1))
    for part in draw(st.lists(st.sampled_from(["keys", "values", "query"]), min_size=1, max_size=4)):
        states, bad = getattr(case, part), draw(st.sampled_from(BAD))
        place = [draw(st.integers(0, size - 1)) for size in states.shape]
        if part != "query":
            place[2] = token if draw(st.booleans()) else draw(st.integers(0, in_full - 1))
            getattr(bits, part)[tuple(place)] = stored(np.array(bad), storage)[0]
            place[2] += 64 * coded if place[2] >= 64 else 0
        states[tuple(place)] = bad
    masks: dict[str, np.ndarray] = {}
    # Where all scores are minus infinity, ours takes the lowest number for a token that counts a little.
    lowest = [np.finfo(np.float32).min] * (tokens >= BLOCK)
    hidden = draw(st.sampled_from([None, 0, -np.inf, *lowest])) if way == "few" and not coded else None
    if hidden is not None:
        kind, (rest, dtype) = ("bias", (0, np.float32)) if hidden else ("visible", (1, np.uint8))
        masks[kind] = np.full((1, 1, 1, tokens), rest, dtype)
        masks[kind][..., token] = hidden
    check_like_torch(case, bits, way, **masks)


@pytest.mark.parametrize("bits", [0x7FC00001, 0xFFFFFFFF, 0x7F800001, 0xFFC001FF, 0x7FC00040])
def test_any_bits_of_what_is_not_a_number_are_seen(bits: int):
    for token in (0, BLOCK + 3, 2 * BLOCK):
        case, given = make("float32", 2 * BLOCK + 1)
        given.keys[0, 0, token, 9] = np.uint32(bits).view(np.float32)
        assert all(np.isnan(result).all() for result in run(case, given))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("bad", BAD)
def test_value_when_not_finite_then_reaches_only_queries_that_see_it(storage: str, bad: float):
    case, given = make(storage, 300, length=300)
    given.values[0, 0, 200, 5] = stored(np.array(bad), storage)[0]
    out, _ = run(case, given, way="many", causal=True)
    assert np.isfinite(out[0, 0, :192]).all()
    assert not np.isfinite(out[0, 0, 200:, 5]).any()
    assert np.isfinite(np.delete(out[0, 0], 5, axis=1)).all()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("size", [300.0, 60_000.0])
def test_scores_far_beyond_half_precision_are_right(storage: str, size: float):
    """A single token takes all the weight: no two scores are near each other."""
    case, _ = make(storage, 1000, num_kv_heads=2, group=4)
    for part in ("query", "keys", "values"):
        numbers = np.clip(getattr(case, part) * size / 4, -size, size)
        setattr(case, part, stored(numbers, "float16" if part == "query" else storage)[1])
    out, lse = run(case, in_storage(case, storage))
    expected, expected_lse = attention(case, 0.125)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-3 * size if size < 1000 else BOUND * size)
    np.testing.assert_allclose(lse, expected_lse, rtol=BOUND)


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_products_beyond_float32_are_not_a_number_as_torchs(storage: str):
    case, _ = make(storage, 100)
    case.keys, case.query = stored(case.keys * 1e37, storage)[1], case.query * 1e30
    assert np.isnan(run(case, in_storage(case, storage))[0]).all()
    assert np.isnan(torch_attention(case, {})).all()
