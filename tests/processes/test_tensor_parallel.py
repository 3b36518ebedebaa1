"""Tensor parallelism: processes share each layer, each with a cache of its heads; others share the tokens of these."""

import functools
import inspect
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.distributed import DistributedConfig

from hf_hybrid_cache import DynamicHybridCache, OffloadedHybridCache, QuantizedHybridCache
from hf_hybrid_cache.cache_argument import cache_argument

from common.slow import slow_but
from models.tiny_models import COMMON, random_prompt, tiny_model
from processes.groups import free_port

# The processes run once.
pytestmark = pytest.mark.xdist_group("tensor_parallel")

# Processes that share heads, and that share tokens.
LAYOUTS = slow_but([(2, 1)], [(2, 1), (1, 2), (2, 2)])
SECONDS_TO_END = 120
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


def generate(model: PreTrainedModel, cache: Cache, mode: str) -> list[list[int]]:
    ids = random_prompt(2, 200)
    mask = torch.ones_like(ids)
    ids[0, :30], mask[0, :30] = COMMON["pad_token_id"], 0
    options = {"max_new_tokens": 12, "do_sample": False, **MODES[mode]}
    return model.generate(ids, attention_mask=mask, **cache_argument(cache), **options).tolist()


def run_everything(folder: Path, sharing_heads: int, sharing_tokens: int) -> None:
    """Generate with every cache in each of the processes, and write the results."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (sharing_tokens, sharing_heads), mesh_dim_names=("tokens", "heads"))
    plan: dict[str, Any] = {"tp_plan": "auto", "tp_size": sharing_heads}
    if sharing_tokens > 1:
        plan["dp_replicate_size"] = sharing_tokens
    config = {"distributed_config": DistributedConfig(**plan)} if sharing_heads > 1 else {}
    model = AutoModelForCausalLM.from_pretrained(folder, **config).eval()
    group = mesh["tokens"].get_group()
    caches = CACHES if sharing_tokens == 1 else {}
    caches |= {name: functools.partial(make, group=group) for name, make in SHARED.items()}
    tokens, heads = {}, {}
    for name, make in caches.items():
        for mode in MODES:
            cache = make(model.config)
            tokens[f"{name}, {mode}"] = generate(model, cache, mode)
            heads[name] = cache.layers[0].keys.shape[1]
    result = {"tokens": tokens, "heads": heads}
    (folder / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


@pytest.fixture(params=LAYOUTS, ids=lambda layout: f"{layout[0]}x{layout[1]}")
def results(request: pytest.FixtureRequest) -> tuple[int, list[dict]]:
    """The number of processes that share heads, and the results of each process."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo, which this torch was built without")
    sharing_heads, sharing_tokens = request.param
    if min(request.param) > 1 and "dp_replicate_size" not in inspect.signature(DistributedConfig).parameters:
        pytest.skip("this transformers has no groups of processes that share heads")
    return sharing_heads, results_of_processes(sharing_heads, sharing_tokens)


@functools.cache
def results_of_processes(sharing_heads: int, sharing_tokens: int) -> list[dict]:
    """Start the processes, and return the results of each."""
    processes = sharing_heads * sharing_tokens
    options = [f"--nproc-per-node={processes}", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    with tempfile.TemporaryDirectory() as folder:
        tiny_model("llama").save_pretrained(folder)
        arguments = [__file__, folder, str(sharing_heads), str(sharing_tokens)]
        ended = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *options, *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=SECONDS_TO_END,
        )
        assert ended.returncode == 0, ended.stderr
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(processes)]


def test_tokens_are_those_of_one_process(results: tuple[int, list[dict]]):
    model = tiny_model("llama")
    for name, make in (CACHES | SHARED).items():
        for mode in MODES:
            alone = generate(model, make(model.config), mode)
            # With a random model, codes of 8 bits change some tokens.
            assert "quantized" in name or generate(model, DynamicCache(config=model.config), mode) == alone
            for result in results[1]:
                assert result["tokens"].get(f"{name}, {mode}", alone) == alone


def test_each_process_stores_its_own_heads(results: tuple[int, list[dict]]):
    sharing_heads, of_processes = results
    for result in of_processes:
        assert result["heads"].keys() >= SHARED.keys()
        assert set(result["heads"].values()) == {COMMON["num_key_value_heads"] // sharing_heads}


if __name__ == "__main__":
    run_everything(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
