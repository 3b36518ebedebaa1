"""The handles that `update` returns for attention on the CPU: tensors without data until it is needed."""

import copy
import warnings
from collections.abc import Callable
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache
from transformers.integrations.sdpa_attention import repeat_kv

from hf_hybrid_cache import (
    DynamicHybridCache,
    HybridCache,
    Placement,
    QuantizedHybridCache,
    StaleHandleError,
)
from hf_hybrid_cache.attention.handles import KVHandle
from hf_hybrid_cache.kernels.attention.workspace import set_prefill_kernel

from common.lazy_streams import copy_late
from common.soak import search_at_random

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 16
CONFIG = LlamaConfig(
    num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, hidden_size=128, vocab_size=8
)
Pair = tuple[torch.Tensor, torch.Tensor]
WARNING = "Attention asks for the keys and values"


def states(tokens: int, seed: int, batch: int = 2, dtype: torch.dtype = torch.float32) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, KV_HEADS, tokens, HEAD_DIM)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return keys, values


def query_of(new: int) -> torch.Tensor:
    return torch.randn(2, HEADS, new, HEAD_DIM, generator=torch.Generator().manual_seed(2))


def decode_step(
    past: int, new: int = 1, dtype: torch.dtype = torch.float32, is_streamed: bool = False
) -> tuple[Pair, Pair, torch.Tensor]:
    """Make handles after `new` tokens on top of `past`, the same states as tensors, and a query."""
    ours, stock = DynamicHybridCache(CONFIG, cpu_decode=True), DynamicCache(config=CONFIG)
    if is_streamed:
        copy_late(ours)
    for cache in (ours, stock):
        cache.update(*states(past, 0, dtype=dtype), 0)
    handles, tensors = (cache.update(*states(new, 1, dtype=dtype), 0) for cache in (ours, stock))
    return handles, tensors, query_of(new)


@pytest.fixture
def never_materialised():
    """Turn the warning that states were materialised into an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=WARNING)
        yield


OPERATIONS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda keys, values: keys[:, :, None, :, :],
    lambda keys, values: keys.view(2, KV_HEADS, -1),
    lambda keys, values: keys.expand(2, *keys.shape[1:]),
    lambda keys, values: values.to(torch.bfloat16),
    lambda keys, values: torch.cat([keys, values], dim=2),
    lambda keys, values: torch.nn.functional.linear(values, torch.ones(3, HEAD_DIM)),
    lambda keys, values: repeat_kv(keys, 4).transpose(2, 3).contiguous(),
    lambda keys, values: torch.softmax(query_of(1) @ repeat_kv(keys, 4).mT, -1) @ repeat_kv(values, 4),
    lambda keys, values: torch.tensor(keys.tolist()),
    lambda keys, values: torch.from_numpy(keys.numpy(force=True).copy()),
]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("past", [1, 63, 64, 200])
def test_any_operation_gets_the_real_states(past: int, is_streamed: bool):
    handles, tensors, _ = decode_step(past, is_streamed=is_streamed)
    with pytest.warns(UserWarning, match=WARNING) as caught:
        results = [(operation(*handles), operation(*tensors)) for operation in OPERATIONS]
    assert len(caught) == 1
    for ours, theirs in results:
        assert torch.equal(ours, theirs)
        assert type(ours.clone()) is torch.Tensor


# Functions of the query, keys, values and a mask.
CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "enable_gqa": partial(scaled_dot_product_attention, enable_gqa=True),
    "repeat_kv": lambda query, keys, values, mask: scaled_dot_product_attention(
        query, repeat_kv(keys, 4), repeat_kv(values, 4), attn_mask=mask
    ),
    "moved nowhere": lambda query, keys, values, mask: scaled_dot_product_attention(
        query, keys.to(query.device), values.to(query.device), mask, enable_gqa=True
    ),
    "by name": lambda query, keys, values, mask: scaled_dot_product_attention(
        query=query, key=keys, value=values, attn_mask=mask, scale=0.3, enable_gqa=True
    ),
}


@st.composite
def masks(draw: st.DrawFn, tokens: int, new: int) -> torch.Tensor | None:
    """Masks with as few axes, and as few sizes, as there may be; some rows may see nothing."""
    shape = (*(draw(st.sampled_from([1, size])) for size in (2, HEADS, new)), tokens)[draw(st.integers(0, 2)) :]
    random = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 9))))
    hidden = random < draw(st.sampled_from([-10.0, 0.0, 1.5]))
    kind = draw(st.sampled_from(["none", "seen", "strided", "added", "lowest"]))
    if kind == "strided":
        return (~hidden).repeat_interleave(2, -1)[..., ::2]
    return {
        "none": None,
        "seen": ~hidden,
        "added": random.masked_fill(hidden, -torch.inf),
        "lowest": hidden * torch.finfo(torch.float32).min,
    }[kind]


@pytest.mark.parametrize("call", CALLS)
@search_at_random(20)
@given(data=st.data())
def test_attention_runs_without_the_states(call: str, never_materialised, data: st.DataObject):
    past, new = data.draw(st.sampled_from([(1, 1), (63, 1), (64, 1), (200, 1), (60, 5), (200, 16)]))
    handles, tensors, query = decode_step(past, new)
    mask = data.draw(masks(past + new, new))
    with torch.inference_mode():
        for _ in range(2):
            ours, theirs = (CALLS[call](query, *pair, mask) for pair in (handles, tensors))
            assert type(ours) is torch.Tensor
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_queries_packed_as_heads_of_their_own_attend_without_the_states(never_materialised):
    handles, tensors, query = decode_step(100)
    packed = query.reshape(2, KV_HEADS, -1, HEAD_DIM)
    ours, theirs = (scaled_dot_product_attention(packed, *pair) for pair in (handles, tensors))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("step", [1, 2], ids=["read where it is", "copied for the kernel"])
def test_a_mask_that_changes_in_place_is_read_again(step: int):
    handles, tensors, query = decode_step(100)
    mask = torch.ones(1, 1, 1, 101 * step, dtype=torch.bool)[..., ::step]
    for hidden in (0, 50):
        mask[..., :hidden] = False
        ours, theirs = (
            scaled_dot_product_attention(query, *pair, attn_mask=mask, enable_gqa=True) for pair in (handles, tensors)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_what_the_kernel_does_not_cover_is_left_to_torch_with_its_errors():
    for options in ({"is_causal": True}, {"attn_mask": torch.zeros(1, 1)}):
        handles, tensors, query = decode_step(100)
        with pytest.warns(UserWarning, match=WARNING + ".*scaled_dot_product_attention with such arguments"):
            ours = scaled_dot_product_attention(query, *handles, enable_gqa=True, **options)
        assert torch.equal(ours, scaled_dot_product_attention(query, *tensors, enable_gqa=True, **options))
    with pytest.raises(RuntimeError):
        scaled_dot_product_attention(query[..., :3], *handles, enable_gqa=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.update(*states(1, 5), 0),
        lambda cache: cache.crop(-1),
        lambda cache: cache.reset(),
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    ],
    ids=["update", "crop", "reset", "reorder"],
)
def test_handles_are_refused_once_the_cache_has_changed(change):
    cache = DynamicHybridCache(CONFIG, cpu_decode=True)
    cache.update(*states(10, 0), 0)
    keys, values = cache.update(*states(1, 1), 0)
    change(cache)
    with pytest.raises(StaleHandleError, match="after the cache had changed"):
        scaled_dot_product_attention(query_of(1), keys, values, enable_gqa=True)
    with pytest.raises(StaleHandleError, match="cpu_decode=False"):
        keys + 1


def are_handles(cache: HybridCache) -> list[bool]:
    """Whether `update` returns handles for a first token, then 17, then 16."""
    return [isinstance(cache.update(*states(tokens, seed), 0)[0], KVHandle) for seed, tokens in enumerate((1, 17, 16))]


def test_chunks_are_handles_where_the_kernel_attends_to_them(torch_attends):
    """First tokens are not if they are quantized later, or torch is faster, nor are long chunks of an accelerator."""
    streamed = DynamicHybridCache(CONFIG, cpu_decode=True)
    copy_late(streamed)
    assert are_handles(streamed) == [False, False, True]
    assert are_handles(DynamicHybridCache(CONFIG, cpu_decode=True)) == [False, True, True]
    set_prefill_kernel(None)
    assert are_handles(DynamicHybridCache(CONFIG, cpu_decode=True)) == [True] * 3
    assert are_handles(QuantizedHybridCache(CONFIG, cpu_decode=True)) == [False, True, True]


@pytest.mark.parametrize(
    ("cpu_decode", "expected"),
    [(None, [True, True]), (False, [False, False])],
)
def test_layers_attended_on_the_cpu_are_those_asked_for(cpu_decode, expected: list[bool]):
    cache = HybridCache(CONFIG, Placement(cpu_decode=cpu_decode))
    for layer in range(2):
        cache.update(*states(3, 0), layer)
    assert [isinstance(cache.update(*states(1, 0), layer)[0], KVHandle) for layer in range(2)] == expected


def test_types_without_a_kernel_use_torch_unless_the_kernel_was_asked_for():
    cache, dtype = DynamicHybridCache(CONFIG), torch.float64
    cache.update(*states(3, 0, dtype=dtype), 0)
    assert type(cache.update(*states(1, 0, dtype=dtype), 0)[0]) is torch.Tensor
    with pytest.raises(ValueError, match=r"float32, float16 or bfloat16; layer 0 has torch\.float64"):
        DynamicHybridCache(CONFIG, cpu_decode=True).update(*states(3, 0, dtype=dtype), 0)


def test_states_when_read_by_default_then_one_warning_names_what_reads():
    cache = DynamicHybridCache(CONFIG)
    for seed in (1, 2):
        for layer in range(2):
            handles = cache.update(*states(70, 0), layer)
            scaled_dot_product_attention(query_of(70), *handles, enable_gqa=True, is_causal=True)
        keys, values = cache.update(*states(1, seed), 0)
        assert isinstance(keys, KVHandle)  # after reset, too
        scaled_dot_product_attention(query_of(1), keys, values, enable_gqa=True)
        with pytest.warns(UserWarning, match=WARNING + r".*aten\.add reads them.*until reset\(\)"):
            real = keys + 0
        assert torch.equal(real, torch.cat([states(70, 0)[0], states(1, seed)[0]], dim=2))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert type(cache.update(*states(1, seed), 1)[0]) is torch.Tensor
            assert type(cache.update(*states(1, 2), 0)[0] + 0) is torch.Tensor
        assert cache.stats.decisions == [(71, "cpu_decode", False, "aten.add reads keys and values")]
        assert copy.deepcopy(cache).stats.decisions == cache.stats.decisions
        cache.reset()
        assert not cache.stats.decisions


def test_eager_attention_when_cache_chose_the_kernel_then_no_warning():
    config = copy.deepcopy(CONFIG)
    config._attn_implementation = "eager"
    cache = DynamicHybridCache(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(2):
            keys, _ = cache.update(*states(70, seed), 0)
            keys + 0


def test_result_when_next_layer_attends_then_is_not_overwritten(never_materialised):
    cache, results = DynamicHybridCache(CONFIG, cpu_decode=True), []
    for layer in range(2):
        cache.update(*states(300, layer), layer)
    for layer in range(2):
        handles = cache.update(*states(1, layer), layer)
        results.append(scaled_dot_product_attention(query_of(1), *handles, enable_gqa=True))
        results.append(results[-1].clone())
    assert torch.equal(results[0], results[1])


def test_memory_for_many_shapes_of_queries_is_given_back():
    cache = DynamicHybridCache(CONFIG, cpu_decode=True)
    cache.update(*states(3, 0), 0)
    for new in range(1, 17):
        scaled_dot_product_attention(query_of(new), *cache.update(*states(new, 0), 0), enable_gqa=True)
    assert len(cache._stores.attention.host._workspaces) <= 8
