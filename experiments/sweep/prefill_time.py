"""An estimate of the time of a long prefill, from a short one: `python -m experiments.sweep.prefill_time MODEL OUT`."""

import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers.cache_utils import DynamicCache

from experiments.common import records
from experiments.common.decoding import prefill, weight_bytes
from experiments.common.synthetic import kv_heads
from experiments.sweep.process import run_limited
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


class ProbeError(RuntimeError):
    """The short prefill could not be measured; the message says why."""


def probed(model: str, folder: Path, again: bool, limit_seconds: float) -> PrefillTime:
    """
    Measure in a process of its own, once for a folder of records: every run then has the same cells.

    Raises:
        ProbeError: the model cannot be had, or takes longer than `limit_seconds`.
    """
    path = folder / "prefill" / f"{model.replace('/', '-')}.json"
    if again or not path.exists():
        command = [sys.executable, "-m", "experiments.sweep.prefill_time", model]
        with tempfile.TemporaryDirectory() as temporary:
            out = Path(temporary) / "estimate.json"
            if failure := run_limited([*command, str(out)], limit_seconds):
                raise ProbeError(f"{model}: {failure['message']}")
            with records.written_whole(path) as file:
                file.write(out.read_text())
    return PrefillTime(**json.loads(path.read_text()))


def measure(name: str) -> PrefillTime:
    model, _ = load(name)
    config = model.config.get_text_config(decoder=True)
    ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device=model.device)
    seconds = 0.0
    for _ in range(2):  # the first warms up
        start = time.perf_counter()
        prefill(model, DynamicCache(config=model.config), ids).tolist()
        seconds = time.perf_counter() - start
    attended = 2 * config.num_hidden_layers * config.num_attention_heads * kv_heads(config)[1]
    return PrefillTime(seconds, weight_bytes(model) // model.dtype.itemsize, attended)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(asdict(measure(sys.argv[1]))) + "\n")
