"""
A process that decodes when it is told to, and sleeps until then: both sides of the pipe.

OpenMP reads its settings when it is loaded, so each environment needs a process of its own. Told a number of steps, it
decodes one more than that with each of `DECODERS` and answers with the seconds of all but the first, as a line of JSON.
"""

import copy
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from experiments.common.decoding import GreedyDecoder
from experiments.common.records import RESULTS
from experiments.common.synthetic import CACHES, fill, llama_1b_config
from experiments.common.timing import seconds_of
from hf_hybrid_cache import QuantizedHybridCache, fuse_decode, get_num_threads, quantize_weights
from hf_hybrid_cache.models import load
from hf_hybrid_cache.models.random_weights import random_llama

DTYPE = torch.bfloat16
# A small vocabulary: with all of Llama 3.2-1B's, the output layer would take more time than a few layers.
VOCABULARY = 4096
LLAMA_LAYERS = "llama-layers"
IN_4_BITS, IN_ONE_CALL = "4 bits", "4 bits, in one call"
# The decoders: each cache with the model's own weights, and ours with weights, keys and values quantized.
DECODERS = (*CACHES, IN_4_BITS, IN_ONE_CALL)
# Variables that each process gets anew, whatever the experiment was started with.
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "HF_HYBRID_CACHE_NUM_THREADS")


class ToldDecoder:
    """
    A process that decodes on request; it is ready when this returns.

    Args:
        settings: of the environment, in the place of all of `VARIABLES`.
        model: `LLAMA_LAYERS`, or the name of a model.
        layers: of Llama 3.2-1B's shape.
        context: tokens in each cache, random keys and values.

    Attributes:
        threads: how many torch and the kernels use there, by "torch" and "kernels".
    """

    def __init__(self, settings: Mapping[str, str], model: str, layers: int, context: int):
        environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, model, str(layers), str(context)],
            cwd=RESULTS.parent,
            env=environment | dict(settings),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.threads: dict[str, int] = self._answer()

    def seconds(self, steps: int) -> dict[str, list[float]]:
        """Return the seconds of so many decode steps of each of `DECODERS`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"A process that decodes ended with exit status {self._process.wait()}; see above.")
        return json.loads(line)


def main() -> None:
    name, layers, context = sys.argv[1], *map(int, sys.argv[2:])
    warnings.filterwarnings("ignore", "Decode steps take")  # slow steps are what is measured
    if name == LLAMA_LAYERS:
        config: Any = llama_1b_config(layers)
        config.vocab_size = VOCABULARY
        model: Any = random_llama(config, DTYPE)
    else:
        model, _ = load(name, DTYPE, torch.device("cpu"))
        config = model.config
    quantized = copy.deepcopy(model)
    quantize_weights(quantized, 4)
    in_one_call = copy.deepcopy(quantized)
    fused = fuse_decode(in_one_call)
    pairs = {name: (model, make(config)) for name, make in CACHES.items()}
    pairs |= {IN_4_BITS: (quantized, QuantizedHybridCache(config, bits=4))}
    pairs |= {IN_ONE_CALL: (in_one_call, QuantizedHybridCache(config, bits=4))}
    decoders = {}
    for name, (decoding, cache) in pairs.items():
        fill(cache, config, context, DTYPE)
        decoders[name] = GreedyDecoder(decoding, cache)
        decoders[name].step()  # compiles
    if fused.fused_steps != 1:
        raise RuntimeError(f"No step ran in one call: {fused}")
    print(json.dumps({"torch": torch.get_num_threads(), "kernels": get_num_threads()}), flush=True)
    for line in sys.stdin:
        samples = {}
        for name, decoder in decoders.items():
            decoder.step()
            samples[name] = [seconds_of(decoder.step) for _ in range(int(line))]
        print(json.dumps(samples), flush=True)


if __name__ == "__main__":
    main()
