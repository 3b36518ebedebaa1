"""Attention of many queries against attention in float64 on the values that are stored."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hf_hybrid_cache.attention.queries import causal_tokens, seen_tokens
from hf_hybrid_cache.kernels import BITS, BLOCK, QuantizedBlocks, Strided, attend_many, value_width
from hf_hybrid_cache.kernels.attention import workspace
from hf_hybrid_cache.kernels.vector import parallel
from hf_hybrid_cache.kernels.vector.processor import has_bfloat16_products
from kernels import test_quantized_attention
from kernels.reference import ELEMENTS, Case, attention, random_masks, to_bfloat16, to_blocks
from kernels.test_attention import make

from common.soak import count, search_at_random

# Relative to the largest value. Where the processor multiplies pairs of bfloat16, weights and dequantized states are
# rounded to it: to half of 2 ** -8.
BOUNDS = dict.fromkeys(ELEMENTS, 4e-6)
if has_bfloat16_products():
    BOUNDS["bfloat16"] = 2**-9
LENGTHS = [1, 2, BLOCK - 1, BLOCK + 1, 257]


def run(
    case: Case,
    blocks: tuple[np.ndarray, np.ndarray],
    scale: float,
    quantized: QuantizedBlocks | None = None,
    has_half_out: bool = False,
    **masks,
) -> tuple[np.ndarray, np.ndarray]:
    """Run the kernel with queries and results in transformers' layout, one token after the other."""
    batch, heads, length, key_dim = case.query.shape
    value_dim = case.values.shape[3]
    query = np.ascontiguousarray(case.query.astype(np.float32).swapaxes(1, 2))
    if blocks[0].dtype == np.uint16:
        query, exact = to_bfloat16(query)
        assert (exact.swapaxes(1, 2) == case.query).all()
    out = np.empty((batch, length, heads, value_dim), np.uint16 if has_half_out else np.float32)
    lse = np.empty((batch, heads, length), np.float32)
    attend_many(
        strided(query),
        strided(out),
        lse,
        *blocks,
        case.tokens,
        key_dim,
        value_dim,
        scale,
        *arrays(masks, case),
        quantized,
    )
    return out.swapaxes(1, 2), lse


def strided(array: np.ndarray) -> Strided:
    token, head = array.strides[1:3]
    return Strided(array.ctypes.data, array.strides[0], head, token, array.dtype == np.uint16)


def arrays(masks: dict, case: Case) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Return masks as the kernel takes them."""
    import torch

    visible = masks.get("visible")
    ranges = np.array([[[[0, case.tokens]]]])
    if masks.get("causal"):
        ranges = causal_tokens(case.query.shape[2], case.tokens).ranges
        if visible is not None:
            visible = visible & (np.arange(case.tokens) < ranges[..., 1:])
    if visible is not None:
        seen = seen_tokens(torch.from_numpy(visible).bool())
        ranges, visible = seen.ranges, seen.visible
    return ranges, visible, masks.get("bias")


def check(case: Case, bits: tuple[np.ndarray, np.ndarray], scale: float, bound: float, **masks) -> None:
    keys = to_blocks(bits[0], transposed=True, width=case.keys.shape[3])
    values = to_blocks(bits[1], transposed=False, width=value_width(case.values.shape[3]))
    compare(case, run(case, (keys, values), scale, **masks), scale, bound, **masks)


def compare(case: Case, found: tuple[np.ndarray, np.ndarray], scale: float, bound: float, **masks) -> None:
    expected, expected_lse = attention(case, scale, **masks)
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=bound * np.abs(case.values).max())
    np.testing.assert_allclose(found[1], expected_lse, rtol=bound, atol=bound)


@pytest.mark.covering(2)
@pytest.mark.parametrize("past", [0, 1, BLOCK - 1, BLOCK, 500, 5000])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("storage", ELEMENTS)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_straddle_blocks_and_pieces(storage: str, causal: bool, group: int, length: int, past: int):
    case, bits = make(storage, past + length, 2, 2, group, length, rounded_query=storage == "bfloat16")
    check(case, bits, 0.125, BOUNDS[storage], causal=causal)


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    "dims", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (24, 12), (1, 1), (33, 72)]
)
@pytest.mark.parametrize("storage", ELEMENTS)
def test_attention_when_head_dims_vary_then_is_exact(storage: str, dims: tuple[int, int]):
    case, bits = make(storage, 200, 1, 2, 3, 70, *dims, rounded_query=storage == "bfloat16")
    check(case, bits, dims[0] ** -0.5, BOUNDS[storage], causal=True)


@pytest.mark.covering(2)
@pytest.mark.parametrize("storage", ELEMENTS)
@pytest.mark.parametrize("key_bits", BITS)
@pytest.mark.parametrize("value_bits", BITS)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 96), (24, 12)])
@pytest.mark.parametrize("lanes", [16, 32, 64, 128])
@pytest.mark.parametrize(("first", "quantized", "last"), [(0, 1, 1), (0, 2, 64), (1, 5, 70), (3, 20, 128)])
@pytest.mark.parametrize("is_rotated", [False, True])
def test_codes_lie_between_blocks_in_full_precision(
    storage, key_bits, value_bits, dims, lanes, first, quantized, last, is_rotated
):
    sizes = {"batch": 2, "num_kv_heads": 2, "group": 3, "length": min(100, quantized * BLOCK + last)}
    case, blocks, codes = test_quantized_attention.make(
        first,
        quantized,
        last,
        **sizes,
        dims=dims,
        bits=(key_bits, value_bits),
        lanes=lanes,
        storage=storage,
        is_rotated=is_rotated,
    )
    bound = BOUNDS[storage]
    if storage == "bfloat16":
        bound *= 2  # keys are rounded as well, and rotated queries
        case.query = to_bfloat16(case.query)[1]
    compare(case, run(case, blocks, 0.125, codes, causal=True), 0.125, bound, causal=True)


@pytest.mark.parametrize("storage", ELEMENTS)
def test_attention_when_channels_are_scaled_or_mixed_then_is_exact(storage: str):
    made = test_quantized_attention.make(length=80, group=2, num_kv_heads=2, storage=storage, bits=(8, 8))
    case, blocks, codes = made
    generator = np.random.default_rng(1)
    factors = generator.uniform(0.5, 2, (2, 64)).astype(np.float32)
    rotation_matrix = generator.standard_normal((2, 64, 64)).astype(np.float32) / 8
    case.query = to_bfloat16(case.query)[1]
    quantized = slice(codes.first * BLOCK, (codes.first + codes.num_blocks) * BLOCK)
    case.keys[:, :, quantized] *= factors[None, :, None].astype(np.float64)
    case.values[:, :, quantized] = case.values[:, :, quantized] @ rotation_matrix.astype(np.float64)
    codes = codes._replace(query_factors=factors, rotation_matrix=rotation_matrix)
    compare(case, run(case, blocks, 0.125, codes), 0.125, 2 * BOUNDS[storage])


@pytest.mark.soak
@search_at_random(60, 1000)
@given(data=st.data())
def test_attention_when_shapes_and_masks_are_random_then_is_exact(data: st.DataObject):
    draw = data.draw
    storage, seed = draw(st.sampled_from(list(ELEMENTS))), draw(st.integers(0, 2**32 - 1))
    length = draw(st.integers(1, 150))
    case, bits = make(
        storage,
        length + draw(st.integers(0, 400)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 5)),
        length,
        draw(st.integers(1, 80)),
        draw(st.integers(1, 80)),
        seed,
        rounded_query=storage == "bfloat16",
    )
    masks = random_masks(draw, case, seed)
    check(case, bits, 0.125, 2 * BOUNDS[storage], **masks)
    count("attention compared with float64")


def test_half_results_are_those_in_float32_rounded():
    case, bits = make("bfloat16", 300, 2, 2, 3, 130, 40, 24, rounded_query=True)
    blocks = to_blocks(bits[0], True, 40), to_blocks(bits[1], False, 32)
    halves, _ = run(case, blocks, 0.125, has_half_out=True)
    floats, _ = run(case, blocks, 0.125)
    rounded = (floats.view(np.uint32) + 0x7FFF + (floats.view(np.uint32) >> 16 & 1)) >> 16
    np.testing.assert_array_equal(halves, rounded)


@pytest.mark.parametrize("storage", ELEMENTS)
def test_the_same_bits_whatever_the_threads_and_the_rows_at_once(storage: str, monkeypatch: pytest.MonkeyPatch):
    case, bits = make(storage, 700, 1, 2, 4, 300, rounded_query=storage == "bfloat16")
    blocks = to_blocks(bits[0], True, 64), to_blocks(bits[1], False, 64)
    results = []
    for threads, rows in ((1, 256), (2, 32), (3, 48), (7, 1200)):
        monkeypatch.setattr(parallel, "num_threads_beside", lambda of_torch, threads=threads: threads)
        monkeypatch.setattr(workspace, "_MOST_ROWS", rows)
        results.append([array.tobytes() for array in run(case, blocks, 0.125, causal=True)])
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("storage", ELEMENTS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_value_when_not_finite_then_reaches_only_queries_that_see_it(storage: str, bad: float):
    case, bits = make(storage, 300, length=300, rounded_query=storage == "bfloat16")
    bits[1][0, 0, 200, 5] = {"float32": bad}.get(storage, _bits_of(bad, storage))
    blocks = to_blocks(bits[0], True, 64), to_blocks(bits[1], False, 64)
    out, _ = run(case, blocks, 0.125, causal=True)
    assert np.isfinite(out[0, 0, :192]).all()
    assert not np.isfinite(out[0, 0, 200:, 5]).any()
    assert np.isfinite(np.delete(out[0, 0], 5, axis=1)).all()


def _bits_of(number: float, storage: str) -> int:
    if storage == "float16":
        return int(np.float16(number).view(np.int16))
    return int(np.float32(number).view(np.uint32) >> 16)


@pytest.mark.parametrize("storage", ELEMENTS)
def test_a_query_that_is_not_a_number_does_not_become_plausible(storage: str):
    case, bits = make(storage, 300, length=70, rounded_query=storage == "bfloat16")
    case.query[0, 0, 3, 7] = np.nan
    blocks = to_blocks(bits[0], True, 64), to_blocks(bits[1], False, 64)
    query = case.query.astype(np.float32)
    case.query = query.astype(np.float64)
    keys, values = blocks
    out = np.empty((1, 70, 1, 64), np.float32)
    lse = np.empty((1, 1, 70), np.float32)
    given_query = np.ascontiguousarray(query.swapaxes(1, 2))
    given_query = to_bfloat16(given_query)[0] if storage == "bfloat16" else given_query
    ranges = causal_tokens(70, 300).ranges
    attend_many(strided(given_query), strided(out), lse, keys, values, 300, 64, 64, 0.125, ranges, None, None, None)
    assert np.isnan(out[0, 3, 0]).all()
    assert np.isfinite(np.delete(out[0, :, 0], 3, axis=0)).all()


@pytest.mark.parametrize("storage", ELEMENTS)
def test_where_nothing_is_seen_the_result_is_zero(storage: str):
    case, bits = make(storage, 150, 2, 1, 2, 90, rounded_query=storage == "bfloat16")
    visible = np.ones((2, 1, 90, 150), np.uint8)
    visible[1, :, :50] = 0
    check(case, bits, 0.125, BOUNDS[storage], visible=visible)
