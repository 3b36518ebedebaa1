"""How long a real prefill would take, by a short one; `python -m experiments.sweep.prefill_time MODEL` measures it."""

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache

from experiments import records
from experiments.decoding import prefill, weight_bytes
from hf_hybrid_cache.models import load

PROBE_TOKENS = 512


@dataclass(frozen=True)
class PrefillTime:
    """
    An estimate, by operations.

    Attributes:
        probe_seconds: of a prefill of `PROBE_TOKENS`.
        weights: that every token is multiplied with.
        attended: operations of attention for the square of the tokens, causal, all layers.
    """

    probe_seconds: float
    weights: int
    attended: int

    def seconds(self, num_tokens: int) -> float:
        return self.probe_seconds * self._operations(num_tokens) / self._operations(PROBE_TOKENS)

    def _operations(self, num_tokens: int) -> int:
        return 2 * self.weights * num_tokens + self.attended * num_tokens**2


def probed(model: str, folder: Path, again: bool) -> PrefillTime:
    """Measured in a process of its own, once in a folder of records: the same cells are real in every run."""
    path = folder / "prefill" / f"{model.replace('/', '-')}.json"
    if not path.exists() or again:
        command = [sys.executable, "-m", "experiments.sweep.prefill_time", model]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=records.RESULTS.parent)
        with records.written_whole(path) as file:
            file.write(printed.stdout)
    return PrefillTime(**json.loads(path.read_text()))


def measure(name: str) -> PrefillTime:
    model, _ = load(name)
    config = model.config
    assert isinstance(config, LlamaConfig)
    assert config.head_dim is not None
    ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device=model.device)
    seconds = 0.0
    for _ in range(2):  # the first warms up
        start = time.perf_counter()
        prefill(model, DynamicCache(config=config), ids).tolist()
        seconds = time.perf_counter() - start
    attended = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return PrefillTime(seconds, weight_bytes(model) // model.dtype.itemsize, attended)


if __name__ == "__main__":
    print(json.dumps(asdict(measure(sys.argv[1]))))
