"""An answer, its times and its memory as JSON."""

from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from ..files import json_line
from ..runs.finish_reason import FinishReason
from ..runs.prompts import Prompt
from ..runs.timed_run import Run
from ..terminal import write


def record(run: Run, prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, reason: FinishReason) -> dict[str, Any]:
    """
    The fields that `generate --json` prints for a run.

    Args:
        run: generated the answer.
        prompt: asked for it.
        tokenizer: decodes the answer; without one the answer is a list of token ids.
        reason: why the answer ended.
    """
    answer = run.tokens if tokenizer is None else tokenizer.decode(run.tokens, skip_special_tokens=True)
    return {
        "answer": answer,
        "finish_reason": reason,
        "prompt_tokens": prompt.num_tokens,
        "answer_tokens": len(run.tokens),
        "document_tokens": prompt.document_tokens,
        "read_tokens": prompt.kept_tokens,
        "prefill_seconds": round(run.prefill_seconds, 3),
        "tokens_per_second": run.decode_tokens_per_second,
        "kv_device_bytes": run.device_bytes,
        "kv_host_bytes": run.host_bytes,
    }


def print_json(out: Console, shown: dict[str, Any]) -> None:
    """Print an object as one line of JSON."""
    write(out, json_line(shown))
