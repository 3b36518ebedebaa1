"""Numbers that are infinite, not a number, or nearly so: the result is one where torch's attention gives one."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hf_hybrid_cache.kernels import BITS, BLOCK
from kernels.calls import BOUND, EVERY_WAY, FEW_WAYS, FLOAT_WAYS, OF_INTEGERS, Stored, check, make, run
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
    (out, _), expected = run(case, bits, way=way, **masks), torch_attention(case, masks)
    finite = np.isfinite(expected)
    assert (np.isfinite(out) == finite).all()
    bound = 2 * (OF_INTEGERS if way == "integers" else BOUND) * np.abs(case.values[np.isfinite(case.values)]).max()
    np.testing.assert_allclose(out[finite], expected[finite], rtol=0, atol=bound)
    count("calls with numbers that are not finite")


def in_storage(case: Case, storage: str) -> Stored:
    """Return what is stored, after keys and values of a case were changed."""
    return Stored(stored(case.keys, storage)[0], stored(case.values, storage)[0])


@pytest.mark.soak
@pytest.mark.parametrize("storage", STORAGES)
@search_at_random(60)
@given(data=st.data())
def test_bad_numbers_anywhere_give_what_torch_gives(storage: str, data: st.DataObject):
    """A mask may hide one of them, or with one token all."""
    draw = data.draw
    tokens = draw(st.sampled_from([1, BLOCK, TOKENS]) | st.integers(1, 200))
    case, _ = make(storage, tokens, 2, 2, draw(st.integers(1, 5)), seed=draw(st.integers(0, 9)))
    token = draw(st.sampled_from([0, tokens - 1, min(BLOCK - 1, tokens - 1)]) | st.integers(0, tokens - 1))
    for part in draw(st.lists(st.sampled_from(["keys", "values", "query"]), min_size=1, max_size=4)):
        states = getattr(case, part)
        place = [draw(st.integers(0, size - 1)) for size in states.shape]
        if part != "query" and draw(st.booleans()):
            place[2] = token
        states[tuple(place)] = draw(st.sampled_from(BAD))
    masks: dict[str, np.ndarray] = {}
    # Where all scores are minus infinity, ours takes the lowest number for a token that counts a little.
    lowest = [np.finfo(np.float32).min] * (tokens >= BLOCK)
    hidden = draw(st.sampled_from([None, 0, -np.inf, *lowest]))
    if hidden is not None:
        kind, (rest, dtype) = ("bias", (0, np.float32)) if hidden else ("visible", (1, np.uint8))
        masks[kind] = np.full((1, 1, 1, tokens), rest, dtype)
        masks[kind][..., token] = hidden
    check_like_torch(case, in_storage(case, storage), **masks)


@pytest.mark.parametrize("bits", [0x7FC00001, 0xFFFFFFFF, 0x7F800001, 0xFFC001FF, 0x7FC00040])
@pytest.mark.parametrize("token", [0, BLOCK + 3, 2 * BLOCK])
def test_any_bits_of_what_is_not_a_number_are_seen(bits: int, token: int):
    case, given = make("float32", 2 * BLOCK + 1)
    given.keys[0, 0, token, 9] = np.uint32(bits).view(np.float32)
    out, lse = run(case, given)
    assert np.isnan(out[0, 0, 0]).all()
    assert np.isnan(lse[0, 0, 0])


@FEW_WAYS
@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("bad", BAD)
def test_bad_numbers_in_full_precision_beside_codes_give_what_torch_gives(way: str, part: str, bad: float):
    for token in (3, BLOCK - 1, BLOCK + 2, BLOCK + 69):
        case, given = make("bfloat16", 70, group=4, first=1, coded=3)
        getattr(given, part)[0, 0, token, 5] = stored(np.array(bad), "bfloat16")[0]
        getattr(case, part)[0, 0, token if token < BLOCK else token + 3 * BLOCK, 5] = bad
        check_like_torch(case, given, way)


@EVERY_WAY
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("key_bits", [None, *BITS])
def test_a_bad_query_is_bad_alone(way: str, bad: float, key_bits: int | None):
    codes = {} if key_bits is None else {"first": 0, "coded": 2, "bits": (key_bits, 4)}
    if key_bits is None and way == "integers":
        pytest.skip("integers are for codes")
    case, given = make("bfloat16", 70, num_kv_heads=2, group=4, length=3, **codes)
    clean, _ = run(case, given, way=way)
    case.query[0, 2, 1, 7] = bad
    out, _ = run(case, given, way=way)
    assert not np.isfinite(out[0, 2, 1]).any()
    out[0, 2, 1] = clean[0, 2, 1]
    assert np.array_equal(out, clean)


@FLOAT_WAYS
def test_a_bad_key_touches_its_heads_alone(way: str):
    case, given = make("bfloat16", TOKENS, num_kv_heads=2, group=4)
    clean, _ = run(case, given, way=way)
    given.keys[0, 0, 70, 5] = 0x7FC0
    out, _ = run(case, given, way=way)
    assert np.isnan(out[0, :4]).all()
    assert np.array_equal(out[0, 4:], clean[0, 4:])


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("bad", BAD)
def test_value_when_not_finite_then_reaches_only_queries_that_see_it(storage: str, bad: float):
    case, given = make(storage, 300, length=300)
    given.values[0, 0, 200, 5] = stored(np.array(bad), storage)[0]
    out, _ = run(case, given, way="many", causal=True)
    assert np.isfinite(out[0, 0, :192]).all()
    assert not np.isfinite(out[0, 0, 200:, 5]).any()
    assert np.isfinite(np.delete(out[0, 0], 5, axis=1)).all()


@FLOAT_WAYS
@pytest.mark.parametrize("kind", ["visible", "bias"])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_row_that_sees_nothing_is_zero_as_torchs(way: str, kind: str, storage: str):
    case, given = make(storage, TOKENS, 2, 1, 2, 90 if way == "many" else 16)
    mask = np.ones((2, 1, case.query.shape[2], TOKENS), np.uint8)
    mask[1, :, :10] = 0
    with np.errstate(divide="ignore"):
        masks: dict[str, Any] = {kind: mask if kind == "visible" else np.log(mask.astype(np.float32))}
    check(case, given, way=way, **masks)  # whose log-sum-exp is minus infinity there
    assert (run(case, given, way=way, **masks)[0][1, :, :10] == 0).all()
    assert (torch_attention(case, masks)[1, :, :10] == 0).all()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("size", [300.0, 60_000.0])
@pytest.mark.parametrize("group", [1, 4])
def test_scores_far_beyond_half_precision_are_right(storage: str, size: float, group: int):
    """A single token takes all the weight: no two scores are near each other."""
    case, _ = make(storage, 1000, num_kv_heads=2, group=group)
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
