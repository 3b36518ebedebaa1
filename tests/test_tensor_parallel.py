"""Tensor parallelism: two processes share each layer, and each has a cache of the heads that it computes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from hf_hybrid_cache import DynamicHybridCache, OffloadedHybridCache, QuantizedHybridCache

from tiny_models import COMMON, random_prompt, tiny_model

# The processes run once.
pytestmark = pytest.mark.xdist_group("tensor_parallel")

PROCESSES = 2
SECONDS_TO_END = 120
CACHES = {
    "stock": lambda config: DynamicCache(config=config),
    "dynamic": lambda config: DynamicHybridCache(config, cpu_decode=False),
    "offloaded": lambda config: OffloadedHybridCache(config, cpu_decode=False),
    "cpu_decode": lambda config: DynamicHybridCache(config, cpu_decode=True),
    "quantized-8": lambda config: QuantizedHybridCache(config, bits=8),
}
MODES = {"greedy": {}, "beams": {"num_beams": 2}, "chunks": {"prefill_chunk_size": 64}}


def generate(model: PreTrainedModel, cache: Cache, mode: str) -> list[list[int]]:
    ids = random_prompt(2, 200)
    mask = torch.ones_like(ids)
    ids[0, :30], mask[0, :30] = COMMON["pad_token_id"], 0
    options = {"max_new_tokens": 12, "do_sample": False, **MODES[mode]}
    return model.generate(ids, attention_mask=mask, past_key_values=cache, **options).tolist()


def run_everything(folder: Path) -> None:
    """In each of the processes: generate with every cache, and write what came out."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    tokens, heads = {}, {}
    for name, make in CACHES.items():
        for mode in MODES:
            cache = make(model.config)
            tokens[f"{name}, {mode}"] = generate(model, cache, mode)
            heads[name] = cache.layers[0].keys.shape[1]
    result = {"tokens": tokens, "heads": heads}
    (folder / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Of each process."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo, which this torch was built without")
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [f"--nproc-per-node={PROCESSES}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, __file__, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS_TO_END,
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(PROCESSES)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CACHES)
def test_tokens_are_those_of_the_stock_cache_and_of_one_process(results: list[dict], name: str, mode: str):
    model = tiny_model("llama")
    alone = generate(model, CACHES[name](model.config), mode)
    for result in results:
        assert result["tokens"][f"{name}, {mode}"] == alone
        # Of a random model, the codes of 8 bits change some tokens.
        assert "quantized" in name or result["tokens"][f"stock, {mode}"] == alone


def test_each_process_stores_its_own_heads(results: list[dict]):
    for result in results:
        assert set(result["heads"].values()) == {COMMON["num_key_value_heads"] // PROCESSES}


if __name__ == "__main__":
    run_everything(Path(sys.argv[1]))
