"""The attention kernels against attention in float64 on what is stored, in full precision and as codes."""

import itertools
import os
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hf_hybrid_cache.kernels import BITS, BLOCK, Shape, WorkingMemory, Workspace
from hf_hybrid_cache.kernels.vector.processor import set_integer_kernels, uses_integer_kernels
from kernels.calls import (
    BOUND,
    EVERY_WAY,
    SCORES,
    attend_to,
    check,
    make,
    recorded,
    run,
    scale_for_scores,
    workspace_of,
)
from kernels.reference import ELEMENTS, attention, random_masks, stored

from common.programs import run_program
from common.soak import count, search_at_random

STORAGES = list(ELEMENTS)
DIMS = [(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256), (512, 512), (24, 12), (1, 1)]


@EVERY_WAY
@pytest.mark.soak
@search_at_random(25)
@given(data=st.data())
def test_attention_when_shapes_masks_scores_are_random_then_is_exact(way: str, data: st.DataObject):
    """Blocks of codes lie between those in full precision; they come in every form, and head dims and groups vary."""
    draw, seed = data.draw, data.draw(st.integers(0, 2**32 - 1))
    is_long = draw(st.integers(0, 19)) == 0
    coded = draw(st.sampled_from([70, 200]) if is_long else st.integers(way == "integers", 9))
    dims = draw(st.just((64, 64)) if is_long else st.sampled_from(DIMS) | st.tuples(*[st.integers(1, 140)] * 2))
    length = draw(st.integers(1, 150 if way == "many" else 16))
    if way == "many" and not is_long and draw(st.integers(0, 9)) == 0:
        length = 257  # more than rows at once
    edges = st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
    tokens = draw(edges | (st.integers(1, 130) if coded else st.integers(1, 200) | st.integers(1, 5000)))
    group = draw(st.sampled_from([1, 3, 4, 8] if is_long else [1, 2, 3, 4, 5, 6, 7, 8, 16, 33]))
    is_large = is_long or max(group, *dims) > 128
    scaling = draw(st.sampled_from(["none", "factors", "matrix"]))
    case, bits = make(
        draw(st.sampled_from(STORAGES)),
        tokens if coded or way != "many" else length + tokens % 400,
        1 if is_large else draw(st.integers(1, 3)),
        1 if is_large else draw(st.integers(1, 3)),
        group,
        min(length, 64 * coded + tokens),
        dims,
        first=draw(st.integers(0, 3)) if coded else 0,
        coded=coded,
        bits=(draw(st.sampled_from(BITS)), draw(st.sampled_from(BITS))),
        lanes=draw(st.sampled_from([16, 32, 48, 64, 128])),
        is_rotated=draw(st.booleans()),
        seed=seed,
        rounded_query=draw(st.booleans()),
        scaling=scaling,
    )
    size = draw(st.just(1.0) | st.sampled_from([0.0, 2.0**-126, 2.0**-60, 2.0**50])) if coded else 1.0
    scale = float(np.float32(dims[0] ** -0.5 / max(1, size) / (1 if scaling == "none" else 2)))
    if way == "few" and not coded:
        scale = scale_for_scores(case, draw(st.floats(0.01, 1)) * SCORES)
    case.query *= size
    cap = draw(st.none() | st.sampled_from([0.5, 20.0, 50.0]))
    check(case, bits, scale, way, cap=cap, **random_masks(draw, case, seed))
    count("attention compared with float64")


def test_the_lowest_finite_mask_everywhere_is_attention_to_all_alike():
    """Transformers masks with it; a row that is masked throughout must not become empty."""
    case, bits = make("float32", 100)
    out, _ = run(case, bits, bias=np.full((1, 1, 1, 100), np.finfo(np.float32).min))
    np.testing.assert_allclose(out[0, 0, 0], case.values[0, 0].mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("score", [0.0, -1e4, 3e9, 1e38, -1e38])
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
    out = attend_to(workspace, np.ones((1, heads, 1, dim)), recorded(tokens, keys, values, heads, dim), 1.0)
    expected = 3 * np.exp(128.0) / (10 * np.exp(128.0) + tokens - 10)
    np.testing.assert_allclose(out[0, -1], expected, rtol=1e-6)
    assert (out[0, :-1] == 0).all()
    np.testing.assert_allclose(workspace.lse[0, :-1, 0], np.log(tokens), rtol=1e-6)


def test_a_call_does_not_depend_on_the_calls_before_in_its_memory():
    memory, largest, workspaces = WorkingMemory(), 0, {}
    sizes = [(2, 4, 2, (64, 64)), (3, 3, 1, (24, 12)), (1, 1, 5, (40, 96))]
    for causal, coded, bits, of_case in itertools.product((False, True), (70, 3), (4, 8), sizes):
        case, stored = make("bfloat16", 70, 1, *of_case, first=1, coded=coded, bits=(bits, bits))
        case.query[:, :, 0] = np.nan
        workspaces.setdefault(of_case, workspace_of(case, memory))
        for way, used in (("few", {"workspace": workspaces[of_case]}), ("few", {}), ("many", {})):
            alone = WorkingMemory()
            expected, _ = run(case, stored, way=way, memory=alone, causal=causal)
            found, _ = run(case, stored, way=way, memory=memory, causal=causal, **used)
            np.testing.assert_array_equal(found, expected)
            largest = max(largest, alone.num_bytes)
    assert memory.num_bytes == largest


def test_integers_without_a_dot_product_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hf_hybrid_cache.kernels.vector.processor.has_pair_dot", lambda: False)
    with pytest.raises(ValueError, match="no integer dot products"):
        set_integer_kernels(True)
    assert not uses_integer_kernels()


# Beside those on which all tests run in turns (`.ci/run`).
LESSER = {
    "no extension": ("x86-64", "", False),
    "no half precision": ("x86-64", "+avx,+avx2,+fma", True),
    "AVX-VNNI": ("x86-64-v3", "+avx,+avx2,+fma,+f16c,+avxvnni", True),
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names processors of the x86-64 family")
@pytest.mark.slow
@pytest.mark.parametrize("processor", LESSER)
def test_the_kernels_are_right_on_lesser_processors(processor: str, tmp_path: Path):
    """The kernels are compiled anew for them, in a process of its own."""
    name, features, has_dot_product = LESSER[processor]
    if "avxvnni" in features and "avx_vnni" not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("this processor has no AVX-VNNI")
    program = f"from kernels import test_attention; test_attention.check_lesser_processor({has_dot_product})"
    run_program(program, NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features, NUMBA_CACHE_DIR=str(tmp_path))


def check_lesser_processor(has_dot_product: bool) -> None:
    from kernels import test_not_finite

    from weights import test_matrices

    test_matrices.test_products_with_chosen_matrices_are_those_in_float64()
    assert uses_integer_kernels() == has_dot_product
    for storage in STORAGES:
        check(*make(storage, 300, num_kv_heads=2, group=5, dims=(80, 96)), scale=0.1)
        check(*make(storage, 129, batch=2, length=3, dims=(24, 12)), scale=0.2, causal=True)
        case, _ = make(storage, 200)
        case.values[0, 0, 70, 5] = np.inf
        test_not_finite.check_like_torch(case, test_not_finite.in_storage(case, storage))
    test_denormal_keys_and_values_count("float16")
    for way in ("few", "integers")[: 1 + has_dot_product]:
        for width in BITS:
            codes = {"first": 1, "coded": 3, "bits": (width, width)}
            check(*make("bfloat16", 70, 2, 2, 5, dims=(80, 96), **codes), way=way)
            check(*make("bfloat16", 70, length=3, lanes=32, dims=(24, 12), **codes), way=way, causal=True)
