"""
The time that a prefix store saves, and what it costs.

- SmolLM2-135M reads English text and a question, cold, and then other questions about it from the store.
- With the shape of Llama-3.2-1B, 4 bits and random states: a conversation is kept, 200 tokens more are kept, and it is
  resumed, seven times: the median. What was just written is in the system's cache of files; `--drop-caches` asks the
  system to forget it before it is read once more, which needs root.
- One prompt of 131,072 tokens is found among 10,000 nodes.
- The digest of all weights is computed.
- Two documents with a common first half are kept.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from experiments.common import records
from experiments.common.decoding import prefill as first_logits
from experiments.common.options import experiment_parser
from experiments.common.synthetic import fill
from experiments.common.texts import english_ids
from experiments.common.timing import seconds_of
from hf_hybrid_cache import DynamicHybridCache, HybridCache, PrefixStore, QuantizedHybridCache, StoredPrompt
from hf_hybrid_cache.model_identity import identity_of
from hf_hybrid_cache.models import load
from hf_hybrid_cache.prefix_store.folder import Folder

CACHES: dict[str, Callable[[PreTrainedConfig], HybridCache]] = {
    "full": DynamicHybridCache,
    "4 bits": partial(QuantizedHybridCache, bits=4),
}
QUESTION_TOKENS = 64
PASS_TOKENS = 2048
TURN_TOKENS = 200
# The system writes what was kept, and makes room, meanwhile: single tries differ by several times.
RESUMPTIONS = 7


def second_question(model: PreTrainedModel, form: str, ids: torch.Tensor, folder: Path) -> dict[str, Any]:
    """Read a document with a question, and ask two others: seconds to the first token of each."""
    document, *questions = ids.split([ids.shape[1] - 3 * QUESTION_TOKENS, *[QUESTION_TOKENS] * 3], dim=1)
    asked = []
    for told in (0, document.shape[1]):
        place = folder / f"told {told}"
        for question in questions:
            prompt = torch.cat([document, question], dim=1)
            cache: HybridCache = CACHES[form](model.config)
            start = time.perf_counter()
            reuse = PrefixStore(place).prefill(model, prompt, cache, document_tokens=told, progress=False)
            stored = time.perf_counter()
            first_logits(model, cache, prompt[:, -1:]).argmax()
            end = time.perf_counter()
            asked.append(
                {
                    "document_tokens": told,
                    "reused_tokens": reuse.num_tokens,
                    "prompt_tokens": reuse.prompt_tokens,
                    "store_seconds": stored - start,
                    "first_token_seconds": end - start,
                }
            )
    return {"what": "second question", "cache": form, "asked": asked}


def conversation(model: PreTrainedModel, form: str, num_tokens: int, drops: bool, folder: Path) -> dict[str, Any]:
    """Keep random states after those of a pass as a conversation, then 200 tokens more, and resume it."""
    store, cache = PrefixStore(folder), CACHES[form](model.config)
    ids = torch.randint(5, 40_000, (1, num_tokens + TURN_TOKENS), generator=torch.Generator().manual_seed(0))
    keep_seconds = 0.0
    for end in range(PASS_TOKENS, num_tokens + 1, PASS_TOKENS):
        if end == PASS_TOKENS:  # whose attention chooses the codecs
            first_logits(model, cache, ids[:, :end])
        else:
            fill(cache, model.config, PASS_TOKENS, model.dtype)
        keep_seconds += seconds_of(partial(store.keep, model, ids[:, :end], cache, document_tokens=PASS_TOKENS))
    before = _num_bytes(folder)
    fill(cache, model.config, TURN_TOKENS, model.dtype, chunk=1)
    turn_seconds = seconds_of(partial(store.keep, model, ids, cache, document_tokens=PASS_TOKENS))
    turn_bytes = _num_bytes(folder) - before
    del cache, store
    (stored,) = PrefixStore(folder).prompts()
    resumed = []
    for is_dropped in (False, True)[: 1 + drops]:
        if is_dropped:
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("3")
        samples = [_resume_seconds(folder, model, stored, form) for _ in range(1 if is_dropped else RESUMPTIONS)]
        resumed.append({"is_dropped": is_dropped, "seconds": median(samples), "samples_seconds": samples})
    return {
        "what": "conversation",
        "cache": form,
        "tokens": num_tokens,
        "bytes": before,
        "keep_seconds": keep_seconds,
        "turn_tokens": TURN_TOKENS,
        "turn_bytes": turn_bytes,
        "turn_seconds": turn_seconds,
        "resumed": resumed,
    }


def _resume_seconds(folder: Path, model: PreTrainedModel, stored: StoredPrompt, form: str) -> float:
    empty: HybridCache = CACHES[form](model.config)
    return seconds_of(partial(PrefixStore(folder).resume, model, stored, empty))


def search(num_nodes: int, num_tokens: int, folder: Path) -> dict[str, Any]:
    """Find a prompt in nodes of 2,048 tokens among others: the median of ten searches."""
    store, generator = Folder(folder), np.random.default_rng(0)
    tokens = generator.integers(0, 2**17, num_tokens)
    for end in range(PASS_TOKENS, num_tokens + 1, PASS_TOKENS):
        store.add(b"model", tokens[:end], end - PASS_TOKENS, [], whole_nodes=True)
    for _ in range(num_nodes - num_tokens // PASS_TOKENS):
        other = np.concatenate([tokens[:64], generator.integers(0, 2**17, 512)])
        store.add(b"model", other, 0, [], whole_nodes=True)
    opened = seconds_of(lambda: Folder(folder))
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        with store.find(b"model", tokens, whole_nodes=True) as match:
            seconds.append(time.perf_counter() - start)
            assert match.num_tokens == num_tokens
    return {
        "what": "search",
        "nodes": num_nodes,
        "tokens": num_tokens,
        "open_seconds": opened,
        "find_seconds": sorted(seconds)[5],
    }


def digest(name: str, model: PreTrainedModel) -> dict[str, Any]:
    """Compute the identity of a model, which reads all weights."""
    cache = DynamicHybridCache(model.config)
    first = seconds_of(lambda: identity_of(model, cache))
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return {
        "what": "digest",
        "model": name,
        "weight_bytes": num_bytes,
        "first_seconds": first,
    }


def common_half(model: PreTrainedModel, ids: torch.Tensor, folder: Path) -> dict[str, Any]:
    """Keep two documents whose first half is the same; return the bytes of one and of both."""
    half = ids.shape[1] // 3
    one, other = torch.cat([ids[:, :half], ids[:, half : 2 * half]], 1), torch.cat([ids[:, :half], ids[:, -half:]], 1)
    sizes = []
    for document in (one, other):
        PrefixStore(folder).prefill(model, document, DynamicHybridCache(model.config), progress=False)
        sizes.append(_num_bytes(folder))
    return {"what": "common half", "tokens": 2 * half, "bytes_of_one": sizes[0], "bytes_of_both": sizes[1]}


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "nodes").iterdir())


def main() -> None:
    parser = experiment_parser("prefix_store", __doc__)
    parser.add_argument("--tokens", type=int, default=8000, help="of the document that SmolLM2 reads")
    parser.add_argument("--long-tokens", type=int, default=131_072, help="of the conversation with random states")
    parser.add_argument("--nodes", type=int, default=10_000, help="to search")
    parser.add_argument("--drop-caches", action="store_true", help="let the system forget files before they are read")
    parser.add_argument(
        "--folder", type=Path, help="where the stores are, for as long as it takes (default: temporary)"
    )
    arguments = parser.parse_args()
    cells: list[dict[str, Any]] = []

    def add(cell: dict[str, Any]) -> None:
        cells.append(cell)
        print(json.dumps(cell), flush=True)

    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        folder = Path(place)
        add(search(arguments.nodes, arguments.long_tokens, folder / "search"))
        model, tokenizer = load("smollm2-135m", None, "cpu")
        assert tokenizer is not None
        add(digest("smollm2-135m", model))
        ids = english_ids(tokenizer, arguments.tokens + 3 * QUESTION_TOKENS)
        for form in CACHES:
            second_question(model, form, ids[:, :512], folder / f"warm {form}")  # compiles
            add(second_question(model, form, ids, folder / f"question {form}"))
        add(common_half(model, ids[:, :6144], folder / "half"))
        model, _ = load("llama-3.2-1b-random", None, "cpu")
        add(digest("llama-3.2-1b-random", model))
        for form in CACHES:
            with tempfile.TemporaryDirectory(dir=folder) as own:
                add(conversation(model, form, arguments.long_tokens, arguments.drop_caches, Path(own)))
    path = records.save("prefix_store", {"cells": cells}, arguments.out)
    print(f"record: {path}")
    found = next(cell for cell in cells if cell["what"] == "search")
    print(json.dumps({"find_ms": round(1e3 * found["find_seconds"], 2)}))


if __name__ == "__main__":
    main()
