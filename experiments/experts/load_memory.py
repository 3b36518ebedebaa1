"""
Peak host memory of loading a mixture-of-experts model in 4 bits, over what the loaded model takes.

Random weights in the shape of Qwen3-30B-A3B, cut to a few layers, in files as the Hub has them: bfloat16, experts one
by one. Each way to load has a process of its own. Anonymous memory is what a process needs;
resident memory has pages of the mapped files besides, which the system may take away at any time.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from experiments.common.harness import Cell, publish
from experiments.common.options import plain_parser
from experiments.common.told_process import ToldProcess, tell
from experiments.experts.random_experts import cut_config, random_model
from hf_hybrid_cache import QuantizedWeightsConfig, quantize_weights

BITS = 4
WAYS: dict[str, QuantizedWeightsConfig | None] = {
    "as it is": None,
    "as it is, then quantize_weights": None,
    "QuantizedWeightsConfig": QuantizedWeightsConfig(BITS),
    "QuantizedWeightsConfig, only experts": QuantizedWeightsConfig(BITS, only_experts=True),
}
_SAMPLE_SECONDS = 0.002


def write_checkpoint(layers: int, experts: int, vocabulary: int, folder: Path) -> PreTrainedConfig:
    """Write files that `from_pretrained` reads; return the shape."""
    config: Any = cut_config("Qwen/Qwen3-30B-A3B", layers)
    config.vocab_size, config.num_experts = vocabulary, experts
    config.num_experts_per_tok = min(8, experts)
    random_model(config, torch.bfloat16).save_pretrained(folder, max_shard_size="1300MB")
    return config


def load(way: str, folder: Path) -> dict[str, Any]:
    """Load in this process; what the model takes, and seconds."""
    begin = time.perf_counter()
    config = WAYS[way]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)
    report = quantize_weights(model, BITS) if way.endswith("quantize_weights") else None
    if config is not None:
        report = model.hf_quantizer.report
    if report is None:
        num_bytes = sum(weight.nbytes for weight in model.parameters())
    else:
        num_bytes = report.quantized_bytes + report.other_bytes
    return {"model_bytes": num_bytes, "seconds": time.perf_counter() - begin, "after": memory_of("self")}


def answers(way: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the process and its memory before, and, told to, what it has loaded."""
    torch.ones(1).sum()  # libraries that are loaded with the first operation
    yield {"process": os.getpid(), "before": memory_of("self")}
    for _ in sys.stdin:
        yield load(way, folder)


def memory_of(process: int | str) -> dict[str, int]:
    """Bytes of anonymous and of resident memory."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "VmRSS"))}
    return {"anonymous": found["RssAnon"], "resident": found["VmRSS"]}


def measure(way: str, folder: Path) -> Cell:
    """Load in one way in a process of its own, and watch its memory from here."""
    command = [sys.executable, "-m", "experiments.experts.load_memory", "--only", way, "--folder", str(folder)]
    with closing(ToldProcess(command)) as process:
        before = process.first["before"]
        peak, ended = dict(before), threading.Event()
        watcher = threading.Thread(target=_watch, args=(process.first["process"], peak, ended))
        watcher.start()
        cell = process.ask("load")
        ended.set()
        watcher.join()
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


def main() -> None:
    parser = plain_parser("load_memory", __doc__)
    parser.add_argument("--layers", type=int, default=4, help="each takes 1.25 GB of disk; the embeddings 1.24 GB")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--folder", type=Path, help="where files are written for a while (default: a temporary one)")
    parser.add_argument("--only", choices=WAYS, help="load from --folder in this process and print JSON")
    arguments = parser.parse_args()
    if arguments.only:
        tell(answers(arguments.only, arguments.folder))
        return
    with TemporaryDirectory(prefix="load_memory-", dir=arguments.folder) as folder:
        config = write_checkpoint(arguments.layers, arguments.experts, arguments.vocabulary, Path(folder))
        cells = ((way, measure(way, Path(folder))) for way in WAYS)
        told = {"model": config.to_diff_dict(), "bits": BITS}
        publish("load_memory", cells, arguments.out, lambda cell: cell["anonymous_ratio"], **told)


if __name__ == "__main__":
    main()
