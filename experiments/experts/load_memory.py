"""
Peak host memory of loading a mixture-of-experts model in 4 bits, over what the loaded model takes.

Random weights in the shape of Qwen3-30B-A3B, cut to a few layers, in files as the Hub has them: bfloat16, experts one
by one, a file for each layer. Each way to load has a process of its own. Anonymous memory is what a process needs;
resident memory has pages of the mapped files besides, which the system may take away at any time.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from experiments.common import records
from hf_hybrid_cache import QuantizedWeightsConfig, quantize_weights

WAYS = ("as it is", "as it is, then quantize_weights", "CodedWeightsConfig", "CodedWeightsConfig, only experts")
BITS = 4
_SAMPLE_SECONDS = 0.002


def shape(layers: int, experts: int, vocabulary: int) -> Qwen3MoeConfig:
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": experts,
        "num_experts_per_tok": min(8, experts),
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "dtype": torch.bfloat16,
    }
    return Qwen3MoeConfig(**sizes)


def write_checkpoint(config: Qwen3MoeConfig, folder: Path) -> None:
    """Files that `from_pretrained` reads, one for each layer, without the model ever being in memory."""
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    files = {"other": _other_shapes(config)}
    files |= {
        f"layer-{layer}": _layer_shapes(config, f"model.layers.{layer}") for layer in range(config.num_hidden_layers)
    }
    where: dict[str, str] = {}
    for name, shapes in files.items():
        tensors = {key: torch.randn(sizes, dtype=torch.bfloat16) * 0.02 for key, sizes in shapes.items()}
        save_file(tensors, folder / f"{name}.safetensors", metadata={"format": "pt"})
        where |= dict.fromkeys(shapes, f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def _other_shapes(config: Qwen3MoeConfig) -> dict[str, tuple[int, ...]]:
    hidden, vocabulary = config.hidden_size, config.vocab_size
    return {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "lm_head.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }


def _layer_shapes(config: Qwen3MoeConfig, prefix: str) -> dict[str, tuple[int, ...]]:
    hidden, inner, head_dim = config.hidden_size, config.moe_intermediate_size, config.head_dim
    queries, states = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (states, hidden),
        "self_attn.v_proj": (states, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate": (config.num_experts, hidden),
    }
    for expert in range(config.num_experts):
        shapes |= {f"mlp.experts.{expert}.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes[f"mlp.experts.{expert}.down_proj"] = (hidden, inner)
    return {f"{prefix}.{name}.weight": sizes for name, sizes in shapes.items()}


def load(way: str, folder: Path) -> dict[str, Any]:
    """Load in this process; what the model takes, and seconds. Lines of JSON say when it begins and ends."""
    torch.ones(1).sum()  # libraries that are loaded with the first operation
    print(json.dumps({"before": memory_of("self")}), flush=True)
    begin = time.perf_counter()
    config = (
        QuantizedWeightsConfig(BITS, only_experts=way.endswith("only experts")) if way.startswith("Quantized") else None
    )
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)
    report = quantize_weights(model, BITS) if way.endswith("quantize_weights") else None
    if config is not None:
        report = model.hf_quantizer.report
    if report is None:
        num_bytes = sum(weight.nbytes for weight in model.parameters())
    else:
        num_bytes = report.quantized_bytes + report.other_bytes
    return {"model_bytes": num_bytes, "seconds": time.perf_counter() - begin, "after": memory_of("self")}


def memory_of(process: int | str) -> dict[str, int]:
    """Bytes of anonymous and of resident memory."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "VmRSS"))}
    return {"anonymous": found["RssAnon"], "resident": found["VmRSS"]}


def measure(way: str, folder: Path) -> dict[str, Any]:
    """Load in one way in a process of its own, and watch its memory from here."""
    command = [sys.executable, "-m", "experiments.experts.load_memory", "--only", way, "--folder", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        before = json.loads(process.stdout.readline())["before"]
        peak, ended = dict(before), threading.Event()
        watcher = threading.Thread(target=_watch, args=(process.pid, peak, ended))
        watcher.start()
        line = process.stdout.readline()
        ended.set()
        watcher.join()
    cell = json.loads(line)
    ratios = {f"{kind}_ratio": (peak[kind] - before[kind]) / cell["model_bytes"] for kind in peak}
    return {"way": way, **cell, "before": before, "peak": peak, **ratios}


def _watch(process: int, peak: dict[str, int], ended: threading.Event) -> None:
    while not ended.wait(_SAMPLE_SECONDS):
        try:
            now = memory_of(process)
        except (OSError, KeyError):  # it has ended
            return
        for kind, num_bytes in now.items():
            peak[kind] = max(peak[kind], num_bytes)


def cells(folder: Path) -> Iterator[dict[str, Any]]:
    print(f"{'way':<34} {'model':>9} {'anonymous':>16} {'resident':>16}")
    for way in WAYS:
        cell = measure(way, folder)
        sizes = [
            f"{(cell['peak'][kind] - cell['before'][kind]) / 2**30:>6.2f} GiB {cell[f'{kind}_ratio']:>.3f}x"
            for kind in ("anonymous", "resident")
        ]
        print(f"{way:<34} {cell['model_bytes'] / 2**30:>5.2f} GiB {sizes[0]} {sizes[1]}")
        yield cell


def main() -> None:
    parser = argparse.ArgumentParser(
        description=textwrap.dedent(__doc__ or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4, help="each takes 1.25 GB of disk; the embeddings 1.24 GB")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--folder", type=Path, help="where files are written for a while (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="folder of the record (default: results/load_memory)")
    parser.add_argument("--only", choices=WAYS, help="load from --folder in this process and print JSON")
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(load(arguments.only, arguments.folder)), flush=True)
        return
    folder = Path(tempfile.mkdtemp(prefix="load_memory-", dir=arguments.folder))
    try:
        config = shape(arguments.layers, arguments.experts, arguments.vocabulary)
        write_checkpoint(config, folder)
        found = list(cells(folder))
    finally:
        shutil.rmtree(folder)
    record = {"model": config.to_diff_dict(), "bits": BITS, "cells": found}
    print(f"record: {records.save('load_memory', record, arguments.out)}")
    print(json.dumps({cell["way"]: round(cell["anonymous_ratio"], 4) for cell in found}))


if __name__ == "__main__":
    main()
