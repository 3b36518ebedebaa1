"""Tensor parallelism: processes share each layer, each with a cache of its heads; others share the tokens of these."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.distributed import DistributedConfig

from hf_hybrid_cache import DynamicHybridCache, OffloadedHybridCache, QuantizedHybridCache

from .groups import NEEDS_GROUPS, Group
from common.modes import answer
from common.slow import slow
from models.tiny_models import COMMON, random_prompt, tiny_model

pytestmark = [pytest.mark.xdist_group("groups"), NEEDS_GROUPS]

# Processes that share heads, and that share tokens.
LAYOUTS = [(2, 1), slow(1, 2), slow(2, 2)]
CACHES = {
    "stock": lambda config: DynamicCache(config=config),
    "dynamic": lambda config: DynamicHybridCache(config, cpu_decode=False),
    "offloaded": lambda config: OffloadedHybridCache(config, cpu_decode=False),
    "cpu_decode": lambda config: DynamicHybridCache(config, cpu_decode=True),
    "quantized-8": lambda config: QuantizedHybridCache(config, bits=8),
}
# Caches of several processes, which keep a share of the tokens each.
SHARED = {
    "shared": DynamicHybridCache,
    "shared-quantized-8": functools.partial(QuantizedHybridCache, bits=8),
}
MODES = {"greedy": {}, "beams": {"num_beams": 2}, "chunks": {"prefill_chunk_size": 64}}
# Each cache generates in one or two ways.
PAIRS = [
    *((name, mode) for name in ("dynamic", "shared-quantized-8") for mode in ("greedy", "beams")),
    *((name, "chunks") for name in ("offloaded", "quantized-8", "shared")),
    ("stock", "greedy"),
    ("cpu_decode", "beams"),
]


def generate(model: PreTrainedModel, cache: Cache, mode: str) -> list[list[int]]:
    ids = random_prompt(2, 200)
    mask = torch.ones_like(ids)
    ids[0, :30], mask[0, :30] = COMMON["pad_token_id"], 0
    return answer(model, ids, cache, attention_mask=mask, **MODES[mode]).tolist()


def generate_with_all(folder: Path, sharing_heads: int, sharing_tokens: int) -> dict[tuple[str, str], Any]:
    """Generate with every cache in one of the processes; return tokens, and the heads that it stores."""
    mesh = init_device_mesh("cpu", (sharing_tokens, sharing_heads), mesh_dim_names=("tokens", "heads"))
    plan: dict[str, Any] = {"tp_plan": "auto", "tp_size": sharing_heads}
    if sharing_tokens > 1:
        plan["dp_replicate_size"] = sharing_tokens
    config = {"distributed_config": DistributedConfig(**plan)} if sharing_heads > 1 else {}
    model = AutoModelForCausalLM.from_pretrained(folder, **config).eval()
    caches: dict[str, Any] = dict(CACHES) if sharing_tokens == 1 else {}
    caches |= {name: functools.partial(make, group=mesh["tokens"].get_group()) for name, make in SHARED.items()}
    results = {}
    for name, mode in PAIRS:
        if name in caches:
            cache = caches[name](model.config)
            results[name, mode] = generate(model, cache, mode), cache.layers[0].keys.shape[1]
    return results


@pytest.mark.parametrize(("sharing_heads", "sharing_tokens"), LAYOUTS)
def test_tokens_are_those_of_one_process_and_each_stores_its_heads(
    sharing_heads: int, sharing_tokens: int, group_of: Callable[[int], Group], tmp_path: Path
):
    if (
        min(sharing_heads, sharing_tokens) > 1
        and "dp_replicate_size" not in inspect.signature(DistributedConfig).parameters
    ):
        pytest.skip("this transformers has no groups of processes that share heads")
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    group = group_of(sharing_heads * sharing_tokens)
    results = group.call(generate_with_all, tmp_path, sharing_heads, sharing_tokens)
    for name, mode in results[0]:
        alone = generate(model, (CACHES | SHARED)[name](model.config), mode)
        # With a random model, codes of 8 bits change some tokens.
        assert "quantized" in name or generate(model, DynamicCache(config=model.config), mode) == alone
        heads = COMMON["num_key_value_heads"] // sharing_heads
        assert [each[name, mode] for each in results] == [(alone, heads)] * len(results)
    assert [*results[0]] == [pair for pair in PAIRS if sharing_tokens == 1 or pair[0] in SHARED]
