"""What the command line runs: a prompt cut to fit, and one timed generation with any cache."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pydoc_data import topics
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from ..cache import DynamicHybridCache, HybridCache, OffloadedHybridCache, QuantizedHybridCache
from ..layers import tensors_of

DEFAULT_QUESTION = "What is a convenient way to insert debugging assertions into a program?"
WARM_UP_TOKENS = 64


class PromptError(ValueError):
    """A prompt that does not fit the model; the message gives the numbers."""


@dataclass(frozen=True)
class CacheOptions:
    """What the command line can set about a cache; each cache takes what concerns it."""

    prefetch_layers: int = 1
    resident_layers: int = 0
    bits: int = 4


CACHES: dict[str, Callable[[PreTrainedConfig, CacheOptions], Cache]] = {
    "stock": lambda config, options: DynamicCache(config=config),
    "dynamic": lambda config, options: DynamicHybridCache(config),
    "offloaded": lambda config, options: OffloadedHybridCache(config, options.prefetch_layers, options.resident_layers),
    "quantized": lambda config, options: QuantizedHybridCache(config, options.bits),
}


@dataclass(frozen=True)
class Prompt:
    """
    What the model is given.

    Attributes:
        input_ids: [1, tokens]
        document_tokens: tokens of the whole document; 0 without one.
        kept_tokens: how many of them, from the start, are in the prompt.
        prefix_tokens: tokens before the question, which can be saved for another one; 0 where they are not told apart.
    """

    input_ids: torch.Tensor
    document_tokens: int = 0
    kept_tokens: int = 0
    prefix_tokens: int = 0


@dataclass(frozen=True)
class Run:
    """
    One generation, timed.

    Attributes:
        tokens: the new tokens.
        prefill_seconds: until the first of them was there.
        decode_seconds: for all the others.
        device_bytes: of KV in the memory of accelerators, at the end.
        host_bytes: of KV in host memory, at the end.
    """

    tokens: list[int]
    prefill_seconds: float
    decode_seconds: float
    device_bytes: int
    host_bytes: int

    @property
    def decode_tokens_per_second(self) -> float | None:
        """None when the answer was a single token."""
        return (len(self.tokens) - 1) / self.decode_seconds if len(self.tokens) > 1 else None

    def first_difference(self, other: "Run") -> int | None:
        """Position of the first token, counted from 1, that differs from the other run's; None if all are the same."""
        pairs = zip(self.tokens, other.tokens, strict=False)
        if different := next((position for position, (a, b) in enumerate(pairs, 1) if a != b), None):
            return different
        lengths = len(self.tokens), len(other.tokens)
        return None if lengths[0] == lengths[1] else min(lengths) + 1


def default_document() -> str:
    """The language reference of Python's own help(): 465 KB of English prose that is on every machine."""
    return "\n\n".join(topics.topics[key] for key in sorted(topics.topics))


def context_length(model: PreTrainedModel) -> int:
    """Tokens the model can attend to, answer included; a very large number where its config does not say."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 2**31 - 1


def document_prompt(
    tokenizer: PreTrainedTokenizerBase,
    document: str,
    question: str,
    context_tokens: int,
    max_prompt_tokens: int,
    apart: bool = False,
) -> Prompt:
    """
    Put as much of the start of a document as fits before a question.

    Args:
        tokenizer: its chat template is used if it has one.
        document: the text.
        question: comes after the document, whole.
        context_tokens: how many tokens of the document to keep at most.
        max_prompt_tokens: the whole prompt, chat template and question included, is never longer.
        apart: let no token span the end of the document and the question, so that other questions can follow it.

    Raises:
        PromptError: not one token of the document fits, or the chat template changes the question.
    """
    encoded = tokenizer(document, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast, verbose=False)
    document_ids = encoded["input_ids"]

    def prompt_parts(kept: int) -> tuple[list[int], list[int]]:
        if kept == len(document_ids):
            start = document
        elif tokenizer.is_fast:
            start = document[: encoded["offset_mapping"][kept - 1][1]] if kept else ""
        else:
            start = str(tokenizer.decode(document_ids[:kept]))
        if apart:
            return _ids_apart(tokenizer, start.strip(), question)
        return [], _chat_ids(tokenizer, f"{start.strip()}\n\n{question}")

    overhead = sum(map(len, prompt_parts(0)))
    kept = min(len(document_ids), context_tokens, max_prompt_tokens - overhead)
    while kept > 0:
        prefix, rest = prompt_parts(kept)
        input_ids = prefix + rest
        if len(input_ids) <= max_prompt_tokens:
            return Prompt(torch.tensor([input_ids]), len(document_ids), kept, len(prefix))
        kept -= len(input_ids) - max_prompt_tokens  # tokens can split where the document meets the template
    raise PromptError(
        f"The question takes {overhead:,} tokens and {max_prompt_tokens:,} fit (the model's context less the new "
        "tokens): nothing of the document is left. Ask a shorter question or reduce --max-new-tokens."
    )


def following_prompt(
    tokenizer: PreTrainedTokenizerBase, prefix_ids: torch.Tensor, question: str, max_prompt_tokens: int
) -> Prompt:
    """
    Put a question after the tokens of a document, `[1, tokens]`, which are those of a prompt made `apart`.

    Raises:
        PromptError: it does not fit, or the chat template changes the question.
    """
    _, rest = _ids_apart(tokenizer, "", question)
    num_tokens = prefix_ids.shape[1] + len(rest)
    if num_tokens > max_prompt_tokens:
        raise PromptError(
            f"The saved document has {prefix_ids.shape[1]:,} tokens, the question {len(rest):,}, and "
            f"{max_prompt_tokens:,} fit (the model's context less the new tokens). Ask a shorter question or reduce "
            "--max-new-tokens."
        )
    return Prompt(torch.cat([prefix_ids, torch.tensor([rest])], dim=1), prefix_tokens=prefix_ids.shape[1])


def verbatim_prompt(tokenizer: PreTrainedTokenizerBase, text: str, max_prompt_tokens: int) -> Prompt:
    """
    Encode a text as it is, without a chat template.

    Raises:
        PromptError: it is longer than `max_prompt_tokens`, or it has no tokens.
    """
    has_bos = bool(tokenizer.bos_token) and text.startswith(str(tokenizer.bos_token))
    input_ids = tokenizer(text, add_special_tokens=not has_bos, verbose=False)["input_ids"]
    if not input_ids:
        raise PromptError("The prompt is empty.")
    if len(input_ids) > max_prompt_tokens:
        raise PromptError(
            f"The prompt has {len(input_ids):,} tokens and {max_prompt_tokens:,} fit (the model's context less the new "
            "tokens). Shorten it, reduce --max-new-tokens, or pass the text as --document, which is cut to fit."
        )
    return Prompt(torch.tensor([input_ids]))


def random_prompt(model: PreTrainedModel, num_tokens: int) -> Prompt:
    """Seeded random tokens, for a model without a tokenizer."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    return Prompt(torch.randint(vocab_size, (1, num_tokens), generator=torch.Generator().manual_seed(0)))


def timed_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    cache: Cache,
    max_new_tokens: int,
    prefill_chunk_size: int = 512,
    on_prefill: Callable[[int], None] | None = None,
    on_token: Callable[[int], None] | None = None,
) -> Run:
    """
    Generate greedily with `model.generate` and time the prefill and the decode steps apart.

    Args:
        model: of any decoder architecture.
        input_ids: [1, tokens]
        cache: an empty one, or one that holds the first tokens, which are not computed again then.
        max_new_tokens: at most; an end-of-text token ends the answer before.
        prefill_chunk_size: tokens of the prompt per forward pass.
        on_prefill: called with the number of tokens after each chunk.
        on_token: called with each new token.
    """
    input_ids = input_ids.to(model.device)
    recorder = _Recorder(on_token)

    def count(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if on_prefill and not recorder.tokens:
            on_prefill(kwargs["input_ids"].shape[1])

    hook = model.register_forward_hook(count, with_kwargs=True)
    try:
        _synchronize(model)
        start = time.perf_counter()
        model.generate(  # type: ignore[operator]
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            past_key_values=cache,
            max_new_tokens=max_new_tokens,
            prefill_chunk_size=min(prefill_chunk_size, input_ids.shape[1]),
            streamer=recorder,
            do_sample=False,
            num_beams=1,
            temperature=None,  # a model's own sampling settings would make transformers warn that greedy ignores them
            top_k=None,
            top_p=None,
        )
        _synchronize(model)
        end = time.perf_counter()
    finally:
        hook.remove()
    return Run(recorder.tokens, recorder.first_token - start, end - recorder.first_token, *_memory(cache))


def warm_up(model: PreTrainedModel, input_ids: torch.Tensor, cache: Cache) -> None:
    """Two tokens from the start of the prompt, so that what is set up or compiled once is not timed."""
    timed_generate(model, input_ids[:, :WARM_UP_TOKENS], cache, max_new_tokens=2)


class _Recorder(BaseStreamer):
    """Keeps the new tokens and the time of the first; `generate` hands the prompt over first."""

    def __init__(self, on_token: Callable[[int], None] | None):
        self.tokens: list[int] = []
        self.first_token = 0.0
        self._on_token = on_token
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        if not self.tokens:
            self.first_token = time.perf_counter()
        self.tokens.append(int(value))
        if self._on_token:
            self._on_token(self.tokens[-1])

    def end(self) -> None:
        pass


def _chat_ids(tokenizer: PreTrainedTokenizerBase, message: str) -> list[int]:
    return tokenizer(_chat_text(tokenizer, message), add_special_tokens=not tokenizer.chat_template, verbose=False)[
        "input_ids"
    ]


def _ids_apart(tokenizer: PreTrainedTokenizerBase, document: str, question: str) -> tuple[list[int], list[int]]:
    """Tokens of the prompt up to the end of the document, and from there on."""
    middle = f"\n\n{question.strip()}"
    # Templates may trim a message, and so what follows an empty document.
    before, found, after = _chat_text(tokenizer, (document or ".") + middle).rpartition(middle)
    if not found:
        raise PromptError("The model's chat template changes the question, so it cannot follow a saved document.")
    prefix = tokenizer(before, add_special_tokens=not tokenizer.chat_template, verbose=False)["input_ids"]
    return prefix, tokenizer(middle + after, add_special_tokens=False, verbose=False)["input_ids"]


def _chat_text(tokenizer: PreTrainedTokenizerBase, message: str) -> str:
    if not tokenizer.chat_template:
        return f"{message}\nAnswer:"
    messages = [{"role": "user", "content": message}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _memory(cache: Cache) -> tuple[int, int]:
    """Bytes of KV in accelerator memory and in host memory."""
    if isinstance(cache, HybridCache):
        report = cache.memory()
        return report.device_bytes, report.host_bytes
    tensors = [held for layer in cache.layers for held in tensors_of(layer)]
    total = sum(tensor.nbytes for tensor in tensors)
    host = sum(tensor.nbytes for tensor in tensors if tensor.device.type == "cpu")
    return total - host, host


def _synchronize(model: PreTrainedModel) -> None:
    if model.device.type != "cpu":
        torch.accelerator.synchronize(model.device)
