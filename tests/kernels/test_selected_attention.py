"""Attention that reads the pages that carry the weight, against a choice and attention in float64."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hf_hybrid_cache.kernels import BITS, BLOCK, Shape, Workspace, set_integer_kernels
from kernels.reference import Case, attention, attention_weights, random_masks
from kernels.test_coded_attention import BOUNDS, EVERY_WAY, Made, attend_in, make, run, shape_of

from soak import count, search_at_random

PAGE, PAGES = 16, 4
# Of the share that may be left out: what rounding of folded queries makes of it.
TOLERANCE = 0.02
MORE_THAN_THE_FEWEST = 1.2


def run_selected(made: Made, mass: float, scale: float = 0.125, **masks) -> tuple[np.ndarray, np.ndarray]:
    """The result `[batch, query_heads, query_length, value_dim]`, and which tokens were read `[heads, tokens]`."""
    case, _, coded = made
    shape = shape_of(case)
    workspace = Workspace(shape)
    out = attend_in(workspace, made, scale, mass=mass, **masks)
    assert workspace._pages is not None
    read = np.ones((shape.heads, case.tokens), bool)
    for block in range(coded.num_blocks):
        for head in range(shape.heads):
            first, last = divmod(int(workspace._pages._chosen[block, head]) - 1, PAGES)
            pages = np.arange(PAGES)
            chosen = (pages >= first) & (pages <= last) if workspace._pages._chosen[block, head] else pages < 0
            start = (coded.first + block) * BLOCK
            read[head, start : start + BLOCK] = chosen.repeat(PAGE)
    assert workspace.tokens_read == read[:, _coded_tokens(made)].sum()
    return out, read


def _coded_tokens(made: Made) -> slice:
    coded = made[2]
    return slice(coded.first * BLOCK, (coded.first + coded.num_blocks) * BLOCK)


def shares(case: Case, scale: float, **masks) -> np.ndarray:
    """Of the attention of the queries of a KV head, on average over them: `[heads, tokens]`."""
    weights, _ = attention_weights(case, scale, **masks)
    batch, kv_heads = case.keys.shape[:2]
    return weights.reshape(batch * kv_heads, -1, case.tokens).mean(axis=1)


def fewest_tokens(made: Made, weights: np.ndarray, mass: float) -> int:
    """Coded tokens in the fewest pages that carry the share, and between two such pages of a block."""
    of_pages = weights[:, _coded_tokens(made)].reshape(len(weights), -1, PAGE).sum(axis=2)
    total = 0
    for head, pages in enumerate(of_pages):
        missing = mass - (weights[head].sum() - pages.sum()) - (1 - weights[head].sum())
        order = np.argsort(-pages)
        needed = np.zeros(len(pages), bool)
        needed[order[: np.searchsorted(np.cumsum(pages[order]), missing) + 1 if missing > 0 else 0]] = True
        for block in needed.reshape(-1, PAGES):
            places = np.flatnonzero(block)
            total += 0 if not len(places) else (places[-1] - places[0] + 1) * PAGE
    return total


def check(made: Made, is_integer: bool, mass: float, scale: float = 0.125, **masks) -> np.ndarray:
    """Returns what was read."""
    set_integer_kernels(None if is_integer else False)
    case = made[0]
    out, read = run_selected(made, mass, scale, **masks)
    batch, kv_heads = case.keys.shape[:2]
    seen = read.reshape(batch, kv_heads, 1, -1).repeat(case.group, axis=1).astype(np.uint8)
    seen = np.broadcast_to(seen, (batch, kv_heads * case.group, case.query.shape[2], case.tokens))
    hidden = masks.pop("visible", np.ones((1, 1, 1, 1), np.uint8))
    expected, _ = attention(case, scale, visible=seen * (hidden != 0), **masks)
    spread = np.einsum("bhqd,bhtd->bhqt", case.query, np.repeat(case.keys, case.group, axis=1)).std(axis=3).max()
    bound = BOUNDS[is_integer] * max(1.0, 2 * spread * scale)
    np.testing.assert_allclose(out, expected, rtol=0, atol=bound * np.abs(case.values).max())
    weights = shares(
        case, scale, visible=np.broadcast_to(hidden, (1, 1, 1, 1)) if hidden.size == 1 else hidden, **masks
    )
    nothing_seen = 1 - weights.sum(axis=1)
    tolerance = TOLERANCE * max(1.0, spread * scale) if is_integer else 1e-3
    assert ((weights * read).sum(axis=1) + nothing_seen >= mass - tolerance * (1 - mass) - bound).all()
    fewest = fewest_tokens(made, weights, min(1.0, mass + tolerance * (1 - mass) + bound))
    assert read[:, _coded_tokens(made)].sum() <= MORE_THAN_THE_FEWEST * fewest + 2 * PAGE * len(read)
    return read


def concentrated(made: Made, sharpness: float) -> Made:
    """With queries so large that few tokens carry the weight."""
    made[0].query *= sharpness
    return made


@EVERY_WAY
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("mass", [0.3, 0.9, 0.99, 0.9999])
def test_the_fewest_pages_that_carry_the_share_are_read(is_integer: bool, bits: int, mass: float):
    made = concentrated(make(1, 30, 70, num_kv_heads=2, group=4, bits=(bits, bits)), 3)
    read = check(made, is_integer, mass)
    assert (0 < read[:, _coded_tokens(made)].mean() < 1) == (mass < 0.999)


@pytest.mark.covering(2)
@EVERY_WAY
@pytest.mark.parametrize(("first", "last"), [(0, 1), (1, 63), (3, 128)])
@pytest.mark.parametrize("coded", [1, 5, 130])
@pytest.mark.parametrize("dims", [(64, 64), (80, 96), (24, 12)])
@pytest.mark.parametrize("lanes", [16, 64])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_any_shape(is_integer: bool, first: int, last: int, coded: int, dims: tuple[int, int], lanes: int, group: int):
    made = make(first, coded, last, batch=2, num_kv_heads=2, group=group, dims=dims, lanes=lanes)
    check(concentrated(made, 3), is_integer, 0.95, scale=dims[0] ** -0.5)


@EVERY_WAY
@pytest.mark.soak
@search_at_random(40, 1000)
@given(data=st.data())
def test_random_shapes_and_masks(is_integer: bool, data: st.DataObject):
    draw = data.draw
    seed = draw(st.integers(0, 2**32 - 1))
    made = make(
        first=draw(st.integers(0, 2)),
        coded=draw(st.integers(1, 9)),
        last=draw(st.integers(16, 130)),
        batch=draw(st.integers(1, 3)),
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 5)),
        length=draw(st.integers(1, 5)),
        dims=(draw(st.integers(1, 140)), draw(st.integers(1, 140))),
        bits=(draw(st.sampled_from(BITS)), draw(st.sampled_from(BITS))),
        lanes=draw(st.sampled_from([16, 32, 48, 64, 128])),
        is_rotated=draw(st.booleans()),
        seed=seed,
    )
    case = concentrated(made, draw(st.sampled_from([0.0, 1.0, 4.0])))[0]
    scale = float(np.float32(case.query.shape[3] ** -0.5))
    check(made, is_integer, draw(st.sampled_from([0.5, 0.95, 0.999])), scale, **random_masks(draw, case, seed))
    count("selected attention compared with float64")


@EVERY_WAY
def test_where_every_page_is_needed_bits_are_those_of_reading_all(is_integer: bool):
    made = concentrated(make(1, 70, 90, num_kv_heads=3, group=4), 0.0)
    set_integer_kernels(None if is_integer else False)
    out, read = run_selected(made, 1 - 1e-6)
    assert read.all()
    np.testing.assert_array_equal(out, run(made, is_integer)[0])


@EVERY_WAY
def test_where_more_than_the_most_would_be_read_all_is(is_integer: bool):
    made = concentrated(make(1, 70, 90, num_kv_heads=3, group=4), 3)
    expected, _ = run(made, is_integer)
    share = run_selected(made, 0.9)[1][:, _coded_tokens(made)].mean()
    workspace = Workspace(shape_of(made[0]))
    for most, is_all in ((share + 0.01, False), (share - 0.01, True)):
        out = attend_in(workspace, made, mass=0.9, most=most)
        assert (workspace.tokens_read == 3 * 70 * BLOCK) == is_all
        assert np.array_equal(out, expected) == is_all


def test_nothing_coded_is_read_where_the_rest_carries_the_share():
    made = make(1, 30, 70, num_kv_heads=2, group=4)
    case = made[0]
    case.query[...] = 40 * np.repeat(case.keys[:, :, :1], case.group, axis=1)  # the first key, many times over
    _, read = run_selected(made, 0.99)
    assert not read[:, _coded_tokens(made)].any()


@EVERY_WAY
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_query_that_is_not_a_number_does_not_become_plausible(is_integer: bool, bad: float):
    set_integer_kernels(None if is_integer else False)
    made = make(1, 9, 70)
    made[0].query[0, 0, 0, 7] = bad
    out, read = run_selected(made, 0.9)
    assert not np.isfinite(out).any()
    assert read.all()


def test_a_scale_that_turns_scores_around_reads_all():
    made = make(1, 9, 70)
    workspace = Workspace(shape_of(made[0]))
    attend_in(workspace, made, scale=-0.125, mass=0.5)
    assert workspace.tokens_read == 9 * BLOCK


def test_a_workspace_is_used_again_for_fewer_and_more_blocks():
    workspace = Workspace(Shape(1, 2, 4, 1, 64, 64))
    for blocks in (3, 200, 70):
        made = concentrated(make(1, blocks, 70, num_kv_heads=2, group=4, seed=blocks), 3)
        expected, _ = run_selected(made, 0.9)
        np.testing.assert_array_equal(attend_in(workspace, made, mass=0.9), expected)
