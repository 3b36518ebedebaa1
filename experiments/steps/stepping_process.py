"""
A program that decodes with the `hf_hybrid_cache` of any checkout: `checkouts` gives it the path and the work as JSON.

Its lines are those of `experiments.common.told_process`, which another checkout need not have: it is told numbers of
steps, and answers with their seconds and all tokens. It uses nothing of the package that versions do not share.
"""

import json
import os
import sys
import time

import torch

from hf_hybrid_cache import DynamicHybridCache, QuantizedHybridCache, quantize_weights
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.models import load


def main() -> None:
    work = json.loads(sys.argv[1])
    torch.set_num_threads(work["threads"])
    model, _ = load(work["model"], torch.bfloat16, "cpu")
    model.set_attn_implementation("sdpa")
    if work["weight_bits"] < 16:
        quantize_weights(model, work["weight_bits"], head_bits=work["weight_bits"])
    bits = work["kv_bits"]
    cache = DynamicHybridCache(model.config) if bits == 16 else QuantizedHybridCache(model.config, bits=bits)
    ids = torch.randint(model.config.vocab_size, (1, work["context"]), generator=torch.Generator().manual_seed(0))

    @torch.inference_mode()
    def read(ids: torch.Tensor) -> torch.Tensor:
        return model(ids, logits_to_keep=1, **cache_argument(cache)).logits[:, -1:].argmax(dim=-1)

    token = read(ids)
    tokens = [int(token)]
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed is no answer
    print('{"answer": "ready"}', file=output)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            start = time.perf_counter()
            token = read(token)
            seconds.append(time.perf_counter() - start)
            tokens.append(int(token))
        print(json.dumps({"answer": [seconds, tokens]}), file=output)


if __name__ == "__main__":
    main()
