"""Making prompts: from a document and a question, from a text as it is, or from random tokens."""

import re
from dataclasses import dataclass
from pydoc_data import topics

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...errors import HybridCacheError
from ...models.loading import first_lines

# The name of the document that is asked about without another one.
DEFAULT_DOCUMENT = "Python's language reference"
# A text that no document holds.
MARK = "<<hf-hybrid-cache>>"


class PromptError(HybridCacheError, ValueError):
    """A prompt that does not fit the model; the message gives the numbers."""


@dataclass(frozen=True)
class Prompt:
    """
    The tokens that a model reads before it answers.

    Attributes:
        input_ids: `[1, tokens]`
        document_tokens: tokens of the whole document; 0 without one.
        kept_tokens: tokens of the document in the prompt, from its start.
        prefix_tokens: tokens before the question, which can be saved for other questions; 0 where a token may span the
            end of the document and the question.
    """

    input_ids: torch.Tensor
    document_tokens: int = 0
    kept_tokens: int = 0
    prefix_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]


def default_document() -> str:
    """The language reference that Python's help() prints: 465 KB of English prose that every machine has."""
    return "\n\n".join(topics.topics[key] for key in sorted(topics.topics))


def where_it_says_so(text: str) -> str | None:
    """The sentence of the language reference that answers `DEFAULT_QUESTION`, if `text` has it."""
    sentence = re.search(r"Assert statements are a convenient way[^:.]*", text)
    return sentence and " ".join(sentence[0].split()) + "."


def context_length(model: PreTrainedModel) -> int:
    """Tokens that the model can attend to, with the answer; a very large number where its config has no limit."""
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
    Make a prompt of the start of a document, as much as fits, and a question.

    Args:
        tokenizer: its chat template is used if it has one.
        document: its text.
        question: follows the document, and is never cut.
        context_tokens: tokens of the document in the prompt at most.
        max_prompt_tokens: tokens of the whole prompt at most, with chat template and question.
        apart: whether no token may span the end of the document and the question, so that other questions can follow.
        system: system message; `None` for the one of the chat template.

    Raises:
        PromptError: no token of the document fits, or the chat template changes the question or has no place for a
            system message.
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
    tokenizer: PreTrainedTokenizerBase,
    prefix_ids: torch.Tensor,
    document_tokens: int | None,
    question: str,
    max_prompt_tokens: int,
) -> Prompt:
    """
    Make a prompt of saved tokens and a question.

    Args:
        tokenizer: of the model.
        prefix_ids: `[1, tokens]`, of a document (a prompt made `apart`), or of a conversation about it.
        document_tokens: how many of them are the document's; `None` where that is not known.
        question: follows them.
        max_prompt_tokens: tokens of the whole prompt at most.

    Raises:
        PromptError: the question does not fit, or the chat template changes it.
    """
    rest = question_tokens(tokenizer, prefix_ids[0].tolist(), document_tokens, question)
    num_tokens = prefix_ids.shape[1] + len(rest)
    if num_tokens > max_prompt_tokens:
        raise PromptError(
            f"The saved document has {prefix_ids.shape[1]:,} tokens, the question {len(rest):,}, and "
            f"{max_prompt_tokens:,} fit (the model's context less the new tokens). Ask a shorter question or reduce "
            "--max-new-tokens."
        )
    return Prompt(torch.cat([prefix_ids, torch.tensor([rest])], dim=1), prefix_tokens=prefix_ids.shape[1])


def question_tokens(
    tokenizer: PreTrainedTokenizerBase, token_ids: list[int], document_tokens: int | None, question: str
) -> list[int]:
    """
    The tokens of a question after a document, or after an answer if more than the document comes before it.

    Args:
        tokenizer: of the model.
        token_ids: the tokens before the question.
        document_tokens: how many of them are the document's; where it is `None`, their text tells of an answer.
        question: its text.

    Raises:
        PromptError: the chat template changes the question.
    """
    if document_tokens is None:
        _, _, to_answer = chat_text(tokenizer, MARK).partition(MARK)
        is_first = to_answer.strip() not in str(tokenizer.decode(token_ids))
    else:
        is_first = len(token_ids) == document_tokens
    if is_first or not tokenizer.chat_template:
        return _ids_apart(tokenizer, "", question)[1]
    asked = question.strip()
    _, mark, after = conversation_text(tokenizer, [".", MARK, asked]).partition(MARK)
    if not mark or asked not in after:
        raise PromptError("The model's chat template changes the question, so it cannot follow an answer.")
    new: list[int] = tokenizer(after, add_special_tokens=False, verbose=False)["input_ids"]
    # An answer that was not cut off has the token that ends its turn.
    return new[1:] if new[0] == token_ids[-1] and new[0] in tokenizer.all_special_ids else new


def verbatim_prompt(tokenizer: PreTrainedTokenizerBase, text: str, max_prompt_tokens: int) -> Prompt:
    """
    Make a prompt of a text as it is, without a chat template.

    Raises:
        PromptError: the text has no tokens, or more than `max_prompt_tokens`.
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
    """Make a prompt of random tokens, always the same, for a model without a tokenizer."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    return Prompt(torch.randint(vocab_size, (1, num_tokens), generator=torch.Generator().manual_seed(0)))


def _chat_ids(tokenizer: PreTrainedTokenizerBase, message: str, system: str | None) -> list[int]:
    return tokenizer(
        chat_text(tokenizer, message, system), add_special_tokens=not tokenizer.chat_template, verbose=False
    )["input_ids"]


def _ids_apart(
    tokenizer: PreTrainedTokenizerBase, document: str, question: str, system: str | None = None
) -> tuple[list[int], list[int]]:
    """The tokens up to the end of the document, and the tokens after it, in a prompt made `apart`."""
    middle = f"\n\n{question.strip()}"
    # A template may trim a message, and so the separator after an empty document.
    before, separator, after = chat_text(tokenizer, (document or ".") + middle, system).rpartition(middle)
    if not separator:
        raise PromptError("The model's chat template changes the question, so it cannot follow a saved document.")
    prefix = tokenizer(before, add_special_tokens=not tokenizer.chat_template, verbose=False)["input_ids"]
    return prefix, tokenizer(middle + after, add_special_tokens=False, verbose=False)["input_ids"]


def chat_text(tokenizer: PreTrainedTokenizerBase, message: str, system: str | None = None) -> str:
    """
    The text of a prompt of one message, with the chat template if there is one.

    Raises:
        PromptError: the chat template refuses it, or there is no place for a system message.
    """
    text = conversation_text(tokenizer, [message], system) if tokenizer.chat_template else f"{message}\nAnswer:"
    if system is not None and system.strip() not in text:
        raise PromptError("The model has no chat template with a system message: drop --system.")
    return text


def conversation_text(tokenizer: PreTrainedTokenizerBase, turns: list[str], system: str | None = None) -> str:
    """
    The text of a conversation up to the next answer; the user begins it, after a system message if there is one.

    Raises:
        PromptError: the chat template refuses it.
    """
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(turns)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is a program
        what = "this conversation" if system is None else "a system message, or this one: go on without it"
        raise PromptError(f"The model's chat template refuses {what} ({first_lines(error)}).") from error
