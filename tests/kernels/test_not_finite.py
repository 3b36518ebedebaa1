"""Numbers that are infinite, not a number, or nearly so: the result is one where torch's attention gives one."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hf_hybrid_cache.kernels import BLOCK
from kernels import test_quantized_attention
from kernels.reference import ELEMENTS, Case, attention, stored
from kernels.test_attention import BOUND, make, run
from kernels.test_quantized_attention import BOUNDS, EVERY_WAY

from common.soak import count, search_at_random

STORAGES = list(ELEMENTS)
BAD = [np.nan, np.inf, -np.inf]
TOKENS = 3 * BLOCK + 10


def torch_attention(case: Case, scale: float, masks: dict[str, np.ndarray]) -> np.ndarray:
    """Attend by torch's plain operations in float32: its fused kernel loses infinite scores in half precision."""
    query, keys, values = (torch.from_numpy(part).float() for part in (case.query, case.keys, case.values))
    mask = torch.from_numpy(masks["bias"]) if "bias" in masks else None
    if "visible" in masks:
        mask = torch.from_numpy(masks["visible"]).bool()
    with sdpa_kernel(SDPBackend.MATH):
        result = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
    return result.numpy()


def check_like_torch(out: np.ndarray, case: Case, masks: dict[str, np.ndarray], bound: float = BOUND) -> None:
    """Check that the result is finite where torch's is, and then the same."""
    expected = torch_attention(case, 0.125, masks)
    assert (np.isfinite(out) == np.isfinite(expected)).all()
    largest = np.abs(case.values[np.isfinite(case.values)]).max()
    finite = np.isfinite(expected)
    np.testing.assert_allclose(out[finite], expected[finite], rtol=0, atol=2 * bound * largest)
    count("calls with numbers that are not finite")


def mask_at(kind: str, position: int, tokens: int) -> dict[str, np.ndarray]:
    """A mask that hides one token."""
    if kind == "visible":
        visible = np.ones((1, 1, 1, tokens), np.uint8)
        visible[..., position] = 0
        return {"visible": visible}
    if kind == "none":
        return {}
    bias = np.zeros((1, 1, 1, tokens), np.float32)
    bias[..., position] = -np.inf if kind == "bias" else np.finfo(np.float32).min
    return {"bias": bias}


def spoil(case: Case, part: str, bad: float, position: int, storage: str) -> tuple[np.ndarray, np.ndarray]:
    """Put a bad number into a part of a case; the bits of keys and values."""
    states = getattr(case, part)
    states[0, 0, position if part != "query" else 0, 5] = bad
    return stored(case.keys, storage)[0], stored(case.values, storage)[0]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("part", ["keys", "values", "query"])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("mask", ["none", "visible", "bias", "lowest"])
def test_a_bad_number_anywhere_gives_what_torch_gives(storage: str, part: str, bad: float, mask: str):
    for position in (0, BLOCK - 1, BLOCK, BLOCK + 40, TOKENS - 1):
        case, _ = make(storage, TOKENS, num_kv_heads=2, group=4)
        bits = spoil(case, part, bad, position, storage)
        masks = mask_at(mask, position, TOKENS)
        check_like_torch(run(case, bits, 0.125, **masks)[0], case, masks)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_hidden_value_that_is_bad_is_not_lost_in_a_row_that_sees_nothing(storage: str):
    case, _ = make(storage, 1, num_kv_heads=2, group=4)
    bits = spoil(case, "values", np.nan, 0, storage)
    masks = mask_at("visible", 0, 1)
    check_like_torch(run(case, bits, 0.125, **masks)[0], case, masks)


@pytest.mark.soak
@search_at_random(40, 1000)
@given(data=st.data())
def test_bad_numbers_at_random_places_give_what_torch_gives(data: st.DataObject):
    draw = data.draw
    storage, tokens = draw(st.sampled_from(STORAGES)), draw(st.integers(1, 200))
    group, seed = draw(st.integers(1, 5)), draw(st.integers(0, 9))
    case, _ = make(storage, tokens, batch=2, num_kv_heads=2, group=group, seed=seed)
    for part in draw(st.lists(st.sampled_from(["keys", "values", "query"]), min_size=1, max_size=4)):
        states = getattr(case, part)
        place = tuple(draw(st.integers(0, size - 1)) for size in states.shape)
        states[place] = draw(st.sampled_from(BAD))
    hidden = draw(st.integers(0, tokens - 1))
    masks = mask_at(draw(st.sampled_from(["none", "visible", "bias", "lowest"])), hidden, tokens)
    bits = stored(case.keys, storage)[0], stored(case.values, storage)[0]
    check_like_torch(run(case, bits, 0.125, **masks)[0], case, masks)


@pytest.mark.parametrize("bits", [0x7FC00001, 0xFFFFFFFF, 0x7F800001, 0xFFC001FF, 0x7FC00040])
@pytest.mark.parametrize("token", [0, BLOCK + 3, 2 * BLOCK])
def test_any_bits_of_what_is_not_a_number_are_seen(bits: int, token: int):
    case, (keys, values) = make("float32", 2 * BLOCK + 1)
    keys = keys.copy()
    keys[0, 0, token, 9] = np.uint32(bits).view(np.float32)
    out, lse = run(case, (keys, values), 0.125)
    assert np.isnan(out[0, 0, 0]).all()
    assert np.isnan(lse[0, 0, 0])


@pytest.mark.parametrize("part", ["keys", "query"])
def test_other_rows_and_heads_are_not_touched_by_a_bad_one(part: str):
    case, bits = make("bfloat16", TOKENS, num_kv_heads=2, group=4)
    clean, _ = run(case, bits, 0.125)
    out, _ = run(case, spoil(case, part, np.nan, 70, "bfloat16"), 0.125)
    bad_heads = 1 if part == "query" else 4
    assert np.isnan(out[0, :bad_heads]).all()
    assert np.array_equal(out[0, bad_heads:], clean[0, bad_heads:])


@EVERY_WAY
@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("bad", BAD)
def test_bad_numbers_in_full_precision_beside_codes_give_what_torch_gives(is_integer: bool, part: str, bad: float):
    for token in (3, BLOCK - 1, BLOCK + 2, BLOCK + 69):
        case, (keys, values), quantized = test_quantized_attention.make(quantized=3, last=70, group=4)
        block, place = divmod(token, BLOCK)
        bad_bits = stored(np.array(bad), "bfloat16")[0]
        if part == "keys":
            keys[block, 0, 5, place] = bad_bits
        else:
            values[block, 0, place, 5] = bad_bits
        getattr(case, part)[0, 0, token if block == 0 else token + 3 * BLOCK, 5] = bad
        out, _ = test_quantized_attention.run((case, (keys, values), quantized), is_integer)
        check_like_torch(out, case, {}, BOUNDS[is_integer])


@EVERY_WAY
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_query_over_codes_is_bad_alone(is_integer: bool, bad: float):
    made = test_quantized_attention.make(quantized=3, group=4)
    clean, _ = test_quantized_attention.run(made, is_integer)
    made[0].query[0, 2, 0, 7] = bad
    out, _ = test_quantized_attention.run(made, is_integer)
    assert not np.isfinite(out[0, 2]).any()
    assert np.array_equal(np.delete(out, 2, axis=1), np.delete(clean, 2, axis=1))


@pytest.mark.parametrize("masks", [{"visible": np.zeros((1, 1, 1, TOKENS), np.uint8)}, mask_at("bias", 0, TOKENS)])
def test_a_row_that_sees_nothing_is_zero_as_torchs(masks: dict[str, Any]):
    if "bias" in masks:
        masks["bias"][:] = -np.inf
    case, bits = make("bfloat16", TOKENS, group=2)
    out, _ = run(case, bits, 0.125, **masks)
    assert (out == 0).all()
    assert (torch_attention(case, 0.125, masks) == 0).all()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("size", [300.0, 60_000.0])
@pytest.mark.parametrize("group", [1, 4])
def test_scores_far_beyond_half_precision_are_right(storage: str, size: float, group: int):
    """A single token takes all the weight: no two scores are near each other."""
    case, _ = make(storage, 1000, num_kv_heads=2, group=group)
    key_bits, case.keys = stored(np.clip(case.keys * size / 4, -size, size), storage)
    value_bits, case.values = stored(np.clip(case.values * size / 4, -size, size), storage)
    case.query = stored(np.clip(case.query * size / 4, -size, size), "float16")[1]
    out, lse = run(case, (key_bits, value_bits), 0.125)
    expected, expected_lse = attention(case, 0.125)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-3 * size if size < 1000 else BOUND * size)
    np.testing.assert_allclose(lse, expected_lse, rtol=BOUND)


@pytest.mark.parametrize("score", [3e9, -3e9, 2e20, 1e38, -1e38])
def test_equal_scores_of_any_size_give_the_mean(score: float):
    case, _ = make("float32", 1000, group=2)
    key_bits, case.keys = stored(np.full(case.keys.shape, score / 64), "float32")
    case.query = np.ones(case.query.shape)
    out, _ = run(case, (key_bits, stored(case.values, "float32")[0]), 1.0)
    np.testing.assert_allclose(out[0, 0, 0], case.values[0, 0].mean(axis=0), atol=1e-5)


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_products_beyond_float32_are_not_a_number_as_torchs(storage: str):
    case, (_, value_bits) = make(storage, 100)
    key_bits, case.keys = stored(case.keys * 1e37, storage)
    case.query = case.query * 1e30
    out, _ = run(case, (key_bits, value_bits), 0.125)
    assert np.isnan(out).all()
    assert np.isnan(torch_attention(case, 0.125, {})).all()
