"""Prompts: a document cut to fit and a question after it, a text as it is, or random tokens."""

import re
from dataclasses import dataclass
from pydoc_data import topics

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

# A text that no document holds.
MARK = "<<hf-hybrid-cache>>"


class PromptError(ValueError):
    """A prompt that does not fit the model; the message gives the numbers."""


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


def default_document() -> str:
    """The language reference of Python's own help(): 465 KB of English prose that is on every machine."""
    return "\n\n".join(topics.topics[key] for key in sorted(topics.topics))


def where_it_says_so(text: str) -> str | None:
    """The sentence of the language reference that answers `DEFAULT_QUESTION`, if it is in `text`."""
    found = re.search(r"Assert statements are a convenient way[^:.]*", text)
    return found and " ".join(found[0].split()) + "."


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
    system: str | None = None,
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
        system: message to the model before all; `None` for that of the chat template, if it has one.

    Raises:
        PromptError: not one token of the document fits, or the chat template changes the question, or has no place for
            a system message.
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
            return _ids_apart(tokenizer, start.strip(), question, system)
        return [], _chat_ids(tokenizer, f"{start.strip()}\n\n{question}", system)

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
    Put a question after tokens, `[1, tokens]`, of a document (a prompt made `apart`) or of a conversation about it.

    Raises:
        PromptError: it does not fit, or the chat template changes the question.
    """
    rest = question_tokens(tokenizer, prefix_ids[0].tolist(), question)
    num_tokens = prefix_ids.shape[1] + len(rest)
    if num_tokens > max_prompt_tokens:
        raise PromptError(
            f"The saved document has {prefix_ids.shape[1]:,} tokens, the question {len(rest):,}, and "
            f"{max_prompt_tokens:,} fit (the model's context less the new tokens). Ask a shorter question or reduce "
            "--max-new-tokens."
        )
    return Prompt(torch.cat([prefix_ids, torch.tensor([rest])], dim=1), prefix_tokens=prefix_ids.shape[1])


def question_tokens(tokenizer: PreTrainedTokenizerBase, token_ids: list[int], question: str) -> list[int]:
    """
    Tokens that ask a question after a document, or after an answer if the tokens so far hold one.

    Raises:
        PromptError: the chat template changes the question.
    """
    if not tokenizer.chat_template:
        return _ids_apart(tokenizer, "", question)[1]
    _, _, to_answer = conversation_text(tokenizer, [MARK]).partition(MARK)
    if to_answer.strip() not in str(tokenizer.decode(token_ids)):
        return _ids_apart(tokenizer, "", question)[1]
    asked = question.strip()
    _, found, after = conversation_text(tokenizer, [".", MARK, asked]).partition(MARK)
    if not found or asked not in after:
        raise PromptError("The model's chat template changes the question, so it cannot follow an answer.")
    new: list[int] = tokenizer(after, add_special_tokens=False, verbose=False)["input_ids"]
    # An answer that was not cut off ends its turn itself.
    return new[1:] if new[0] == token_ids[-1] and new[0] in tokenizer.all_special_ids else new


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


def _chat_ids(tokenizer: PreTrainedTokenizerBase, message: str, system: str | None) -> list[int]:
    return tokenizer(
        _chat_text(tokenizer, message, system), add_special_tokens=not tokenizer.chat_template, verbose=False
    )["input_ids"]


def _ids_apart(
    tokenizer: PreTrainedTokenizerBase, document: str, question: str, system: str | None = None
) -> tuple[list[int], list[int]]:
    """Tokens of the prompt up to the end of the document, and from there on."""
    middle = f"\n\n{question.strip()}"
    # Templates may trim a message, and so what follows an empty document.
    before, found, after = _chat_text(tokenizer, (document or ".") + middle, system).rpartition(middle)
    if not found:
        raise PromptError("The model's chat template changes the question, so it cannot follow a saved document.")
    prefix = tokenizer(before, add_special_tokens=not tokenizer.chat_template, verbose=False)["input_ids"]
    return prefix, tokenizer(middle + after, add_special_tokens=False, verbose=False)["input_ids"]


def _chat_text(tokenizer: PreTrainedTokenizerBase, message: str, system: str | None = None) -> str:
    text = conversation_text(tokenizer, [message], system) if tokenizer.chat_template else f"{message}\nAnswer:"
    if system is not None and system.strip() not in text:
        raise PromptError("The model has no chat template with a system message: drop --system.")
    return text


def conversation_text(tokenizer: PreTrainedTokenizerBase, turns: list[str], system: str | None = None) -> str:
    """A conversation that the user begins, up to where the next answer goes, after a system message if there is one."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(turns)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
