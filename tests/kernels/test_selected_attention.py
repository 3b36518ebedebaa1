"""Attention with top-p page selection, against a selection and attention in float64."""

from collections.abc import Callable
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hf_hybrid_cache.kernels import (
    BITS,
    BLOCK,
    IndexedBlocks,
    Shape,
    Workspace,
    index_bytes,
    quantize_index,
    value_width,
)
from hf_hybrid_cache.kernels.integer_kernels import set_integer_kernels
from kernels.reference import (
    ELEMENTS,
    Case,
    attention,
    attention_weights,
    dequantized_index,
    random_masks,
    stored,
    to_blocks,
)
from kernels.test_quantized_attention import BOUNDS, EVERY_WAY, Made, attend_in, make, run, shape_of

from common.soak import count, search_at_random

PAGE, PAGES = 16, 4
# Rounded queries and rough powers change the skipped share by at most this part of it.
TOLERANCE = 0.05
MORE_THAN_THE_FEWEST = 1.2


def make_plain(first: int = 1, indexed: int = 3, last: int = 70, storage: str = "bfloat16", **options) -> Made:
    """Blocks in full precision, of which those after `first` are to be indexed, and `last` tokens after them."""
    case, _, _ = make(first, indexed, last, **options)
    parts = []
    for states, transposed in ((case.keys, True), (case.values, False)):
        bits, exact = stored(states, storage)
        width = states.shape[3] if transposed else value_width(states.shape[3])
        parts.append((to_blocks(bits, transposed, width), exact))
    return Case(case.query, parts[0][1], parts[1][1]), (parts[0][0], parts[1][0]), None


def index_of(made: Made, first: int = 1, last: int = 70) -> IndexedBlocks:
    """Make the key index of all quantized blocks, or of those that `make_plain` made."""
    case, _, quantized = made
    blocks = (case.tokens - last) // BLOCK - first if quantized is None else quantized.num_blocks
    first = first if quantized is None else quantized.first
    batch, heads, _, dim = case.keys.shape
    packed = np.full((blocks, batch * heads, index_bytes(dim)), 0xFF, np.uint8)
    quantize_index(case.keys[:, :, first * BLOCK : (first + blocks) * BLOCK].astype(np.float32), packed)
    return IndexedBlocks(packed, first, blocks)


def run_selected(
    made: Made, indexed: IndexedBlocks, top_p: float, scale: float = 0.125, **masks
) -> tuple[np.ndarray, np.ndarray]:
    """The result `[batch, query_heads, query_length, value_dim]`, and which tokens were read `[heads, tokens]`."""
    out, _, read = run_with_lse(made, indexed, top_p, scale, **masks)
    return out, read


def run_with_lse(
    made: Made, indexed: IndexedBlocks, top_p: float, scale: float, **masks
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run as `run_selected` does, and return the log-sum-exp too."""
    case = made[0]
    shape = shape_of(case)
    workspace = Workspace(shape)
    out = attend_in(workspace, made, scale, indexed=indexed, top_p=top_p, **masks)
    assert workspace._pages is not None
    read = np.ones((shape.heads, case.tokens), bool)
    for block in range(indexed.num_blocks):
        for head in range(shape.heads):
            first, last = divmod(int(workspace._pages._chosen[block, head]) - 1, PAGES)
            pages = np.arange(PAGES)
            chosen = (pages >= first) & (pages <= last) if workspace._pages._chosen[block, head] else pages < 0
            start = (indexed.first + block) * BLOCK
            read[head, start : start + BLOCK] = chosen.repeat(PAGE)
    assert workspace.tokens_read == read[:, _tokens(indexed)].sum()
    return out, workspace.lse[:, : shape.rows].reshape(out.shape[:3]), read


def _tokens(indexed: IndexedBlocks) -> slice:
    return slice(indexed.first * BLOCK, (indexed.first + indexed.num_blocks) * BLOCK)


def shares(case: Case, indexed: IndexedBlocks, scale: float, **masks) -> np.ndarray:
    """Return the tokens' shares of attention by the index, mean over a KV head's queries: `[heads, tokens]`."""
    batch, kv_heads, _, dim = case.keys.shape
    keys = case.keys.copy()
    keys[:, :, _tokens(indexed)] = dequantized_index(indexed.packed, dim).reshape(batch, kv_heads, -1, dim)
    weights, _ = attention_weights(replace(case, keys=keys), scale, **masks)
    return weights.reshape(batch * kv_heads, -1, case.tokens).mean(axis=1)


def means_of_rest(
    case: Case, indexed: IndexedBlocks, visible: np.ndarray | None = None, bias: np.ndarray | None = None
) -> np.ndarray:
    """
    Return the mean of the visible values that are not indexed, `[batch, kv_heads, value_dim]`.

    Not a number where it sees none.
    """
    rest = np.ones(case.tokens, bool)
    rest[_tokens(indexed)] = False
    shape = *case.query.shape[:3], case.tokens
    seen = np.ones(shape, bool) if visible is None else np.broadcast_to(visible != 0, shape)
    seen = seen if bias is None else seen & (np.broadcast_to(bias, shape) > -1e30)
    means = np.full((*case.values.shape[:2], case.values.shape[3]), np.nan)
    for sequence, head in np.ndindex(*means.shape[:2]):
        of_head = rest & seen[sequence, (head + 1) * case.group - 1, -1]
        if of_head.any():
            means[sequence, head] = case.values[sequence, head, of_head].mean(axis=0)
    return means


def with_estimates(
    case: Case,
    indexed: IndexedBlocks,
    read: np.ndarray,
    scale: float,
    causal: bool = False,
    visible: np.ndarray | None = None,
    bias: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """
    Attention, and its log-sum-exp, where the tokens `read`, `[heads, tokens]`, are read.

    Others have the keys of the index and the mean of `means_of_rest`; where there is none, they are not there.
    """
    batch, kv_heads, _, dim = case.keys.shape
    is_read, means = read.reshape(batch, kv_heads, -1, 1), means_of_rest(case, indexed, visible, bias)
    keys = case.keys.copy()
    keys[:, :, _tokens(indexed)] = dequantized_index(indexed.packed, dim).reshape(batch, kv_heads, -1, dim)
    estimated = replace(
        case,
        keys=np.where(is_read, case.keys, keys),
        values=np.where(is_read, case.values, np.nan_to_num(means)[:, :, None]),
    )
    counts = is_read[..., 0] | np.isfinite(means[:, :, :1])
    counts = counts[:, :, None].repeat(case.group, axis=1).astype(np.uint8)
    return attention(estimated, scale, causal, counts if visible is None else counts * (visible != 0), bias)


def fewest_tokens(indexed: IndexedBlocks, weights: np.ndarray, top_p: float) -> int:
    """Indexed tokens in the fewest pages that carry the share, and between two such pages of a block."""
    of_pages = weights[:, _tokens(indexed)].reshape(len(weights), -1, PAGE).sum(axis=2)
    total = 0
    for head, pages in enumerate(of_pages):
        missing = top_p - (weights[head].sum() - pages.sum()) - (1 - weights[head].sum())
        order = np.argsort(-pages)
        needed = np.zeros(len(pages), bool)
        needed[order[: np.searchsorted(np.cumsum(pages[order]), missing) + 1 if missing > 0 else 0]] = True
        for block in needed.reshape(-1, PAGES):
            places = np.flatnonzero(block)
            total += 0 if not len(places) else (places[-1] - places[0] + 1) * PAGE
    return total


def check(
    made: Made, is_integer: bool, top_p: float, scale: float = 0.125, first: int = 1, last: int = 70, **masks
) -> np.ndarray:
    """Compare the kernel with the reference; return the indexed tokens that were read."""
    set_integer_kernels(None if is_integer else False)
    case, indexed = made[0], index_of(made, first, last)
    out, lse, read = run_with_lse(made, indexed, top_p, scale, **masks)
    batch, kv_heads = case.keys.shape[:2]
    with_all, expected_lse = with_estimates(case, indexed, read, scale, **masks)
    means = np.nan_to_num(means_of_rest(case, indexed, masks.get("visible"), masks.get("bias")))
    hidden = masks.pop("visible", np.ones((1, 1, 1, 1), np.uint8))
    spread = np.einsum("bhqd,bhtd->bhqt", case.query, np.repeat(case.keys, case.group, axis=1)).std(axis=3).max()
    bound = BOUNDS[is_integer] * max(1.0, 2 * spread * scale)
    tolerance = TOLERANCE * max(1.0, spread * scale) * (1 - top_p) + bound
    np.testing.assert_allclose(out, with_all, rtol=0, atol=tolerance * np.abs(case.values).max())
    np.testing.assert_allclose(lse, expected_lse, rtol=tolerance, atol=tolerance)
    # Pages that are read are attended to exactly: only the number of skipped ones may be off.
    seen = read.reshape(batch, kv_heads, 1, -1).repeat(case.group, axis=1).astype(np.uint8)
    exact, exact_lse = attention(case, scale, visible=seen * (hidden != 0), **masks)
    share = np.exp(np.subtract(exact_lse, lse, out=np.zeros_like(exact_lse), where=~np.isneginf(lse)))[..., None]
    expected = share * exact + (1 - share) * means.repeat(case.group, axis=1)[:, :, None]
    np.testing.assert_allclose(out, expected, rtol=0, atol=bound * np.abs(case.values).max())
    hidden = np.broadcast_to(hidden, (1, 1, 1, 1)) if hidden.size == 1 else hidden
    weights = shares(case, indexed, scale, visible=hidden, **masks)
    some_see_nothing = (attention_weights(case, scale, visible=hidden, **masks)[0].sum(axis=-1) < 0.5).any()
    if some_see_nothing:  # then all may be read
        return read[:, _tokens(indexed)]
    assert ((weights * read).sum(axis=1) >= top_p - tolerance).all()
    fewest = fewest_tokens(indexed, weights, min(1.0, top_p + tolerance))
    assert read[:, _tokens(indexed)].sum() <= MORE_THAN_THE_FEWEST * fewest + 2 * PAGE * len(read)
    return read[:, _tokens(indexed)]


def concentrated(made: Made, sharpness: float) -> Made:
    """Scale the queries so that few tokens carry the weight."""
    made[0].query *= sharpness
    return made


@EVERY_WAY
@pytest.mark.parametrize("kind", [*BITS, *ELEMENTS])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.99, 0.9999])
def test_the_fewest_pages_that_carry_the_share_are_read(is_integer: bool, kind: int | str, top_p: float):
    options = {"num_kv_heads": 2, "group": 4}
    if isinstance(kind, int):
        made = make(1, 30, 70, bits=(kind, kind), **options)
    else:
        made = make_plain(1, 30, 70, kind, **options)
    read = check(concentrated(made, 3), is_integer, top_p)
    assert (0 < read.mean() < 1) == (top_p < 0.999)


@pytest.mark.covering(2)
@EVERY_WAY
@pytest.mark.parametrize("maker", [make, make_plain])
@pytest.mark.parametrize(("first", "last"), [(0, 1), (3, 128)])
@pytest.mark.parametrize("indexed", [1, 5, 130])
@pytest.mark.parametrize("dims", [(64, 64), (80, 96), (24, 12)])
@pytest.mark.parametrize("group", [1, 8])
def test_selected_attention_when_shapes_vary_then_is_exact(
    is_integer: bool, maker: Callable[..., Made], first: int, last: int, indexed: int, dims: tuple[int, int], group: int
):
    made = maker(first, indexed, last, batch=2, num_kv_heads=2, group=group, dims=dims, lanes=16)
    check(concentrated(made, 3), is_integer, 0.95, dims[0] ** -0.5, first, last)


@EVERY_WAY
@pytest.mark.soak
@search_at_random(40, 1000)
@given(data=st.data())
def test_attention_when_shapes_and_masks_are_random_then_is_exact(is_integer: bool, data: st.DataObject):
    draw = data.draw
    seed, first, last = draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 2)), draw(st.integers(16, 130))
    made = draw(st.sampled_from([make, make_plain]))(
        first,
        draw(st.integers(1, 9)),
        last,
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
    top_p = draw(st.sampled_from([0.5, 0.95, 0.999]))
    check(made, is_integer, top_p, scale, first, last, **random_masks(draw, case, seed))
    count("selected attention compared with float64")


@EVERY_WAY
@pytest.mark.parametrize("maker", [make, make_plain])
def test_what_is_left_out_enters_as_an_estimate(is_integer: bool, maker: Callable[..., Made]):
    made = maker(1, 30, 70, num_kv_heads=2, group=4, batch=2)
    set_integer_kernels(None if is_integer else False)
    case, indexed = made[0], index_of(made)
    out, read = run_selected(made, indexed, 0.5)
    assert 0.2 < read.mean() < 0.8
    expected, _ = with_estimates(case, indexed, read, 0.125)
    seen = read.reshape(2, 2, 1, -1).repeat(4, axis=1).astype(np.uint8)
    without = attention(case, 0.125, visible=seen)[0]
    assert np.abs(out - expected).max() < 0.1 * np.abs(without - expected).max()


@EVERY_WAY
def test_where_every_page_is_needed_bits_are_those_of_reading_all(is_integer: bool):
    made = concentrated(make(1, 70, 90, num_kv_heads=3, group=4), 0.0)
    set_integer_kernels(None if is_integer else False)
    out, read = run_selected(made, index_of(made), 1 - 1e-6)
    assert read.all()
    np.testing.assert_array_equal(out, run(made, is_integer)[0])


@EVERY_WAY
@pytest.mark.parametrize("maker", [make, make_plain])
def test_where_more_than_the_most_would_be_read_all_is(is_integer: bool, maker: Callable[..., Made]):
    made = concentrated(maker(1, 70, 90, num_kv_heads=3, group=4), 3)
    expected, indexed = run(made, is_integer)[0], index_of(made, last=90)
    share = run_selected(made, indexed, 0.9)[1][:, _tokens(indexed)].mean()
    workspace = Workspace(shape_of(made[0]))
    for most, is_all in ((share + 0.01, False), (share - 0.01, True)):
        out = attend_in(workspace, made, indexed=indexed, top_p=0.9, most=most)
        assert (workspace.tokens_read == 3 * 70 * BLOCK) == is_all
        assert np.allclose(out, expected, rtol=0, atol=1e-6) == is_all
        if maker is make:  # segments are those of reading all
            assert np.array_equal(out, expected) == is_all


@pytest.mark.parametrize("maker", [make, make_plain])
def test_nothing_indexed_is_read_where_the_rest_carries_the_share(maker: Callable[..., Made]):
    made = maker(1, 30, 70, num_kv_heads=2, group=4)
    case, indexed = made[0], index_of(made)
    case.query[...] = 40 * np.repeat(case.keys[:, :, :1], case.group, axis=1)  # the first key, many times over
    _, read = run_selected(made, indexed, 0.99)
    assert not read[:, _tokens(indexed)].any()


@EVERY_WAY
@pytest.mark.parametrize("maker", [make, make_plain])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_query_that_is_not_a_number_does_not_become_plausible(
    is_integer: bool, maker: Callable[..., Made], bad: float
):
    set_integer_kernels(None if is_integer else False)
    made = maker(1, 9, 70)
    indexed = index_of(made)
    made[0].query[0, 0, 0, 7] = bad
    out, read = run_selected(made, indexed, 0.9)
    assert not np.isfinite(out).any()
    assert read.all()


@EVERY_WAY
def test_a_key_that_is_not_a_number_is_read(is_integer: bool):
    set_integer_kernels(None if is_integer else False)
    made = make_plain(1, 9, 70, "float32")
    made[0].keys[0, 0, 200, 5] = np.nan
    made[1][0][3, 0, 5, 8] = np.nan
    out, read = run_selected(made, index_of(made), 0.9)
    assert np.isnan(out).all()
    assert read.all()


@EVERY_WAY
@pytest.mark.parametrize("height", [300.0, 3000.0])
def test_a_score_that_is_far_above_all_others_is_found(is_integer: bool, height: float):
    made = make_plain(1, 30, 70, "float32", num_kv_heads=2, group=4)
    set_integer_kernels(None if is_integer else False)
    case = made[0]
    case.query[...] = np.repeat(case.keys[:, :, 999:1000], case.group, axis=1)
    case.query *= height / np.square(case.keys[:, :, 999]).sum(axis=-1).min() * 8
    out, read = run_selected(made, index_of(made), 0.9)
    assert read[:, 999].all()
    np.testing.assert_allclose(out, attention(case, 0.125)[0], rtol=0, atol=1e-4 * np.abs(case.values).max())


@EVERY_WAY
def test_a_query_that_sees_nothing_but_tokens_of_no_weight_reads_all(is_integer: bool):
    made = make_plain(1, 9, 70, "float32")
    set_integer_kernels(None if is_integer else False)
    bias = np.full((1, 1, 1, made[0].tokens), -np.inf, np.float32)
    bias[..., 100:300] = -5000.0
    out, read = run_selected(made, index_of(made), 0.9, bias=bias)
    assert read.all()
    np.testing.assert_allclose(out, attention(made[0], 0.125, bias=bias)[0], rtol=0, atol=1e-4)


def test_a_scale_that_turns_scores_around_reads_all():
    made = make(1, 9, 70)
    workspace = Workspace(shape_of(made[0]))
    out = attend_in(workspace, made, scale=-0.125, indexed=index_of(made), top_p=0.5)
    assert workspace.tokens_read == 9 * BLOCK
    np.testing.assert_array_equal(out, attend_in(workspace, made, scale=-0.125))


def test_a_workspace_is_used_again_for_fewer_and_more_blocks():
    workspace = Workspace(Shape(1, 2, 4, 1, 64, 64))
    for blocks in (3, 200, 70):
        made = concentrated(make(1, blocks, 70, num_kv_heads=2, group=4, seed=blocks), 3)
        expected, _ = run_selected(made, index_of(made), 0.9)
        np.testing.assert_array_equal(attend_in(workspace, made, indexed=index_of(made), top_p=0.9), expected)
