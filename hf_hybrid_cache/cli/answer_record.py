"""An answer and what it took, for a program."""

import json
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from .finish_reason import FinishReason
from .prompts import Prompt
from .timed_run import Run


def record(run: Run, prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, reason: FinishReason) -> dict[str, Any]:
    """
    What `generate --json` prints of a run.

    Args:
        run: the answer.
        prompt: what was asked; `document_tokens` and `read_tokens` say how much of the document was in it.
        tokenizer: of the model; without one the answer is its token ids.
        reason: why it ended.
    """
    answer = run.tokens if tokenizer is None else tokenizer.decode(run.tokens, skip_special_tokens=True)
    return {
        "answer": answer,
        "finish_reason": reason,
        "prompt_tokens": prompt.input_ids.shape[1],
        "answer_tokens": len(run.tokens),
        "document_tokens": prompt.document_tokens,
        "read_tokens": prompt.kept_tokens,
        "prefill_seconds": round(run.prefill_seconds, 3),
        "tokens_per_second": run.decode_tokens_per_second,
        "kv_device_bytes": run.device_bytes,
        "kv_host_bytes": run.host_bytes,
    }


def print_json(out: Console, shown: dict[str, Any]) -> None:
    """In one line."""
    out.print(json.dumps(shown, ensure_ascii=False), markup=False, highlight=False, emoji=False)
