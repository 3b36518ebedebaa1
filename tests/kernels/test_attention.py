"""The attention kernels against attention in float64 on what is stored, in full precision and as codes."""

import os
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from hf_hybrid_cache.kernels import BITS, BLOCK, Shape, Workspace
from hf_hybrid_cache.kernels.vector.processor import has_bfloat16_products, set_integer_kernels, uses_integer_kernels
from kernels import calls
from kernels.calls import (
    BOUND,
    EVERY_WAY,
    FEW_WAYS,
    FLOAT_WAYS,
    SCORES,
    attend_in,
    attend_to,
    attend_to_prompt,
    check,
    make,
    run,
    scale_for_scores,
    workspace_of,
)
from kernels.reference import ELEMENTS, attention, random_masks, stored

from common.programs import run_program
from common.slow import combination
from common.soak import count, search_at_random

STORAGES = list(ELEMENTS)
DIMS = [(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256), (24, 12), (1, 1), (33, 72)]
# The way, the number of queries, and that of tokens: around blocks, and around the parts that are shared out.
LENGTHS = [
    *(("few", 1, tokens) for tokens in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 1000, 64 * BLOCK + 1, 20_000)),
    *(("few", length, tokens) for length, tokens in ((16, 16), (3, 17), (2, 64), (5, 65), (16, 70), (8, 500))),
    *(("many", length, length + past) for length, past in ((1, 0), (1, 500), (2, BLOCK - 1), (BLOCK - 1, 1))),
    *(("many", length, length + past) for length, past in ((BLOCK + 1, BLOCK), (257, 0), (257, 500), (2, 5000))),
]


@pytest.mark.covering(2)
@pytest.mark.parametrize(("way", "length", "tokens"), LENGTHS)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_straddle_blocks_and_parts(storage: str, group: int, way: str, length: int, tokens: int, causal: bool):
    check(*make(storage, tokens, 2 if tokens < 10_000 else 1, 2, group, length), way=way, causal=causal)


@pytest.mark.covering(2)
@FLOAT_WAYS
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16, 33])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("rounded_query", [False, True])
def test_attention_when_head_dims_and_groups_vary_then_is_exact(
    storage: str, group: int, dims: tuple[int, int], way: str, rounded_query: bool
):
    """Dot products of bfloat16 are used for queries in the type of the keys, where the processor has them."""
    case, bits = make(storage, 200, 1, 2, group, 70 if way == "many" else 1, dims, rounded_query=rounded_query)
    check(case, bits, dims[0] ** -0.5, way, causal=True)


@pytest.mark.covering(2)
@EVERY_WAY
@pytest.mark.parametrize("dims", [*DIMS[:-1], (512, 512)])
@pytest.mark.parametrize("lanes", [16, 32, 64, 128])
@pytest.mark.parametrize("key_bits", BITS)
@pytest.mark.parametrize("value_bits", BITS)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("is_rotated", [False, True])
def test_attention_when_the_form_of_codes_varies_then_is_exact(
    way: str, dims: tuple[int, int], lanes: int, key_bits: int, value_bits: int, storage: str, is_rotated: bool
):
    form = {"bits": (key_bits, value_bits), "lanes": lanes, "is_rotated": is_rotated}
    check(*make(storage, 70, 1, 2, 2, 1, dims, 1, 2, **form), scale=dims[0] ** -0.5, way=way)


@pytest.mark.covering(2)
@EVERY_WAY
@pytest.mark.parametrize(("first", "last"), [(0, 1), (0, 64), (1, 63), (2, 65), (0, 127), (3, 128)])
@pytest.mark.parametrize("coded", [1, 2, 5, 70, 200])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8, 33])
@pytest.mark.parametrize("length", [1, 3, 16])
def test_coded_blocks_lie_between_blocks_in_full_precision(
    way: str, first: int, coded: int, last: int, group: int, length: int
):
    num_kv_heads = 2 if coded < 70 else 1
    check(*make("bfloat16", last, 1, num_kv_heads, group, length, first=first, coded=coded), way=way, causal=True)


@pytest.mark.covering(2)
@EVERY_WAY
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 96), (24, 12)])
@pytest.mark.parametrize(("first", "last"), [(0, 1), (1, 70)])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("is_mixed", [False, True], ids=["factors", "factors_and_rotation_matrix"])
def test_attention_when_channels_are_scaled_or_mixed_then_is_exact(
    way: str, dims: tuple[int, int], first: int, last: int, storage: str, is_mixed: bool
):
    case, bits = make(storage, last, 2, 2, 2, 3, dims, first, 3)
    assert bits.codes is not None
    generator = np.random.default_rng(1)
    factors = np.exp(generator.standard_normal((2, dims[0]))).astype(np.float32)
    axes = np.linalg.qr(generator.standard_normal((2, dims[1], dims[1])))[0]
    matrix = (axes * generator.uniform(0.3, 3, (2, 1, dims[1]))).astype(np.float32)
    span = slice(first * BLOCK, (first + 3) * BLOCK)
    case.keys[:, :, span] *= factors[:, None]
    if is_mixed:
        case.values[:, :, span] = case.values[:, :, span] @ matrix
    codes = bits.codes._replace(query_factors=factors, rotation_matrix=matrix if is_mixed else None)
    check(case, bits._replace(codes=codes), dims[0] ** -0.5 / 2, way)


@EVERY_WAY
@pytest.mark.soak
@search_at_random(100, 1500)
@given(data=st.data())
def test_attention_when_shapes_masks_scores_are_random_then_is_exact(way: str, data: st.DataObject):
    draw = data.draw
    coded, dims = draw(st.integers(way == "integers", 9)), (draw(st.integers(1, 140)), draw(st.integers(1, 140)))
    length = draw(st.integers(1, 150 if way == "many" else 16))
    tokens = draw(st.integers(1, 130) if coded else st.one_of(st.integers(1, 200), st.integers(1, 5000)))
    seed = draw(st.integers(0, 2**32 - 1))
    case, bits = make(
        draw(st.sampled_from(STORAGES)),
        tokens if coded or way != "many" else length + tokens % 400,
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 8)),
        min(length, 64 * coded + tokens),
        dims,
        first=draw(st.integers(0, 3)) if coded else 0,
        coded=coded,
        bits=(draw(st.sampled_from(BITS)), draw(st.sampled_from(BITS))),
        lanes=draw(st.sampled_from([16, 32, 48, 64, 128])),
        is_rotated=draw(st.booleans()),
        seed=seed,
        rounded_query=draw(st.booleans()),
    )
    scale = float(np.float32(dims[0] ** -0.5))
    if way == "few" and not coded:
        scale = scale_for_scores(case, draw(st.floats(0.01, 1)) * SCORES)
    check(case, bits, scale, way, **random_masks(draw, case, seed))
    count("attention compared with float64")


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


def test_high_scores_when_many_heads_then_error_is_that_of_float32():
    case, bits = make("float32", 85, 3, 3, 5, 5, (114, 5), seed=85)
    check(case, bits, scale_for_scores(case, SCORES))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("hidden", [slice(0, 64), slice(0, 100), slice(64, 128), slice(30, 290), slice(0, 299)])
def test_attention_when_masks_hide_whole_blocks_then_is_exact(storage: str, hidden: slice):
    visible = np.ones((2, 1, 1, 300), np.uint8)
    visible[1, :, :, hidden] = 0
    check(*make(storage, 300, 2, 2, 2), visible=visible)


def test_the_lowest_finite_mask_everywhere_is_attention_to_all_alike():
    """Transformers masks with it; a row that is masked throughout must not become empty."""
    case, bits = make("float32", 100)
    out, _ = run(case, bits, bias=np.full((1, 1, 1, 100), np.finfo(np.float32).min))
    np.testing.assert_allclose(out[0, 0, 0], case.values[0, 0].mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_one_dominant_key_takes_all_the_weight(storage: str, size: float):
    case, bits = make(storage, 200, group=4)
    keys = np.zeros(case.keys.shape, np.float32)
    keys[0, 0, 77] = np.float32(size)
    key_bits, case.keys = stored(keys, storage)
    case.query = np.full(case.query.shape, np.copysign(1.0, size))
    out, lse = run(case, bits._replace(keys=key_bits), 1 / 64)
    assert (out[0] == case.values[0, 0, 77].astype(np.float32)).all()
    np.testing.assert_allclose(lse, np.abs(case.keys[0, 0, 77, 0]), rtol=1e-6)


@pytest.mark.parametrize("score", [0.0, 1e4, -1e4, 3e9, -3e9, 2e20, 1e38, -1e38])
def test_equal_scores_of_any_size_give_the_mean(score: float):
    case, bits = make("float32", 3000, group=2)
    key_bits, case.keys = stored(np.full(case.keys.shape, score / 64), "float32")
    case.query = np.ones(case.query.shape)
    out, lse = run(case, bits._replace(keys=key_bits), 1.0)
    np.testing.assert_allclose(out[0, 0, 0], case.values[0, 0].mean(axis=0), atol=BOUND * 4)
    np.testing.assert_allclose(lse, score + np.log(3000), rtol=BOUND, atol=BOUND)


@pytest.mark.parametrize("storage", ["float32", "float16"])
def test_denormal_keys_and_values_count(storage: str):
    case, bits = make(storage, 130)
    tiny = {"float32": 1e-40, "float16": 1e-6}[storage]
    value_bits, case.values = stored(case.values * tiny, storage)
    out, _ = run(case, bits._replace(values=value_bits))
    expected, _ = attention(case, 0.125)
    largest = 2e-6 * np.abs(case.values).max() + np.finfo(np.float32).smallest_subnormal
    np.testing.assert_allclose(out, expected, atol=largest)


@FEW_WAYS
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-20, 1e15])
def test_attention_when_queries_are_huge_or_tiny_then_is_exact(way: str, size: float):
    case, bits = make("bfloat16", 70, group=4, first=1, coded=3)
    case.query = (case.query * np.float32(size)).astype(np.float32).astype(np.float64)
    check(case, bits, 0.125 if size <= 1 else 1e-15, way)


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


def test_half_results_are_those_in_float32_rounded():
    case, bits = make("bfloat16", 300, 2, 2, 3, 130, (40, 24))
    halves, _ = attend_to_prompt(case, bits, out_dtype=torch.bfloat16)
    floats, _ = attend_to_prompt(case, bits)
    np.testing.assert_array_equal(halves, torch.from_numpy(floats).bfloat16().float().numpy())


def test_a_call_does_not_depend_on_the_calls_before_in_its_workspace():
    used = Workspace(Shape(1, 2, 4, 2, 64, 64))
    for options in ({}, {"causal": True}, {}):
        for bits in (4, 8):
            for coded in (70, 3):
                made = make("bfloat16", 70, 1, 2, 4, 2, first=1, coded=coded, bits=(bits, bits))
                expected = attend_in(workspace_of(made[0]), *made, **options)
                np.testing.assert_array_equal(attend_in(used, *made, **options), expected)


def test_integers_without_a_dot_product_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hf_hybrid_cache.kernels.vector.processor.has_pair_dot", lambda: False)
    with pytest.raises(ValueError, match="no integer dot products"):
        set_integer_kernels(True)
    assert not uses_integer_kernels()


LESSER = {
    "without any extension": ("x86-64", "", False),
    "AVX2 without half precision": ("x86-64", "+avx,+avx2,+fma", True),
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
    program = f"from kernels import test_attention; test_attention.check_lesser_processor({has_dot_product})"
    run_program(program, NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features, NUMBA_CACHE_DIR=str(tmp_path))


def check_lesser_processor(has_dot_product: bool) -> None:
    from kernels import test_not_finite, test_products

    for bits in (8, 4):
        test_products.test_products_are_those_with_the_decoded_weights("few", (40, 96), 9, bits, 32, True, 0.0)
    assert calls.uses_integer_kernels() == has_dot_product
    for storage in STORAGES:
        check(*make(storage, 300, num_kv_heads=2, group=5, dims=(80, 96)), scale=0.1)
        check(*make(storage, 129, batch=2, length=3, dims=(24, 12)), scale=0.2, causal=True)
        test_not_finite.test_a_bad_number_anywhere_gives_what_torch_gives(storage, "values", np.inf, "none")
    test_denormal_keys_and_values_count("float16")
    for way in ("few", "integers")[: 1 + has_dot_product]:
        for width in BITS:
            codes = {"first": 1, "coded": 3, "bits": (width, width)}
            check(*make("bfloat16", 70, 2, 2, 5, dims=(80, 96), **codes), way=way)
            check(*make("bfloat16", 70, length=3, lanes=32, dims=(24, 12), **codes), way=way, causal=True)


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
