"""
The time that a prefix store saves, and what it costs.

- SmolLM2-135M reads English text and a question, cold, and then other questions about it from the store.
- With the shape of Llama-3.2-1B, 4 bits and random states: a conversation is kept, 200 tokens more are kept, and it is
  resumed, seven times: the median. What was just written is in the system's cache of files; `--drop-caches` asks the
  system to forget it before it is read once more, which needs root.
"""

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from experiments.common.decoding import prefill as first_logits
from experiments.common.harness import Cell, publish
from experiments.common.options import plain_parser
from experiments.common.synthetic import fill
from experiments.common.texts import english_ids
from experiments.common.timing import seconds_of
from hf_hybrid_cache import DynamicHybridCache, HybridCache, PrefixStore, QuantizedHybridCache, StoredPrompt
from hf_hybrid_cache.models import load

CACHES: dict[str, Callable[[PreTrainedConfig], HybridCache]] = {
    "full": DynamicHybridCache,
    "4 bits": partial(QuantizedHybridCache, bits=4),
}
QUESTION_TOKENS = 64
PASS_TOKENS = 2048
TURN_TOKENS = 200
# The system writes what was kept, and makes room, meanwhile: single tries differ by several times.
RESUMPTIONS = 7


def second_question(model: PreTrainedModel, form: str, ids: torch.Tensor, folder: Path) -> Cell:
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


def conversation(model: PreTrainedModel, form: str, num_tokens: int, drops: bool, folder: Path) -> Cell:
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


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "nodes").iterdir())


def main() -> None:
    parser = plain_parser("prefix_store", __doc__)
    parser.add_argument("--tokens", type=int, default=8000, help="of the document that SmolLM2 reads")
    parser.add_argument("--long-tokens", type=int, default=131_072, help="of the conversation with random states")
    parser.add_argument("--drop-caches", action="store_true", help="let the system forget files before they are read")
    arguments = parser.parse_args()

    def cells() -> Iterator[tuple[str, Cell]]:
        model, tokenizer = load("smollm2-135m", None, "cpu")
        assert tokenizer is not None
        ids = english_ids(tokenizer, arguments.tokens + 3 * QUESTION_TOKENS)
        for form in CACHES:
            with TemporaryDirectory() as folder:
                second_question(model, form, ids[:, :512], Path(folder) / "warm")  # compiles
                yield f"second question, {form}", second_question(model, form, ids, Path(folder))
        model, _ = load("llama-3.2-1b-random", None, "cpu")
        for form in CACHES:
            with TemporaryDirectory() as folder:
                cell = conversation(model, form, arguments.long_tokens, arguments.drop_caches, Path(folder))
                yield f"conversation, {form}", cell

    def answer(cell: Cell) -> list[float]:
        """Seconds to the first token of each question, or until a conversation is resumed."""
        if "asked" in cell:
            return [each["first_token_seconds"] for each in cell["asked"]]
        return [each["seconds"] for each in cell["resumed"]]

    publish("prefix_store", cells(), arguments.out, answer)


if __name__ == "__main__":
    main()
