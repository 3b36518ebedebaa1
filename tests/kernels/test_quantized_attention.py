"""Attention over quantized blocks, against attention in float64 over the dequantized states."""

import os
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hf_hybrid_cache.kernels import BITS, BLOCK, PackedLayout, QuantizedBlocks, Shape, Workspace, value_width
from hf_hybrid_cache.kernels.vector.processor import set_integer_kernels, uses_integer_kernels
from kernels.few_queries import attend_to
from kernels.reference import (
    ELEMENTS,
    Case,
    attention,
    attention_weights,
    causal_as_visible,
    random_masks,
    random_quantized,
    stored,
    to_blocks,
)

from common.programs import run_program
from common.slow import combination
from common.soak import count, search_at_random

WAYS = [False, True]
# Relative to the largest value; integers round the query and the weights: for codes of 8 bits to 16, for others to 8.
BOUNDS = {False: 4e-6, True: 2e-3}
OF_8_BITS = 4e-4
needs_dot_product = pytest.mark.skipif(
    not uses_integer_kernels(), reason="the processor has no integer dot products (x86-64 with AVX2)"
)
EVERY_WAY = pytest.mark.parametrize(
    "is_integer", [False, pytest.param(True, marks=needs_dot_product)], ids=["portable", "integer"]
)


def make(
    first: int = 1,
    quantized: int = 3,
    last: int = 70,
    batch: int = 1,
    num_kv_heads: int = 1,
    group: int = 1,
    length: int = 1,
    dims: tuple[int, int] = (64, 64),
    bits: tuple[int, int] = (4, 4),
    lanes: int = 64,
    storage: str = "bfloat16",
    is_rotated: bool = True,
    seed: int = 0,
) -> "Made":
    """Make `first` and `quantized` blocks, and `last` tokens in full precision after them."""
    generator = np.random.default_rng(seed)
    query = generator.standard_normal((batch, num_kv_heads * group, length, dims[0])).astype(np.float32)
    states, floats, packed = [], [], []
    for transposed, dim, width in ((True, dims[0], bits[0]), (False, dims[1], bits[1])):
        parts = random_quantized(generator, (batch, num_kv_heads, quantized, dim), width, lanes, transposed, is_rotated)
        tokens = first * BLOCK + last
        some = generator.standard_normal((batch, num_kv_heads, tokens, dim)).astype(np.float32)
        stored_bits, exact = stored(some, storage)
        before, after = exact[:, :, : first * BLOCK], exact[:, :, first * BLOCK :]
        states.append(np.concatenate([before, parts.states, after], axis=2))
        floats.append(to_blocks(stored_bits, transposed, dim if transposed else value_width(dim)))
        packed.append(parts.packed)
    layouts = (
        PackedLayout.of_keys(bits[0], dims[0], lanes, is_rotated),
        PackedLayout.of_values(bits[1], dims[1], lanes, is_rotated),
    )
    assert [part.shape[2] for part in packed] == [layout.num_bytes for layout in layouts]
    case = Case(query.astype(np.float64), *states)
    return case, (floats[0], floats[1]), QuantizedBlocks(*packed, first, quantized, *layouts)


Made = tuple[Case, tuple[np.ndarray, np.ndarray], QuantizedBlocks]


def run(made: Made, is_integer: bool, scale: float = 0.125, **masks) -> tuple[np.ndarray, np.ndarray]:
    set_integer_kernels(None if is_integer else False)
    assert uses_integer_kernels() == is_integer
    workspace = Workspace(shape_of(made[0]))
    out = attend_in(workspace, made, scale=scale, **masks)
    return out, workspace.lse.copy()


def shape_of(case: Case) -> Shape:
    batch, _, length, key_dim = case.query.shape
    return Shape(batch, case.keys.shape[1], case.group, length, key_dim, case.values.shape[3])


def attend_in(workspace: Workspace, made: Made, scale: float = 0.125, **options) -> np.ndarray:
    """Return the result in the workspace, `[batch, query_heads, query_length, value_dim]`."""
    case, (keys, values), quantized = made
    options = causal_as_visible(case, **options)
    return attend_to(workspace, case.query, keys, values, case.tokens, scale, quantized=quantized, **options)


def check(made: Made, is_integer: bool, scale: float = 0.125, **masks) -> None:
    out, lse = run(made, is_integer, scale, **masks)
    case = made[0]
    expected, expected_lse = attention(case, scale, **masks)
    bound = BOUNDS[is_integer]
    lse_bound: float | np.ndarray = 0.0
    if is_integer and made[2].key_layout.bits == made[2].value_layout.bits == 8:
        bound = OF_8_BITS
    elif is_integer:  # the effect of rounding a score is relative to the spread of scores
        scores = np.einsum("bhqd,bhtd->bhqt", case.query, np.repeat(case.keys, case.group, axis=1)) * scale
        bound *= max(1.0, scores.std(axis=3).max())
        lse_bound = 4 * error_of_a_score(case, scale) * spread_of_weights(case, scale, **masks)
    np.testing.assert_allclose(out, expected, rtol=0, atol=bound * np.abs(case.values).max())
    seen = ~np.isneginf(expected_lse)
    np.testing.assert_array_equal(~np.isneginf(lse), seen)
    largest = np.maximum(bound + bound * np.abs(expected_lse), lse_bound)  # infinite where nothing is seen
    np.testing.assert_array_less(np.abs(lse[seen] - expected_lse[seen]), largest[seen])


def error_of_a_score(case: Case, scale: float) -> np.ndarray:
    """Return the standard deviation of a score's error where queries are rounded to 8 bits."""
    step = np.abs(case.query).max(axis=3) / 127
    return scale * step / np.sqrt(12) * np.linalg.norm(case.keys, axis=3).max()


def spread_of_weights(case: Case, scale: float, **masks) -> np.ndarray:
    """Return the fraction of a score's error that is left in the log-sum-exp, which averages: 1 for a single token."""
    weights, _ = attention_weights(case, scale, **masks)
    return np.sqrt((weights**2).sum(axis=3))


@EVERY_WAY
@pytest.mark.parametrize("key_bits", BITS)
@pytest.mark.parametrize("value_bits", BITS)
@pytest.mark.parametrize("storage", ELEMENTS)
def test_attention_when_bits_and_ends_vary_then_is_exact(
    is_integer: bool, key_bits: int, value_bits: int, storage: str
):
    check(make(bits=(key_bits, value_bits), num_kv_heads=2, group=4, storage=storage), is_integer)


@pytest.mark.covering(2)
@EVERY_WAY
@pytest.mark.parametrize(("first", "last"), [(0, 1), (0, 64), (1, 63), (2, 65), (0, 127), (3, 128)])
@pytest.mark.parametrize("quantized", [1, 2, 5, 70, 200])
def test_coded_blocks_lie_between_blocks_in_full_precision(is_integer: bool, first: int, quantized: int, last: int):
    check(make(first, quantized, last, num_kv_heads=2, group=3), is_integer)


@pytest.mark.covering(2)
@EVERY_WAY
@pytest.mark.parametrize("is_rotated", [False, True])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("lanes", [16, 32, 64, 128])
@pytest.mark.parametrize(
    "dims", [(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256), (512, 512), (24, 12), (1, 1)]
)
def test_attention_when_head_dims_and_groups_vary_then_is_exact(
    is_integer: bool, is_rotated: bool, bits: int, lanes: int, dims: tuple[int, int]
):
    made = make(quantized=2, dims=dims, bits=(bits, bits), lanes=lanes, group=2, is_rotated=is_rotated)
    check(made, is_integer, scale=dims[0] ** -0.5)


@pytest.mark.covering(2)
@EVERY_WAY
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 96), (24, 12)])
@pytest.mark.parametrize(("first", "last"), [(0, 1), (1, 70)])
@pytest.mark.parametrize("is_mixed", [False, True], ids=["factors", "factors_and_rotation_matrix"])
def test_attention_when_channels_are_scaled_or_mixed_then_is_exact(
    is_integer: bool, dims: tuple[int, int], first: int, last: int, is_mixed: bool
):
    case, floats, quantized = make(first, 5, last, batch=2, num_kv_heads=3, group=2, dims=dims)
    generator = np.random.default_rng(1)
    factors = np.exp(generator.standard_normal((3, dims[0]))).astype(np.float32)
    rotation_matrix = np.linalg.qr(generator.standard_normal((3, dims[1], dims[1])))[0] * generator.uniform(
        0.3, 3, (3, 1, dims[1])
    )
    rotation_matrix = rotation_matrix.astype(np.float32)
    span = slice(first * BLOCK, (first + 5) * BLOCK)
    case.keys[:, :, span] *= factors[:, None]
    if is_mixed:
        case.values[:, :, span] = case.values[:, :, span] @ rotation_matrix
    quantized = quantized._replace(query_factors=factors, rotation_matrix=rotation_matrix if is_mixed else None)
    check((case, floats, quantized), is_integer, scale=dims[0] ** -0.5 / 2)


@EVERY_WAY
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8, 33])
@pytest.mark.parametrize("length", [1, 3, 16])
def test_attention_when_number_of_queries_varies_then_is_exact(is_integer: bool, group: int, length: int):
    check(make(batch=2, num_kv_heads=2, group=group, length=length), is_integer, causal=True)


@EVERY_WAY
@pytest.mark.soak
@search_at_random(100, 1000)
@given(data=st.data())
def test_attention_when_shapes_and_masks_are_random_then_is_exact(is_integer: bool, data: st.DataObject):
    draw = data.draw
    seed = draw(st.integers(0, 2**32 - 1))
    made = make(
        first=draw(st.integers(0, 3)),
        quantized=draw(st.integers(1, 9)),
        last=draw(st.integers(16, 130)),
        batch=draw(st.integers(1, 3)),
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 8)),
        length=draw(st.integers(1, 16)),
        dims=(draw(st.integers(1, 140)), draw(st.integers(1, 140))),
        bits=(draw(st.sampled_from(BITS)), draw(st.sampled_from(BITS))),
        lanes=draw(st.sampled_from([16, 32, 48, 64, 128])),
        storage=draw(st.sampled_from(list(ELEMENTS))),
        is_rotated=draw(st.booleans()),
        seed=seed,
    )
    case = made[0]
    scale = float(np.float32(case.query.shape[3] ** -0.5))
    check(made, is_integer, scale, **random_masks(draw, case, seed))
    count("attention compared with float64")


@EVERY_WAY
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("quantized_key_bits", BITS)
def test_a_query_that_is_not_a_number_does_not_become_plausible(is_integer: bool, bad: float, quantized_key_bits: int):
    made = make(bits=(quantized_key_bits, 4), first=0, quantized=2, last=1)
    set_integer_kernels(None if is_integer else False)
    made[0].query[0, 0, 0, 7] = bad
    assert not np.isfinite(attend_in(Workspace(shape_of(made[0])), made)).any()


@EVERY_WAY
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-20, 1e15])
def test_attention_when_queries_are_huge_or_tiny_then_is_exact(is_integer: bool, size: float):
    made = make(group=4)
    made[0].query = (made[0].query * np.float32(size)).astype(np.float32).astype(np.float64)
    check(made, is_integer, scale=0.125 if size <= 1 else 1e-15)


def test_a_call_does_not_depend_on_the_calls_before_in_its_workspace():
    used = Workspace(Shape(1, 2, 4, 2, 64, 64))
    for options in ({}, {"causal": True}, {}):
        for bits in (4, 8):
            for quantized in (70, 3):
                made = make(quantized=quantized, num_kv_heads=2, group=4, length=2, bits=(bits, bits))
                expected = attend_in(Workspace(used.shape), made, **options)
                np.testing.assert_array_equal(attend_in(used, made, **options), expected)


def test_integers_without_a_dot_product_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hf_hybrid_cache.kernels.vector.processor.has_pair_dot", lambda: False)
    with pytest.raises(ValueError, match="no integer dot products"):
        set_integer_kernels(True)
    assert not uses_integer_kernels()


LESSER = {
    "without any extension": ("x86-64", "", False),
    "AVX2": ("x86-64-v3", "+avx,+avx2,+fma,+f16c", True),
    "AVX-512 without VNNI": ("skylake-avx512", "+avx,+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512vl,+avx512dq", True),
    "AVX-VNNI": ("x86-64-v3", "+avx,+avx2,+fma,+f16c,+avxvnni", True),
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names processors of the x86-64 family")
@pytest.mark.slow
@pytest.mark.parametrize("processor", [each if each == "AVX2" else combination(each) for each in LESSER])
def test_the_kernels_are_right_on_lesser_processors(processor: str, tmp_path: Path):
    """The kernels are compiled anew for them, in a process of its own."""
    name, features, has_dot_product = LESSER[processor]
    flag = {"avxvnni": "avx_vnni", "avx512bw": "avx512bw"}
    cpu = Path("/proc/cpuinfo").read_text().split()
    if missing := [mark for feature, mark in flag.items() if f"+{feature}" in features and mark not in cpu]:
        pytest.skip(f"this processor has no {', '.join(missing)}")
    program = f"""
from kernels import test_quantized_attention as tests, test_panels
for bits in (8, 4):
    test_panels.test_products_are_those_with_the_decoded_weights((40, 96), 9, bits, True)
assert tests.uses_integer_kernels() == {has_dot_product}
for is_integer in {{False, {has_dot_product}}}:
    for bits in tests.BITS:
        tests.check(tests.make(bits=(bits, bits), batch=2, num_kv_heads=2, group=5, dims=(80, 96)), is_integer)
        tests.check(tests.make(bits=(bits, bits), length=3, lanes=32, dims=(24, 12)), is_integer, causal=True)
"""
    run_program(program, NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features, NUMBA_CACHE_DIR=str(tmp_path))


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the instruction is one of x86-64")
def test_inline_assembly_when_kernel_comes_from_file_then_compiles():
    run_program("""
import hf_hybrid_cache.kernels
from llvmlite import binding
binding.initialize_native_target()
binding.initialize_native_asmprinter()
module = binding.parse_assembly('define void @f() { call void asm sideeffect "nop", ""() ret void }')
machine = binding.Target.from_default_triple().create_target_machine()
binding.create_mcjit_compiler(module, machine).finalize_object()
""")
