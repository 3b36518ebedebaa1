"""The kernel against attention in float64 on the values that are stored."""

import os
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hf_hybrid_cache.kernels import BLOCK, Shape, Workspace, value_width
from hf_hybrid_cache.kernels.vector.processor import has_bfloat16_products
from kernels.few_queries import attend_to
from kernels.reference import ELEMENTS, Case, attention, causal_as_visible, random_masks, stored, to_blocks

from common.programs import run_program
from common.slow import combination
from common.soak import count, search_at_random

STORAGES = list(ELEMENTS)
# Relative to the largest value, for scores up to this: float32 holds a score to 6e-8 of itself, and adds up a few
# such roundings. torch's own attention in float32 reaches 2.8e-6 there.
BOUND, SCORES = 4e-6, 20.0


def run(case: Case, bits: tuple[np.ndarray, np.ndarray], scale: float, **masks) -> tuple[np.ndarray, np.ndarray]:
    batch, _, length, key_dim = case.query.shape
    num_kv_heads, value_dim = case.keys.shape[1], case.values.shape[3]
    workspace = Workspace(Shape(batch, num_kv_heads, case.group, length, key_dim, value_dim))
    keys = to_blocks(bits[0], transposed=True, width=key_dim)
    values = to_blocks(bits[1], transposed=False, width=value_width(value_dim))
    out = attend_to(workspace, case.query, keys, values, case.tokens, scale, **causal_as_visible(case, **masks))
    return out, workspace.lse.copy()


def make(
    storage: str,
    tokens: int,
    batch: int = 1,
    num_kv_heads: int = 1,
    group: int = 1,
    length: int = 1,
    key_dim: int = 64,
    value_dim: int | None = None,
    seed: int = 0,
    rounded_query: bool = False,
) -> tuple[Case, tuple[np.ndarray, np.ndarray]]:
    """Random numbers; those of the query in `storage`, too, if it is rounded."""
    generator = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(np.float32)

    query = normal(batch, num_kv_heads * group, length, key_dim)
    query = stored(query, storage)[1] if rounded_query else query.astype(np.float64)
    key_bits, keys = stored(normal(batch, num_kv_heads, tokens, key_dim), storage)
    value_bits, values = stored(normal(batch, num_kv_heads, tokens, value_dim or key_dim), storage)
    return Case(query, keys, values), (key_bits, value_bits)


def scale_for_scores(case: Case, highest: float) -> float:
    """Return the scale with which the highest score is `highest`."""
    products = np.einsum("bhqd,bhtd->bhqt", case.query, np.repeat(case.keys, case.group, axis=1))
    return float(np.float32(highest / np.abs(products).max()))


def check(case: Case, bits: tuple[np.ndarray, np.ndarray], scale: float, **masks) -> None:
    out, lse = run(case, bits, scale, **masks)
    expected, expected_lse = attention(case, scale, **masks)
    np.testing.assert_allclose(out, expected, rtol=0, atol=BOUND * np.abs(case.values).max())
    np.testing.assert_allclose(lse, expected_lse, rtol=BOUND, atol=BOUND)


@pytest.mark.covering(2)
@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 1000, 64 * BLOCK + 1, 20_000])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("storage", STORAGES)
def test_lengths_straddle_blocks_and_parts(storage: str, group: int, tokens: int):
    check(*make(storage, tokens, num_kv_heads=2, group=group), scale=0.125)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16, 33])
@pytest.mark.parametrize("storage", STORAGES)
def test_attention_when_query_heads_are_grouped_then_is_exact(storage: str, group: int):
    check(*make(storage, 300, num_kv_heads=2, group=group), scale=0.125)


@pytest.mark.parametrize(
    "dims", [(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256), (24, 12), (1, 1), (40, 72)]
)
@pytest.mark.parametrize("storage", STORAGES)
def test_attention_when_head_dims_vary_then_is_exact(storage: str, dims: tuple[int, int]):
    check(*make(storage, 200, num_kv_heads=2, group=3, key_dim=dims[0], value_dim=dims[1]), scale=dims[0] ** -0.5)


@pytest.mark.covering(2)
@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK + 1, 1000, 64 * BLOCK + 1])
@pytest.mark.parametrize("key_dim", [1, 2, 24, 64, 80, 113, 256])
@pytest.mark.parametrize("group", [1, 4, 5, 16])
def test_a_query_in_the_type_of_the_keys_is_as_exact(group: int, key_dim: int, tokens: int):
    """Dot products of bfloat16 are used, where the processor has them."""
    case, bits = make("bfloat16", tokens, 2, 2, group, key_dim=key_dim, value_dim=40, rounded_query=True)
    check(case, bits, scale=key_dim**-0.5)


@pytest.mark.skipif(not has_bfloat16_products(), reason="the processor has no dot products of bfloat16 (AVX512-BF16)")
@pytest.mark.parametrize("size", [1.0, 2.0**60, 2.0**-60])
def test_dot_products_of_bfloat16_are_those_of_float32(size: float, monkeypatch: pytest.MonkeyPatch):
    case, bits = make("bfloat16", 500, group=5, length=3, rounded_query=True)
    case.query *= size
    options = {"scale": 0.125 / size, "causal": True}
    with_them = run(case, bits, **options)
    monkeypatch.setattr("hf_hybrid_cache.kernels.attention.workspace.has_bfloat16_products", lambda: False)
    without = run(case, bits, **options)
    for ours, plain in zip(with_them, without, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-6)
    assert (with_them[0] != without[0]).any()  # the order of sums is another one


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("tokens", [16, 17, 64, 65, 70, 500])
def test_causal_attention_when_queries_follow_then_see_more_tokens(tokens: int, length: int):
    check(*make("bfloat16", tokens, batch=2, num_kv_heads=2, group=2, length=length), scale=0.125, causal=True)


def test_high_scores_when_many_heads_then_error_is_that_of_float32():
    case, bits = make("float32", 85, batch=3, num_kv_heads=3, group=5, length=5, key_dim=114, value_dim=5, seed=85)
    check(case, bits, scale_for_scores(case, SCORES))


@pytest.mark.soak
@search_at_random(150, 2000)
@given(data=st.data())
def test_attention_when_shapes_masks_scores_are_random_then_is_exact(data: st.DataObject):
    draw = data.draw
    storage = draw(st.sampled_from(STORAGES))
    tokens = draw(st.one_of(st.integers(1, 200), st.integers(1, 5000)))
    sizes = {
        "batch": draw(st.integers(1, 3)),
        "num_kv_heads": draw(st.integers(1, 3)),
        "group": draw(st.integers(1, 8)),
        "length": draw(st.integers(1, min(16, tokens))),
        "key_dim": draw(st.integers(1, 140)),
        "value_dim": draw(st.integers(1, 140)),
    }
    seed = draw(st.integers(0, 2**32 - 1))
    case, bits = make(storage, tokens, **sizes, seed=seed, rounded_query=draw(st.booleans()))
    scale = scale_for_scores(case, draw(st.floats(0.01, 1)) * SCORES)
    check(case, bits, scale, **random_masks(draw, case, seed))
    count("attention compared with float64")


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("hidden", [slice(0, 64), slice(0, 100), slice(64, 128), slice(30, 290), slice(0, 299)])
def test_attention_when_masks_hide_whole_blocks_then_is_exact(storage: str, hidden: slice):
    case, bits = make(storage, 300, batch=2, num_kv_heads=2, group=2)
    visible = np.ones((2, 1, 1, 300), np.uint8)
    visible[1, :, :, hidden] = 0
    check(case, bits, 0.125, visible=visible)


def test_a_row_that_sees_nothing_is_zero_with_a_log_sum_of_minus_infinity():
    case, bits = make("bfloat16", 150, batch=2, group=3)
    for masks in (
        {"visible": np.array([1, 0], np.uint8).reshape(2, 1, 1, 1).repeat(150, axis=3)},
        {"bias": np.array([0, -np.inf], np.float32).reshape(2, 1, 1, 1).repeat(150, axis=3)},
    ):
        out, lse = run(case, bits, 0.125, **masks)
        assert (out[1] == 0).all()
        assert np.isneginf(lse[1]).all()
        assert np.isfinite(lse[0]).all()
        check(case, bits, 0.125, **masks)


def test_the_lowest_finite_mask_everywhere_is_attention_to_all_alike():
    """Transformers masks with it; a row that is masked throughout must not become empty."""
    case, bits = make("float32", 100)
    bias = np.full((1, 1, 1, 100), np.finfo(np.float32).min)
    out, _ = run(case, bits, 0.125, bias=bias)
    np.testing.assert_allclose(out[0, 0, 0], case.values[0, 0].mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_one_dominant_key_takes_all_the_weight(storage: str, size: float):
    case, bits = make(storage, 200, group=4)
    keys = np.zeros(case.keys.shape, np.float32)
    keys[0, 0, 77] = np.float32(size)
    key_bits, case.keys = stored(keys, storage)
    case.query = np.full(case.query.shape, np.copysign(1.0, size))
    out, lse = run(case, (key_bits, bits[1]), 1 / 64)
    assert (out[0] == case.values[0, 0, 77].astype(np.float32)).all()
    np.testing.assert_allclose(lse, np.abs(case.keys[0, 0, 77, 0]), rtol=1e-6)


@pytest.mark.parametrize("score", [0.0, 1e4, -1e4])
def test_equal_scores_give_the_mean(score: float):
    case, bits = make("float32", 3000, group=2)
    key_bits, case.keys = stored(np.full(case.keys.shape, score / 64), "float32")
    case.query = np.ones(case.query.shape)
    out, lse = run(case, (key_bits, bits[1]), 1.0)
    np.testing.assert_allclose(out[0, 0, 0], case.values[0, 0].mean(axis=0), atol=BOUND * 4)
    np.testing.assert_allclose(lse, score + np.log(3000), rtol=BOUND, atol=BOUND)


@pytest.mark.parametrize("storage", ["float32", "float16"])
def test_denormal_keys_and_values_count(storage: str):
    case, bits = make(storage, 130)
    tiny = {"float32": 1e-40, "float16": 1e-6}[storage]
    value_bits, case.values = stored(case.values * tiny, storage)
    out, _ = run(case, (bits[0], value_bits), 0.125)
    expected, _ = attention(case, 0.125)
    np.testing.assert_allclose(
        out, expected, atol=2e-6 * np.abs(case.values).max() + np.finfo(np.float32).smallest_subnormal
    )


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_when_visible_then_reaches_the_result(storage: str, bad: float):
    case, bits = make(storage, 130)
    values = case.values.copy()
    values[0, 0, 100, 3] = bad
    value_bits, _ = stored(values, storage)
    out, _ = run(case, (bits[0], value_bits), 0.125)
    assert not np.isfinite(out[0, 0, 0, 3])
    assert np.isfinite(np.delete(out[0, 0, 0], 3)).all()


def test_offsets_when_beyond_32_bits_then_attention_is_exact():
    """Keys of more than 2^31 elements; address space is mapped, and only the blocks that are visible get memory."""
    tokens, heads, dim = 131_072 + 10, 136, 128
    blocks = -(-tokens // BLOCK)
    # One page of zeros stands behind every block that is only read.
    keys = np.zeros((blocks, heads, dim, BLOCK), np.uint16)
    values = np.zeros((blocks, heads, BLOCK, dim), np.uint16)
    assert keys.size > 2**31
    keys[-1, -1] = np.uint16(0x3F80)
    values[-1, -1, 9] = np.uint16(0x4040)
    workspace = Workspace(Shape(1, heads, 1, 1, dim, dim))
    out = attend_to(workspace, np.ones((1, heads, 1, dim)), keys, values, tokens, 1.0)
    expected = 3 * np.exp(128.0) / (10 * np.exp(128.0) + tokens - 10)
    np.testing.assert_allclose(out[0, -1], expected, rtol=1e-6)
    assert (out[0, :-1] == 0).all()
    np.testing.assert_allclose(workspace.lse[0, :-1, 0], np.log(tokens), rtol=1e-6)


PORTABLE = {
    "without any extension": ("x86-64", ""),
    "AVX2 without half precision": ("x86-64", "+avx,+avx2,+fma"),
    "AVX2": ("x86-64-v3", "+avx,+avx2,+fma,+f16c"),
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names processors of the x86-64 family")
@pytest.mark.slow
@pytest.mark.parametrize(
    "processor", [each if each == "without any extension" else combination(each) for each in PORTABLE]
)
def test_the_kernel_is_right_on_lesser_processors(processor: str, tmp_path: Path):
    """The kernels are compiled anew for them, in a process of its own."""
    name, features = PORTABLE[processor]
    program = """
from kernels import test_attention as tests
from hf_hybrid_cache.kernels.vector import tiles
for storage in tests.STORAGES:
    tests.check(*tests.make(storage, 300, num_kv_heads=2, group=5, key_dim=80, value_dim=96), scale=0.1)
    tests.check(*tests.make(storage, 129, batch=2, length=3, key_dim=24, value_dim=12), scale=0.2, causal=True)
    tests.test_nan_when_visible_then_reaches_the_result(storage, float("inf"))
tests.test_denormal_keys_and_values_count("float16")
"""
    run_program(program, NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features, NUMBA_CACHE_DIR=str(tmp_path))
