"""The cost of a cache, against the reports of real caches that real models have filled."""

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from hf_hybrid_cache import HybridCache, KVCodec, Placement, minmax
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.layers import tensors_of
from hf_hybrid_cache.planning import model_cost
from hf_hybrid_cache.planning.cache_cost import CacheCost, cache_cost, stock_cost
from hf_hybrid_cache.planning.candidates import Candidate, Strategy
from hf_hybrid_cache.planning.model_cost import ModelCost

from models.tiny_models import COMMON, FAMILIES, tiny_model

CHUNK = 128
ON_CPU = {
    "dynamic": Placement(),
    "dynamic, torch attends": Placement(cpu_decode=False),
    "streamed": Placement(offload=True, cpu_decode=False),
    "streamed, two ahead": Placement(offload=True, prefetch_layers=2, cpu_decode=False),
    "split": Placement(cpu_decode=True, device_tokens=300),
    "split, streamed": Placement(offload=True, cpu_decode=False, device_tokens=500),
}
CODECS = {"8": minmax(8), "4-2": minmax((4, 2)), "2": minmax(2, sink_tokens=0)}


@functools.cache
def model_and_cost(family: str) -> tuple[PreTrainedModel, ModelCost]:
    if family == "odd_head_dim":
        config = LlamaConfig(**COMMON | {"num_hidden_layers": 3, "head_dim": 40, "max_position_embeddings": 4096})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    else:
        model = tiny_model(family, torch.bfloat16)
    return model, model_cost(model.config, torch.bfloat16, chunk=CHUNK)


def made_and_cost(family: str, placement: Placement, codec: str | None, context: int) -> tuple[HybridCache, CacheCost]:
    """Return a cache on the CPU, still empty, and what it is planned to cost at this context."""
    model, costs = model_and_cost(family)
    codecs = CODECS.get(codec or "")
    cost = cache_cost(costs, placement, codecs, context, on_cpu=True)
    return HybridCache(model.config, placement, codec=codecs), cost


@torch.inference_mode()
def read(model: PreTrainedModel, cache: Cache, batch: int, num_tokens: int, chunk: int, device: str = "cpu") -> None:
    for ids in torch.ones(batch, num_tokens, dtype=torch.long, device=device).split(chunk, dim=1):
        model(ids, **cache_argument(cache), logits_to_keep=1)


def fill(model: PreTrainedModel, cache: Cache, num_tokens: int, device: str = "cpu") -> None:
    """Compute a prompt in chunks, and two tokens more."""
    read(model, cache, 1, num_tokens - 2, CHUNK, device)
    read(model, cache, 1, 2, 1, device)


@pytest.mark.parametrize(
    ("family", "context", "placement", "codec"),
    [
        ("llama", 1024, "dynamic", None),
        ("llama", 1087, "streamed", "8"),
        ("llama", 1091, "split", "4-2"),
        ("llama", 1100, "streamed, two ahead", "2"),
        ("odd_head_dim", 1300, "dynamic, torch attends", "8"),
        ("gemma3", 1100, "split, streamed", "4-2"),
        ("gemma4_shared", 1100, "dynamic", "2"),
        ("qwen3_next", 1100, "streamed", None),
        ("deepseek_v3", 1100, "streamed", "8"),
    ],
)
def test_bytes_are_those_that_a_cache_reports_at_both_ends_of_an_answer(
    family: str, context: int, placement: str, codec: str | None
):
    model, _ = model_and_cost(family)
    cache, cost = made_and_cost(family, ON_CPU[placement], codec, context)
    read(model, cache, 1, context - 2, CHUNK)
    at_prompt = cache.memory()
    read(model, cache, 1, 2, 1)
    report = cache.memory()
    assert report.num_tokens == context
    assert cost.decode.device == report.device_bytes == 0
    assert cost.decode.host == pytest.approx(report.host_bytes, rel=0.03)
    if family != "deepseek_v3":
        assert cost.prefill.host == pytest.approx(at_prompt.host_bytes, rel=0.03)


@pytest.mark.parametrize("codec", [None, "8", "2"])
def test_where_the_cpu_attends_to_a_share_no_more_is_held_than_is_planned(codec: str | None):
    """A slot may be smaller, which has held what is in full precision, or is filled with a share only."""
    placement = Placement(offload=True, cpu_decode=0.5, device_tokens=300)
    cache, cost = made_and_cost("llama", placement, codec, 1100)
    fill(model_and_cost("llama")[0], cache, 1100)
    assert cost.decode.host / 2 <= cache.memory().host_bytes <= cost.decode.host


@pytest.mark.parametrize(
    ("family", "context"),
    [("llama", 1089), ("gemma3", 500), ("gemma4_shared", 200), ("qwen3_next", 100), ("deepseek_v3", 100)],
)
def test_bytes_on_an_accelerator_are_those_that_the_cache_reports_there(family: str, context: int):
    """The meta device has no data, and is none of the CPU's."""
    _, costs = model_and_cost(family)
    config = FAMILIES[family]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    cache = HybridCache(config, Placement(cpu_decode=False))
    fill(model, cache, context, "meta")
    cost = cache_cost(costs, Placement(), None, context, on_cpu=False)
    assert cost.decode.host == cache.memory().host_bytes == 0
    assert cost.decode.device == pytest.approx(cache.memory().device_bytes, rel=0.03)
    stock = DynamicCache(config=config)
    fill(model, stock, context, "meta")
    held = sum(tensor.nbytes for layer in stock.layers for tensor in tensors_of(layer))
    assert stock_cost(costs, context, on_cpu=False).decode.device == held


def test_on_a_gpu_layers_that_are_not_there_are_in_host_memory():
    _, model = model_and_cost("llama")
    context = 16_384
    resident, streamed, attended = (
        Candidate(name, strategy).cost(model, context)
        for name, strategy in [
            ("dynamic", Strategy.GPU),
            ("offloaded", Strategy.STREAMED),
            ("dynamic", Strategy.CPU_ATTENTION),
        ]
    )
    all_states = 2 * 4 * 2 * 16 * 2 * context
    assert resident.decode.host == 0
    assert all_states <= resident.decode.device <= 1.13 * all_states
    # Two of four layers take turns on the GPU, but for attention on the CPU only during the prompt.
    assert streamed.decode.device == attended.prefill.device == resident.decode.device // 2
    assert attended.decode.device == 0
    # Page-locked in chunks on the way, and not when the model is on the CPU.
    assert all_states <= streamed.decode.host == attended.decode.host <= 1.13 * all_states


def test_states_of_a_layer_when_no_kernel_reads_codes_then_are_held():
    _, model = model_and_cost("llama")
    on_gpu, codec = Candidate("quantized-4", Strategy.GPU).cost(model, 8192), minmax(4)
    by_token = KVCodec(codec.values, codec.values)
    without_kernel = cache_cost(model, Placement(), by_token, 8192, on_cpu=False)
    states_of_one = 2 * 2 * 16 * 2 * 8192
    assert on_gpu.decode.device < on_gpu.prefill.device
    assert without_kernel.decode.device == without_kernel.prefill.device > on_gpu.decode.device + states_of_one
