"""The handles that `update` returns for attention on the CPU: tensors without data until it is needed."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache
from transformers.integrations.sdpa_attention import repeat_kv

from hf_hybrid_cache import (
    DynamicHybridCache,
    HybridCache,
    OffloadedHybridCache,
    Placement,
    QuantizedHybridCache,
    StaleHandleError,
)
from hf_hybrid_cache.attention import compile_kernels
from hf_hybrid_cache.attention.handles import KVHandle
from hf_hybrid_cache.kernels.attention.workspace import set_prefill_kernel

from common.lazy_streams import copy_late

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


def decode_step(
    past: int, new: int = 1, batch: int = 2, dtype: torch.dtype = torch.float32, is_streamed: bool = False
) -> tuple[Pair, Pair, torch.Tensor]:
    """Make handles after `new` tokens on top of `past`, the same states as tensors, and a query."""
    ours, stock = DynamicHybridCache(CONFIG, cpu_decode=True), DynamicCache(config=CONFIG)
    if is_streamed:
        copy_late(ours)
    for cache in (ours, stock):
        cache.update(*states(past, 0, batch, dtype), 0)
    handles, tensors = (cache.update(*states(new, 1, batch, dtype), 0) for cache in (ours, stock))
    query = torch.randn(batch, HEADS, new, HEAD_DIM, generator=torch.Generator().manual_seed(2)).to(dtype)
    return handles, tensors, query


@pytest.fixture(autouse=True, scope="module")
def kernels_are_compiled():
    """Compile kernels first: Numba catches warnings while it compiles, for the whole process."""
    compile_kernels(torch.float32, False, lambda: None)


@pytest.fixture
def never_materialised():
    """Turn the warning that states were materialised into an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=WARNING)
        yield


@pytest.mark.parametrize("past", [1, 62, 63, 64, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_handle_is_like_the_tensor_it_stands_for(past: int, dtype: torch.dtype, never_materialised):
    handles, tensors, _ = decode_step(past, dtype=dtype)
    for handle, tensor in zip(handles, tensors, strict=True):
        assert isinstance(handle, KVHandle)
        assert (handle.shape, handle.dtype, handle.device) == (tensor.shape, tensor.dtype, tensor.device)
        assert (handle.dim(), handle.size(2), handle.numel()) == (4, past + 1, tensor.numel())
        assert not handle.requires_grad


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("past", [1, 62, 63, 64, 200])
def test_any_operation_gets_the_real_states(past: int, is_streamed: bool):
    handles, tensors, query = decode_step(past, is_streamed=is_streamed)
    operations = [
        lambda keys, values: keys + 1,
        lambda keys, values: keys.transpose(2, 3),
        lambda keys, values: values[:, :, -1],
        lambda keys, values: torch.cat([keys, values], dim=2),
        lambda keys, values: torch.stack([keys, values]),
        lambda keys, values: keys.view(2, KV_HEADS, -1),
        lambda keys, values: values.to(torch.bfloat16),
        lambda keys, values: keys.clone(),
        lambda keys, values: torch.nn.functional.linear(values, torch.ones(3, HEAD_DIM)),
        lambda keys, values: repeat_kv(keys, 4).transpose(2, 3).contiguous(),
        lambda keys, values: torch.softmax(query @ repeat_kv(keys, 4).transpose(2, 3), -1) @ repeat_kv(values, 4),
        lambda keys, values: torch.tensor(keys.tolist()),
        lambda keys, values: torch.from_numpy(keys.numpy(force=True).copy()),
        lambda keys, values: keys.expand(2, KV_HEADS, past + 1, HEAD_DIM),
        lambda keys, values: keys[:, :, None, :, :],
    ]
    with pytest.warns(UserWarning, match=WARNING) as caught:
        results = [(operation(*handles), operation(*tensors)) for operation in operations]
    assert len(caught) == 1
    for ours, theirs in results:
        assert torch.equal(ours, theirs)
        assert type(ours.clone()) is torch.Tensor


CALLS = {
    "moved_nowhere": lambda query, keys, values: scaled_dot_product_attention(
        query, keys.to(query.device), values.to(query.device), enable_gqa=True
    ),
    "enable_gqa": lambda query, keys, values: scaled_dot_product_attention(query, keys, values, enable_gqa=True),
    "repeat_kv": lambda query, keys, values: scaled_dot_product_attention(
        query, repeat_kv(keys, 4), repeat_kv(values, 4)
    ),
    "packed": lambda query, keys, values: scaled_dot_product_attention(
        query.reshape(2, KV_HEADS, -1, HEAD_DIM), keys, values
    ),
    "scale": lambda query, keys, values: scaled_dot_product_attention(query, keys, values, scale=0.3, enable_gqa=True),
    "by_name": lambda query, keys, values: scaled_dot_product_attention(
        query=query, key=keys, value=values, attn_mask=None, enable_gqa=True
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("past", "new"), [(1, 1), (63, 1), (64, 1), (200, 1), (60, 5), (200, 16)])
def test_attention_runs_without_the_states(call: str, past: int, new: int, never_materialised):
    handles, tensors, query = decode_step(past, new)
    with torch.inference_mode():
        ours, theirs = CALLS[call](query, *handles), CALLS[call](query, *tensors)
    assert type(ours) is torch.Tensor
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def masks(batch: int, tokens: int, new: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    padded = torch.ones(batch, 1, new, tokens, dtype=torch.bool)
    padded[1, :, :, : tokens // 2] = False
    causal = torch.ones(new, tokens, dtype=torch.bool).tril(tokens - new)
    return {
        "padded": padded,
        "causal_2d": causal,
        "causal_padded": padded & causal,
        "added": torch.randn(batch, HEADS, new, tokens, generator=generator),
        "added_bfloat16": torch.randn(1, 1, new, tokens, generator=generator).bfloat16().float(),
        "lowest": torch.where(padded, 0.0, torch.finfo(torch.float32).min),
        "strided": torch.ones(batch, 1, new, 2 * tokens, dtype=torch.bool)[..., ::2],
        "expanded": causal.expand(batch, HEADS, new, tokens),
        "one_row": torch.randn(1, tokens, generator=generator),
    }


@pytest.mark.parametrize("mask", masks(2, 2, 1))
@pytest.mark.parametrize(("past", "new"), [(63, 1), (200, 1), (100, 7)])
def test_mask_when_the_kernel_attends_then_is_applied(mask: str, past: int, new: int, never_materialised):
    handles, tensors, query = decode_step(past, new)
    given = masks(2, past + new, new)[mask]
    repeated = [[repeat_kv(each, 4) for each in pair] for pair in (handles, tensors)]
    for _ in range(2):
        ours, theirs = (scaled_dot_product_attention(query, *pair, attn_mask=given) for pair in repeated)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_mask_that_changes_in_place_is_read_again():
    handles, tensors, query = decode_step(100)
    mask = torch.ones(1, 1, 1, 101, dtype=torch.bool)
    for hidden in (0, 50):
        mask[..., :hidden] = False
        ours, theirs = (
            scaled_dot_product_attention(query, *pair, attn_mask=mask, enable_gqa=True) for pair in (handles, tensors)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"attn_mask": torch.zeros(1, 1)}], ids=["is_causal", "mask_for_all_tokens"]
)
def test_what_the_kernel_does_not_cover_is_left_to_torch(options: dict):
    handles, tensors, query = decode_step(100)
    with pytest.warns(UserWarning, match=WARNING + ".*scaled_dot_product_attention with such arguments"):
        ours = scaled_dot_product_attention(query, *handles, enable_gqa=True, **options)
    assert torch.equal(ours, scaled_dot_product_attention(query, *tensors, enable_gqa=True, **options))


def test_wrong_arguments_get_the_error_that_torch_gives():
    handles, _, query = decode_step(100)
    with pytest.warns(UserWarning, match=WARNING), pytest.raises(RuntimeError):
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
    query = torch.zeros(2, HEADS, 1, HEAD_DIM)
    with pytest.raises(StaleHandleError, match="after the cache had changed"):
        scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    with pytest.raises(StaleHandleError, match="cpu_decode=False"):
        keys + 1


def are_handles(cache: HybridCache) -> list[bool]:
    """Whether `update` returns handles for a first token, then 17, then 16."""
    return [isinstance(cache.update(*states(tokens, seed), 0)[0], KVHandle) for seed, tokens in enumerate((1, 17, 16))]


def test_chunks_when_attended_on_host_then_long_ones_use_the_accelerator():
    assert are_handles(DynamicHybridCache(CONFIG, cpu_decode=True)) == [True] * 3
    cache = DynamicHybridCache(CONFIG, cpu_decode=True)
    copy_late(cache)
    assert are_handles(cache) == [False, False, True]


def test_first_tokens_when_quantized_later_or_torch_faster_then_tensors(torch_attends):
    assert are_handles(DynamicHybridCache(CONFIG, cpu_decode=True)) == [False, True, True]
    set_prefill_kernel(None)
    assert are_handles(QuantizedHybridCache(CONFIG, cpu_decode=True)) == [False, True, True]


def attended_on_cpu(cache: HybridCache) -> list[bool]:
    for layer in range(2):
        cache.update(*states(3, 0), layer)
    return [isinstance(cache.update(*states(1, 0), layer)[0], KVHandle) for layer in range(2)]


@pytest.mark.parametrize(
    ("cpu_decode", "expected"),
    [(None, [True, True]), (True, [True, True]), (False, [False, False]), ([1], [False, True]), ((), [False, False])],
)
def test_layers_attended_on_the_cpu_are_those_asked_for(cpu_decode, expected: list[bool]):
    assert attended_on_cpu(HybridCache(CONFIG, Placement(cpu_decode=cpu_decode))) == expected


@pytest.mark.parametrize("cpu_decode", ["all", 3, [-1], [True], ["0"], [0.5]])
def test_other_values_of_cpu_decode_are_refused(cpu_decode):
    with pytest.raises(ValueError, match="True, False, None, a share between 0 and 1 or a collection of layer indices"):
        Placement(cpu_decode=cpu_decode)


@pytest.mark.parametrize("make", [DynamicHybridCache, OffloadedHybridCache, QuantizedHybridCache])
def test_some_layers_when_given_to_a_cache_are_refused_with_the_way_out(make: Callable):
    with pytest.raises(ValueError, match=r"HybridCache\(config, placement=Placement\(cpu_decode=\[0, 1\]\)\)"):
        make(CONFIG, cpu_decode=[0, 1])


def test_layers_that_the_model_does_not_have_are_refused_by_name():
    with pytest.raises(ValueError, match=r"layers \[2, 9\]; the model's full-attention layers are \[0, 1\]"):
        HybridCache(CONFIG, Placement(cpu_decode=[0, 9, 2]))


@pytest.mark.parametrize("dtype", [torch.float64])
def test_types_without_a_kernel_use_torch_unless_the_kernel_was_asked_for(dtype: torch.dtype):
    cache = DynamicHybridCache(CONFIG)
    cache.update(*states(3, 0, dtype=dtype), 0)
    assert type(cache.update(*states(1, 0, dtype=dtype), 0)[0]) is torch.Tensor
    with pytest.raises(ValueError, match=r"float32, float16 or bfloat16; layer 0 has torch\.float64"):
        DynamicHybridCache(CONFIG, cpu_decode=True).update(*states(3, 0, dtype=dtype), 0)


def test_states_when_read_by_default_then_one_warning_names_what_reads():
    cache, query = DynamicHybridCache(CONFIG), torch.randn(2, HEADS, 70, HEAD_DIM)
    for seed in (1, 2):
        for layer in range(2):
            handles = cache.update(*states(70, 0), layer)
            scaled_dot_product_attention(query, *handles, enable_gqa=True, is_causal=True)
        keys, _ = cache.update(*states(1, seed), 0)
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


def test_reset_when_something_had_read_states_then_kernel_attends_again(never_materialised):
    cache, query = DynamicHybridCache(CONFIG), torch.randn(2, HEADS, 1, HEAD_DIM)
    handles = cache.update(*states(70, 0), 0)
    scaled_dot_product_attention(query, *handles, enable_gqa=True)
    with pytest.raises(UserWarning, match="tolist reads them"):
        cache.update(*states(1, 1), 0)[0].tolist()
    cache.reset()
    cache.update(*states(70, 0), 0)
    handles = cache.update(*states(1, 1), 0)
    scaled_dot_product_attention(query, *handles, enable_gqa=True)
    assert isinstance(handles[0], KVHandle)
    assert cache.stats.kernel_seconds > 0


def test_eager_attention_when_cache_chose_the_kernel_then_no_warning():
    config = copy.deepcopy(CONFIG)
    config._attn_implementation = "eager"
    cache = DynamicHybridCache(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(2):
            keys, _ = cache.update(*states(70, seed), 0)
            keys + 0


def test_a_copied_cache_attends_to_its_own_states(never_materialised):
    cache = DynamicHybridCache(CONFIG, cpu_decode=True)
    cache.update(*states(70, 0), 0)
    twin = copy.deepcopy(cache)
    query = torch.randn(2, HEADS, 1, HEAD_DIM)
    results = [
        scaled_dot_product_attention(query, *each.update(*states(1, seed), 0), enable_gqa=True)
        for seed, each in ((1, cache), (2, twin))
    ]
    for seed, result in ((1, results[0]), (2, results[1])):
        tensors = (torch.cat(pair, dim=2) for pair in zip(states(70, 0), states(1, seed), strict=True))
        expected = scaled_dot_product_attention(query, *tensors, enable_gqa=True)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert twin.stats.kernel_seconds > 0


def test_result_when_next_layer_attends_then_is_not_overwritten(never_materialised):
    cache = DynamicHybridCache(CONFIG, cpu_decode=True)
    for layer in range(2):
        cache.update(*states(300, layer, batch=1), layer)
    cache.batch_repeat_interleave(3)
    results = []
    for layer in range(2):
        handles = cache.update(*states(1, layer, batch=3), layer)
        query = torch.randn(3, HEADS, 1, HEAD_DIM)
        results.append(scaled_dot_product_attention(query, *handles, enable_gqa=True))
        results.append(results[-1].clone())
    assert torch.equal(results[0], results[1])


def test_memory_for_many_shapes_of_queries_is_given_back():
    cache = DynamicHybridCache(CONFIG, cpu_decode=True)
    cache.update(*states(3, 0), 0)
    for new in range(1, 17):
        keys, values = cache.update(*states(new, 0), 0)
        scaled_dot_product_attention(torch.zeros(2, HEADS, new, HEAD_DIM), keys, values, enable_gqa=True)
    assert len(cache._stores.attention._host._workspaces) <= 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cpu_decode", [True, False, [1]])
def test_a_cache_moved_to_another_type_holds_the_converted_states(dtype: torch.dtype, cpu_decode):
    cache = HybridCache(CONFIG, Placement(cpu_decode=cpu_decode))
    for layer in range(2):
        cache.update(*states(5000, layer), layer)
    cache.to("cpu", dtype)
    for layer in range(2):
        keys, values = states(5000, layer)
        assert torch.equal(cache.layers[layer].keys, keys.to(dtype))
        assert torch.equal(cache.layers[layer].values, values.to(dtype))
        cache.update(*states(1, 7, dtype=dtype), layer)
    assert cache.get_seq_length() == 5001
