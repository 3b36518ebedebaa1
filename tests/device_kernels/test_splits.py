"""Attention to codes and states by the kernel for devices, against attention in float64 on what they stand for."""

from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from kernels import calls
from kernels.reference import Case, as_torch_mask, attention, hadamard, random_masks

from hf_hybrid_cache.device_kernels import Codes, Splits, attend_in_splits, merged
from hf_hybrid_cache.kernels import BITS, BLOCK, PackedLayout

from common.soak import search_at_random

SCALE = 0.125
# Bounds relative to the largest value. Products of bfloat16 round dequantized states, queries and weights to 8 bits.
# Powers of two are approximated by a GPU.
BOUNDS = {torch.float32: 1e-5 if torch.cuda.is_available() else 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-2}
DTYPES = [torch.float32, *(pytest.param(each, marks=pytest.mark.cuda) for each in (torch.bfloat16, torch.float16))]


class Made(NamedTuple):
    """The arguments of one call: a case in float64, keys and values in full precision, and codes between them."""

    case: Case
    ends: tuple[torch.Tensor, torch.Tensor]
    codes: Codes


def make(
    device: torch.device, last: int = 70, is_streamed: bool = False, dtype: torch.dtype = torch.float32, **form: Any
) -> Made:
    """Blocks, blocks of codes, and `last` tokens; records in the order of a streamed layer's slots, or not."""
    form = {"first": 1, "coded": 3, "bits": (4, 4), "lanes": 64, "is_rotated": True} | form
    case, stored = calls.make(str(dtype).removeprefix("torch."), last, rounded_query=True, **form)
    keys, values = (torch.from_numpy(bits).view(dtype).to(device) for bits in stored[:2])
    packed = [torch.empty(*keys.shape[:2], 0, 0, dtype=torch.uint8, device=device)] * 2
    if stored.codes is not None:
        for role, records in enumerate(stored.codes[:2]):
            of_heads = torch.from_numpy(records).unflatten(1, keys.shape[:2]).permute(1, 2, 0, 3).to(device)
            packed[role] = of_heads if is_streamed else of_heads.contiguous()
    of_both = form["lanes"], form["is_rotated"]
    layouts = (
        PackedLayout.of_keys(form["bits"][0], keys.shape[3], *of_both),
        PackedLayout.of_values(form["bits"][1], values.shape[3], *of_both),
    )
    return Made(case, (keys, values), Codes(*packed, form["first"] * BLOCK, *layouts))


def run(made: Made, mask: torch.Tensor | None = None, dtype: torch.dtype = torch.float32) -> Splits:
    keys, values = made.ends
    query = torch.from_numpy(made.case.query).to(keys.device, dtype).reshape(*keys.shape[:2], -1, keys.shape[3])
    turned = query.float()
    if made.codes.key_layout.rotation > 1:
        turned = turned @ torch.from_numpy(hadamard(keys.shape[3])).to(turned)
    return attend_in_splits(query, turned, keys, values, made.codes, made.case.query.shape[2], mask, SCALE)


def result_of(made: Made, splits: Splits) -> np.ndarray:
    """Merge all splits, as `[batch, query_heads, query_length, value_dim]`."""
    value_dim = splits.outs.shape[-1]
    is_rotated = made.codes.value_layout.rotation > 1
    turn = torch.from_numpy(hadamard(value_dim)).float()[None].to(splits.outs.device) if is_rotated else None
    return merged(splits, turn, torch.float32).reshape(*made.case.query.shape[:3], -1).double().cpu().numpy()


def check(
    made: Made,
    dtype: torch.dtype = torch.float32,
    masks: dict[str, Any] | None = None,
    mask: torch.Tensor | None = None,
) -> Splits:
    """Run a call, and compare its splits, merged, with float64 under the same masks, of which `mask` is made."""
    splits = run(made, mask, dtype)
    assert splits.outs.dtype == splits.lse.dtype == torch.float32
    exact, _ = attention(made.case, SCALE, **(masks or {}))
    largest = max(1.0, np.abs(made.case.values).max())
    np.testing.assert_allclose(result_of(made, splits), exact, rtol=0, atol=BOUNDS[dtype] * largest)
    return splits


def test_many_codes_are_split_into_parts(device):
    splits = check(make(device, 127, first=2, coded=16, dims=(16, 16)))
    assert splits.outs.shape[3] > 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@search_at_random(12)
@given(data=st.data())
def test_codes_and_states_are_attended_to_under_any_mask_as_in_float64(device, dtype: torch.dtype, data: st.DataObject):
    is_wide = data.draw(st.integers(0, 9)) == 0
    made = make(
        device,
        first=data.draw(st.integers(0, 2)),
        coded=data.draw(st.integers(0, 1 if is_wide else 4)),
        last=data.draw(st.integers(1, 130)),
        batch=data.draw(st.integers(1, 2)),
        num_kv_heads=data.draw(st.integers(1, 2)),
        group=data.draw(st.sampled_from([1, 3, 8])),
        length=data.draw(st.sampled_from([1, 2, 7])),
        dims=data.draw(st.sampled_from([(80, 96), (128, 64), (256, 256)])) if is_wide else (16, 32),
        lanes=data.draw(st.sampled_from([64, 32])),
        bits=(data.draw(st.sampled_from(BITS)), data.draw(st.sampled_from(BITS))),
        is_rotated=data.draw(st.booleans()),
        dtype=dtype,
        is_streamed=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 99)),
    )
    # Queries in the middle of a prompt come with a mask, so that there is no flag for them.
    masks = random_masks(data.draw, made.case, 1, dtype)
    mask = as_torch_mask(made.case, dtype, **masks)
    check(made, dtype, masks, None if mask is None else mask.to(device))


@pytest.mark.parametrize("role", [0, 1])
def test_attention_when_not_finite_then_result_is_not_finite(device, role: int):
    made = make(device)
    made.ends[role][0, 0, 3, 5] = torch.nan
    assert np.isnan(result_of(made, run(made))).any()


@pytest.mark.parametrize(("num_splits", "maps", "value_dim"), [(1, 0, 64), (65, 1, 64), (130, 2, 80)])
def test_parts_are_merged_by_what_was_seen_of_them(device, num_splits: int, maps: int, value_dim: int):
    generator = torch.Generator().manual_seed(0)
    outs = torch.randn(2, 2, 3, num_splits, value_dim, generator=generator)
    lse = 4 * torch.randn(2, 2, 3, num_splits, generator=generator)
    lse[torch.rand(lse.shape, generator=generator) < 0.3] = -torch.inf
    lse[0, 0, 0] = -torch.inf
    outs[lse == -torch.inf] = 0  # no token of this part is seen
    result_map = torch.randn(maps, value_dim, value_dim, generator=generator).to(device) if maps else None
    ours = merged(Splits(outs.to(device), lse.to(device)), result_map, torch.float32)
    weights = lse.double().clamp_min(-1e300).softmax(dim=-1)[..., None]
    exact = (weights * outs.double()).nan_to_num(0)
    quantized = exact[..., :-1, :].sum(dim=-2)
    quantized = quantized if result_map is None else quantized @ result_map.cpu().double()
    expected = quantized + exact[..., -1, :]
    torch.testing.assert_close(ours.double().cpu(), expected, rtol=1e-5, atol=2e-5)
    assert not ours[0, 0, 0].any()
