"""Kernels give the same bits for any number of threads."""

import itertools
from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hf_hybrid_cache.kernels import BITS
from hf_hybrid_cache.kernels.vector import parallel
from kernels.calls import EVERY_WAY, INTEGERS, Stored, make, run, with_ranges
from kernels.reference import ELEMENTS, Case, random_masks

from common.soak import count, search_at_random

THREADS = [1, 2, 3, 7]
pytestmark = pytest.mark.soak


def bytes_of(action: Callable[[], tuple[np.ndarray, ...]]) -> list[bytes]:
    """Call a function with several numbers of threads, also more than there are processors; return what all give."""
    results = []
    with pytest.MonkeyPatch.context() as patch:
        for threads in THREADS:
            patch.setattr(parallel, "num_threads_beside", lambda of_torch, threads=threads: threads)
            results.append([array.tobytes() for array in action()])
    assert all(result == results[0] for result in results)
    count("calls compared between numbers of threads", len(THREADS))
    return results[0]


@EVERY_WAY
@search_at_random(5)
@given(data=st.data())
def test_attention_when_shapes_are_random_then_ignores_thread_count(way: str, data: st.DataObject):
    draw, seed = data.draw, data.draw(st.integers(0, 2**32 - 1))
    coded = draw(st.integers(1, 60)) if way == "integers" or draw(st.booleans()) else 0
    tokens = st.integers(16, 130) if coded else st.sampled_from([12 * 8 * 64, 30_000]) | st.integers(16, 3000)
    if way == "many":  # whose rows are cut by the number of threads
        tokens = st.integers(300, 700)
    case, given = make(
        draw(st.sampled_from(list(ELEMENTS))),
        draw(tokens),
        batch=draw(st.integers(1, 3)),
        num_kv_heads=draw(st.integers(1, 4 if coded else 9)),
        group=draw(st.integers(1, 8)),
        length=draw(st.integers(1, 300 if way == "many" else 16)),
        dims=(draw(st.sampled_from([24, 64, 80])),) * 2,
        first=draw(st.integers(0, 2)) if coded else 0,
        coded=coded,
        bits=(draw(st.sampled_from(BITS)), draw(st.sampled_from(BITS))),
        seed=seed,
    )
    masks = random_masks(draw, case, seed)
    assert bytes_of(lambda: run(case, given, way=way, **masks))


@pytest.mark.parametrize("way", ["few", INTEGERS])
@search_at_random(8)
@given(data=st.data())
def test_a_row_when_others_come_with_it_then_keeps_its_bits(way: str, data: st.DataObject):
    """Queries that each see tokens of their own, of several sequences, against each query by itself."""
    draw, seed = data.draw, data.draw(st.integers(0, 2**32 - 1))
    coded = draw(st.integers(1, 60)) if way == "integers" or draw(st.booleans()) else 0
    case, given = make(
        draw(st.sampled_from(list(ELEMENTS))),
        draw(st.integers(16, 130) if coded else st.integers(16, 3000)),
        batch=draw(st.integers(1, 4)),
        num_kv_heads=draw(st.integers(1, 5)),
        group=draw(st.integers(1, 9)),
        length=draw(st.integers(1, 16)),
        dims=(draw(st.sampled_from([24, 64, 80])),) * 2,
        coded=coded,
        bits=(draw(st.sampled_from(BITS)), draw(st.sampled_from(BITS))),
        seed=seed,
        rounded_query=draw(st.booleans()),
    )
    masks = random_masks(draw, case, seed) | {"cap": draw(st.sampled_from([None, 20.0]))}
    results = run(case, given, way=way, **masks)
    seen = with_ranges(case, **masks)
    batch, heads, length = case.query.shape[:3]
    for sequence, token in itertools.product(range(batch), range(length)):
        one, index = slice(sequence, sequence + 1), slice(token, token + 1)
        of_heads = np.s_[:, sequence * case.keys.shape[1] : (sequence + 1) * case.keys.shape[1]]
        codes = given.codes
        if codes is not None:
            codes = codes._replace(keys=codes.keys[of_heads].copy(), values=codes.values[of_heads].copy())
        alone = Case(case.query[one, :, index], case.keys[one], case.values[one])
        of_row = {
            name: np.broadcast_to(mask, (batch, heads, length, mask.shape[3]))[one, :, index].copy()
            for name, mask in seen.items()
            if isinstance(mask, np.ndarray)
        }
        found = run(alone, Stored(given.keys[one], given.values[one], codes), way=way, cap=masks["cap"], **of_row)
        for ours, result in zip(found, results, strict=True):
            assert ours.tobytes() == result[one, :, index].tobytes()
    count("rows compared with themselves alone")
