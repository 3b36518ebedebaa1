"""Tiny models that can read and write, and what is asked of them."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.chat import AnswerSettings, Chat
from hf_hybrid_cache.documents import Document, Documents

from models.byte_tokenizer import byte_tokenizer, model_for

TEXT = "It was signed by Ada in London, on a Tuesday; the witness came from Turin. " * 3
REPORT = Documents((Document("report.txt", TEXT.strip()),), ())
# Of several chunks.
LONG = Documents((Document("long.txt", (TEXT * 15).strip()),), ())
SETTINGS = AnswerSettings(max_new_tokens=12)
QUESTIONS = ("Who signed it?", "Where?", "And on which day of the week was that?")
# As options of Chat.
CACHES: dict[str, dict[str, Any]] = {
    "stock": {"cache": "stock"},
    "dynamic": {"cache": "dynamic"},
    "offloaded": {"cache": "offloaded"},
    "8 bits": {"bits": 8},
    "4 bits": {"bits": 4},
}


@functools.cache
def tokenizer_of_tests() -> PreTrainedTokenizerFast:
    return byte_tokenizer(only_printable=True)


@functools.cache
def model_of(family: str = "llama", context: int = 4096) -> PreTrainedModel:
    """A random model of a family, in full precision, that never ends an answer by itself."""
    return model_for(tokenizer_of_tests(), context, family)


def chat_of(
    model: PreTrainedModel | None = None, documents: Documents | Sequence[str] = REPORT, **options: Any
) -> Chat:
    defaults = {"settings": SETTINGS, "progress": False}
    return Chat(model or model_of(), options.pop("tokenizer", tokenizer_of_tests()), documents, **defaults | options)


def said(chat: Chat, question: str) -> list[int]:
    """Ask, and return the tokens of the answer."""
    shown = "".join(chat.ask(question))
    assert shown.strip() == chat.last.text
    return chat.last.token_ids


def prompt_of(chat: Chat) -> list[int]:
    """Return the tokens before the last answer."""
    token_ids = chat.token_ids
    return token_ids[: len(token_ids) - len(chat.turns[-1].token_ids)]


def prompt_tokens(messages: Iterable[tuple[str, str]], tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the tokens of a conversation, by hand, as the template of these tests writes it: contents are texts."""
    begin, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    token_ids: list[int] = []
    for role, content in [*messages, ("assistant", "")]:
        text = tokenizer(f"{role}\n{content}", split_special_tokens=True)["input_ids"]
        token_ids += [begin, *text, end, *tokenizer("\n")["input_ids"]]
    return token_ids[:-2]


def generated(model: PreTrainedModel, token_ids: list[int], settings: AnswerSettings = SETTINGS) -> list[int]:
    """Return what transformers generates after these tokens with its own cache."""
    if settings.seed is not None:
        torch.manual_seed(settings.seed)
    prompt, cache = torch.tensor([token_ids]), DynamicCache(config=model.config)
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        **cache_argument(cache),
        max_new_tokens=settings.max_new_tokens,
        do_sample=settings.temperature > 0,
        temperature=settings.temperature or None,
        top_p=settings.top_p,
        top_k=settings.top_k,
        repetition_penalty=settings.repetition_penalty,
    )
    return tokens[0, len(token_ids) :].tolist()


@contextmanager
def before_each_pass(module: torch.nn.Module, act: Callable[[int, int], object]) -> Iterator[None]:
    """Call `act` with the number of the forward pass of a model, or a layer, from 1 on, and its sequences."""
    count = 0

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal count
        count += 1
        act(count, len(kwargs["input_ids"] if "input_ids" in kwargs else args[0]))

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def writing(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, text: str) -> Iterator[None]:
    """Let a model write a text, and its end, before it goes on by itself."""
    left = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]

    def hook(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if left and "return_dict" in kwargs:  # as `generate` calls it
            output.logits[:, -1] = -1e9
            output.logits[:, -1, left.pop(0)] = 0

    handle = model.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
