"""
Seconds a token of a whole model on the CPU: transformers' DynamicCache against DynamicHybridCache, taking turns; with
`--bits` against QuantizedHybridCache.

A timed token follows an untimed one of the same cache, as in decoding. The ceiling is the time to read the weights and
the keys and values once, at the read bandwidth of the same run. With `--prefill synthetic` both caches get random keys
and values; with `--prefill real` both read the same English text, and their greedy tokens must be the same, unless one
is quantized.
"""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel

from experiments.common import records
from experiments.common.bandwidth import MemoryReader, read_bandwidth
from experiments.common.decoding import GreedyDecoder, prefill, weight_bytes
from experiments.common.harness import Cell, cold_turns, publish
from experiments.common.options import experiment_parser
from experiments.common.synthetic import CACHES, filled_cache, kv_bytes
from experiments.common.texts import english_ids
from hf_hybrid_cache import QuantizedHybridCache
from hf_hybrid_cache.models import load

CONTEXTS = {"synthetic": [128, 8192, 32_768, 131_072], "real": [8000]}
REAL_STEPS = 64


def require_memory(model: PreTrainedModel, context: int) -> None:
    """Exit where two caches, and the copies that one of them makes, would not fit."""
    size = kv_bytes(model.config, context, model.dtype)
    needed = 2 * size + 2 * size // model.config.num_hidden_layers
    available = psutil.virtual_memory().available
    if needed > available:
        sys.exit(
            f"Two caches of {context:,} tokens need {needed / 2**30:.1f} GiB and {available / 2**30:.1f} are free: "
            "pass shorter --contexts."
        )


def filled_decoders(
    model: PreTrainedModel, context: int, steps: int, prompt: torch.Tensor | None, bits: int | None
) -> dict[str, GreedyDecoder]:
    """Make decoders after `prompt`; without one, fill them so that the last step brings the context to `context`."""
    decoders = {}
    makers = CACHES | ({"ours": partial(QuantizedHybridCache, bits=bits)} if bits else {})
    for name, make in makers.items():
        if prompt is None:
            cache, token = filled_cache(make, model, max(1, context - 2 * (steps + 1))), 1
        else:
            cache = make(model.config)
            token = int(prefill(model, cache, prompt).argmax())
        decoders[name] = GreedyDecoder(model, cache, token)
    return decoders


def measure(model: PreTrainedModel, decoders: dict[str, Any], steps: int, reader: MemoryReader) -> Cell:
    """Let both decode in turns; raw samples in seconds."""
    reader.forget()
    cell = cold_turns({name: decoder.step for name, decoder in decoders.items()}, steps, reader)
    stock, ours = (cell["median_seconds"][name] for name in ("stock", "ours"))
    bandwidth, size = reader.report(), decoders["ours"].cache.memory().host_bytes
    ceiling = (weight_bytes(model) + size) / bandwidth["bytes_per_second"]
    return {
        "steps": steps,
        "kv_bytes": size,
        "ratio": stock / ours,
        "ceiling_seconds": ceiling,
        "share_of_ceiling": ceiling / ours,
        "read_bandwidth": bandwidth,
        **cell,
    }


def main() -> None:
    parser = experiment_parser("decode_speed", __doc__)
    parser.add_argument("--model", default="llama-3.2-1b-random")
    parser.add_argument("--bits", type=int, choices=[8, 4, 2], help="quantize ours (default: not)")
    parser.add_argument("--prefill", choices=CONTEXTS, default="synthetic")
    parser.add_argument("--contexts", type=int, nargs="+", help="tokens (default: by --prefill)")
    parser.add_argument("--steps", type=int, help="tokens timed with each cache (default: fewer at long contexts)")
    arguments = parser.parse_args()
    contexts = arguments.contexts or CONTEXTS[arguments.prefill]
    model, tokenizer = load(arguments.model, None, "cpu")
    if max(contexts) > model.config.max_position_embeddings:
        parser.error(f"{arguments.model} has {model.config.max_position_embeddings:,} positions.")
    reader = MemoryReader(arguments.buffer_mib)
    rate, weights = read_bandwidth(reader), weight_bytes(model)

    def cells() -> Iterator[tuple[str, Cell]]:
        for context in contexts:
            require_memory(model, context)
            ceiling = (weights + kv_bytes(model.config, context, model.dtype)) / rate
            print(f"{context:,} tokens in full precision take at least {1e3 * ceiling:.1f} ms", flush=True)
            prompt, steps = None, arguments.steps or min(40, max(5, 2**19 // context))
            if arguments.prefill == "real":
                assert tokenizer is not None
                prompt, steps = english_ids(tokenizer, context), arguments.steps or REAL_STEPS
            decoders = filled_decoders(model, context, steps, prompt, arguments.bits)
            cell = {"context_tokens": context, **measure(model, decoders, steps, reader)}
            if prompt is not None and not arguments.bits:
                tokens = {name: decoder.tokens for name, decoder in decoders.items()}
                cell |= {"same_tokens": tokens["stock"] == tokens["ours"], "tokens": tokens}
            del decoders  # before the next ones are filled
            yield str(context), cell

    name = arguments.model.replace("/", "--") + (f"-{arguments.bits}-bits" if arguments.bits else "")
    told = {"model": arguments.model, "dtype": str(model.dtype), "prefill": arguments.prefill, "bits": arguments.bits}
    folder = arguments.out or records.RESULTS / "decode_speed" / name
    found = publish("decode_speed", cells(), folder, **told, weight_bytes=weights)
    if not all(cell.get("same_tokens", True) for cell in found):
        sys.exit("The greedy tokens of the two caches differ; the record has both.")


if __name__ == "__main__":
    main()
