"""
The time that a saved cache saves: a document that is computed once and asked about twice.

SmolLM2-135M reads English text: the time to the first token after document and question, against that of loading the
document, read or mapped, and computing only the question. With the shape of Llama-3.2-1B and random keys and values:
the seconds to write and to load a long context, and to the first token after it. A file that was just written is in the
system's cache of files, and that is where it is read from.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from experiments.common import records
from experiments.common.decoding import prefill
from experiments.common.harness import Cell, publish
from experiments.common.options import plain_parser
from experiments.common.synthetic import fill
from experiments.common.texts import english_ids
from experiments.common.timing import seconds_of
from hf_hybrid_cache import DynamicHybridCache, HybridCache, QuantizedHybridCache
from hf_hybrid_cache.models import load

CACHES: dict[str, Callable[[PreTrainedConfig], HybridCache]] = {
    "dynamic": DynamicHybridCache,
    "8 bits": partial(QuantizedHybridCache, bits=8),
    "4 bits": partial(QuantizedHybridCache, bits=4),
    "2 bits": partial(QuantizedHybridCache, bits=2),
}
MODELS = {"smollm2-135m": 4096, "llama-3.2-1b-random": 131_072}
QUESTION_TOKENS = 32


def first_token(model: PreTrainedModel, make_cache: Callable[[], HybridCache], ids: torch.Tensor) -> dict[str, Any]:
    """Seconds until there is a cache, and until the first token after `ids`, of which it may hold the first."""
    start = time.perf_counter()
    cache = make_cache()
    loaded = time.perf_counter()
    token = int(prefill(model, cache, ids[:, cache.get_seq_length() :]).argmax())
    end = time.perf_counter()
    return {"cache_seconds": loaded - start, "first_token_seconds": end - start, "token": token}


def measure(
    model: PreTrainedModel, name: str, document: torch.Tensor, question: torch.Tensor, is_real: bool, path: Path
) -> Cell:
    """One cache: the prefill, or random states instead, the file, and the first token after it was loaded."""
    ids = torch.cat([document, question], dim=1)
    config, num_tokens = model.config, document.shape[1]
    ways: dict[str, Callable[[], HybridCache]] = {
        "read": lambda: HybridCache.load(path, config),
        "mapped": lambda: HybridCache.load(path, config, mmap=True),
        "mapped, not verified": lambda: HybridCache.load(path, config, mmap=True, verify=False),
    }
    # The first call compiles and sets up, which is not timed.
    first_token(model, lambda: CACHES[name](config), ids[:, : 256 + question.shape[1]])
    results: dict[str, Any] = {}
    if is_real:
        results["computed"] = first_token(model, lambda: CACHES[name](config), ids)
    cache = CACHES[name](config)
    if is_real:
        prefill(model, cache, document)
    else:
        fill(cache, config, num_tokens, model.dtype, chunk=8192)
    save_seconds = seconds_of(partial(cache.save, path, document))
    held = cache.memory().host_bytes
    del cache  # before it is there a second time
    for way, make_cache in ways.items():
        results[way] = first_token(model, make_cache, ids)
    return {
        "cache": name,
        "document_tokens": num_tokens,
        "question_tokens": question.shape[1],
        "held_bytes": held,
        "file_bytes": path.stat().st_size,
        "save_seconds": save_seconds,
        "ways": results,
        "same_token": len({result["token"] for result in results.values()}) == 1,
    }


def main() -> None:
    parser = plain_parser("reload", __doc__)
    parser.add_argument("--model", choices=MODELS, default="smollm2-135m")
    parser.add_argument("--tokens", type=int, help="of the document (default: 4,096, or 131,072 without a tokenizer)")
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=list(CACHES))
    arguments = parser.parse_args()
    num_tokens = arguments.tokens or MODELS[arguments.model]
    model, tokenizer = load(arguments.model, None, "cpu")
    total = num_tokens + QUESTION_TOKENS
    if tokenizer is None:
        ids = torch.randint(5, 40_000, (1, total), generator=torch.Generator().manual_seed(0))
    else:
        ids = english_ids(tokenizer, total)
    document, question = ids.split([num_tokens, QUESTION_TOKENS], dim=1)

    def cells() -> Iterator[tuple[str, Cell]]:
        for name in arguments.caches:
            with TemporaryDirectory() as folder:
                yield name, measure(model, name, document, question, tokenizer is not None, Path(folder, "document.kv"))

    publish(
        "reload",
        cells(),
        arguments.out or records.RESULTS / "reload" / arguments.model,
        lambda cell: {way: result["first_token_seconds"] for way, result in cell["ways"].items()},
        model=arguments.model,
        dtype=str(model.dtype),
        prefill="synthetic" if tokenizer is None else "real",
    )


if __name__ == "__main__":
    main()
