"""The tokens of prompts: what comes before a document, the document as far as it fits, and questions after it."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..documents import Documents
from ..errors import HybridCacheError

# A text that no document holds.
_MARK = "<<hf-hybrid-cache>>"
# Characters of a token at most, on average over a long text; more are tokenized only if a document has fewer.
_MOST_CHARACTERS = 8
# Tokens beside those that are kept, so that the end of a piece changes none of them.
_MARGIN = 256
# A notice names so many documents of a kind at most.
_MOST_NAMES = 10


class PromptError(HybridCacheError, ValueError):
    """A prompt that does not fit the model; the message gives the numbers."""


@dataclass(frozen=True)
class DocumentPart:
    """
    The part of a document that is in a prompt.

    Attributes:
        document: its name.
        tokens: all its tokens, with those of the line that names it; an estimate if `DocumentPrompt.is_estimate`.
        read_tokens: those in the prompt, from its start.
    """

    document: str
    tokens: int
    read_tokens: int


@dataclass(frozen=True)
class DocumentPrompt:
    """
    The tokens of documents, up to where a question follows.

    Attributes:
        token_ids: with what the chat template puts before.
        parts: of each document.
        is_estimate: all documents are too long to be tokenized whole, so how many tokens they have is an estimate.
    """

    token_ids: list[int]
    parts: tuple[DocumentPart, ...] = ()
    is_estimate: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return sum(part.tokens for part in self.parts)

    @property
    def read_tokens(self) -> int:
        """Tokens of all documents that are in the prompt."""
        return sum(part.read_tokens for part in self.parts)

    @property
    def counts(self) -> str:
        """The tokens that are in the prompt, and those of all documents, as a text."""
        return f"{self.read_tokens:,} of {self._about}{self.tokens:,}"

    @property
    def _about(self) -> str:
        """The word before a number of tokens that may be an estimate."""
        return "about " * self.is_estimate

    def notice(self, why: str) -> str:
        """
        Return the sentences that say before an answer what of the documents was not read; empty if all was.

        Args:
            why: it was not, such as "the model's context is 8,192".
        """
        if self.read_tokens == self.tokens:
            return ""
        whose = "document's" if len(self.parts) == 1 else f"{len(self.parts):,} documents'"
        return (
            f"Only the first {self.read_tokens:,} of the {whose} {self._about}{self.tokens:,} tokens were read ({why})."
            f"{self._by_part() if len(self.parts) > 1 else ''} "
            f"The answer knows nothing of the last {self._about}{self.tokens - self.read_tokens:,}."
        )

    def _by_part(self) -> str:
        """Return a sentence each for the documents that are read whole, in part, and not at all."""
        whole = [part.document for part in self.parts if part.read_tokens == part.tokens]
        cut = [
            f"{part.document} ({part.read_tokens:,} of {self._about}{part.tokens:,} tokens)"
            for part in self.parts
            if 0 < part.read_tokens < part.tokens
        ]
        left_out = [part.document for part in self.parts if part.tokens and not part.read_tokens]
        kinds = (("Whole", whole), ("Cut", cut), ("Left out", left_out))
        return "".join(f" {kind}: {_listed(names)}." for kind, names in kinds if names)


def context_length(model: PreTrainedModel) -> int:
    """Return the tokens that the model can attend to; a very large number where its config has no limit."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 2**31 - 1


class ChatTemplate:
    """
    The texts of a conversation, by the tokenizer's chat template if it has one.

    A prompt is tokenized in two parts, the document and the question, so that other questions can follow it.

    Args:
        tokenizer: of the model.
        system: system message; `None` for that of the chat template.

    Raises:
        PromptError: there is no place for a system message.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: str | None = None):
        self.tokenizer, self.system = tokenizer, system
        if system is not None and (not tokenizer.chat_template or system.strip() not in self._text([_MARK])):
            raise PromptError("The model has no chat template with a system message: leave it out.")

    def start(self, document: str = "") -> list[int]:
        """
        Return the tokens from the start to the end of a document, or to where the first question begins.

        Raises:
            PromptError: the chat template refuses it.
        """
        before = self._around(document.strip())[0]
        ids: list[int] = self._ids(before, add_special_tokens=not self.tokenizer.chat_template)
        return ids

    def first_question(self, question: str, after_document: bool) -> list[int]:
        """
        Return the tokens of the first question, with what comes between it and the answer.

        Raises:
            PromptError: the chat template changes the question.
        """
        after = self._around("." if after_document else "", question.strip())[1]
        return self._ids(after)

    def next_question(self, question: str, last_token: int) -> list[int]:
        """
        Return the tokens of a question after an answer, with what comes between them.

        Args:
            question: its text.
            last_token: the last one of the answer, which may be the one that ends its turn.

        Raises:
            PromptError: the chat template changes the question.
        """
        asked = question.strip()
        if not self.tokenizer.chat_template:
            return self.first_question(asked, after_document=True)
        _, mark, after = self._text([".", _MARK, asked]).partition(_MARK)
        if not mark or asked not in after:
            raise PromptError("The model's chat template changes the question, so it cannot follow an answer.")
        new = self._ids(after)
        return new[1:] if new[0] == last_token and last_token in self.tokenizer.all_special_ids else new

    def without_template(self, text: str, shared: int = 0) -> tuple[list[int], int]:
        """
        Return the tokens of a text that is a whole prompt, and how many of them end in its first `shared` characters.

        Raises:
            PromptError: it has none.
        """
        begins = bool(self.tokenizer.bos_token) and text.startswith(str(self.tokenizer.bos_token))
        token_ids, starts = self._with_starts(text, add_special_tokens=not begins)
        if not token_ids:
            raise PromptError("The prompt is empty.")
        return token_ids, max(0, bisect_right(starts, shared) - 1)

    def document(self, documents: Documents, most_tokens: int) -> DocumentPrompt:
        """
        Return the start of documents, as much as fits.

        Args:
            documents: their texts.
            most_tokens: of the prompt at most, with what the chat template puts before.

        Raises:
            PromptError: no token of the documents fits.
        """
        text = documents.text
        piece = text[: (most_tokens + _MARGIN) * _MOST_CHARACTERS]
        while True:
            ids, starts = self._with_starts(piece)
            if len(piece) == len(text) or len(ids) >= most_tokens + _MARGIN:
                break
            piece = text[: 2 * len(piece)]
        room = most_tokens - len(self.start())
        kept = min(len(ids), room)
        while kept > 0:
            # Where the document meets the template, tokens can split.
            end = len(piece) if kept == len(ids) else starts[kept]
            token_ids = self.start(piece[:end])
            if len(token_ids) <= most_tokens:
                return DocumentPrompt(token_ids, _parts(documents, starts, kept, len(piece)), len(piece) < len(text))
            kept -= len(token_ids) - most_tokens
        raise PromptError(
            f"{most_tokens:,} tokens are left for the document, and the prompt takes {most_tokens - room:,} without "
            "it: ask for shorter answers, or use a model with a longer context."
        )

    def _with_starts(self, text: str, add_special_tokens: bool = False) -> tuple[list[int], list[int]]:
        """Return the tokens of a text, and the characters at which they begin."""
        if self.tokenizer.is_fast:
            options: dict[str, Any] = {"add_special_tokens": add_special_tokens, "verbose": False}
            encoded = self.tokenizer(text, return_offsets_mapping=True, **options)
            return encoded["input_ids"], [start for start, _ in encoded["offset_mapping"]]
        ids = self._ids(text, add_special_tokens)  # such a tokenizer does not say where a token begins
        return ids, [index * len(text) // len(ids) for index in range(len(ids))]

    def _around(self, document: str, question: str = _MARK) -> tuple[str, str]:
        """Return the text up to the end of the document, and the text after it."""
        middle = f"\n\n{question}" if document else question
        # A template may trim a message, and so the separator after an empty document.
        before, separator, after = self._text([f"{document}{middle}"]).rpartition(middle)
        if not separator:
            raise PromptError("The model's chat template changes the question, so it cannot follow a document.")
        return before, f"{middle}{after}"

    def _text(self, turns: Sequence[str]) -> str:
        """Return the text of a conversation up to the next answer; the user begins it."""
        if not self.tokenizer.chat_template:
            return f"{turns[-1]}\nAnswer:"
        roles = ("user", "assistant")
        messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(turns)]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return self.text_of(messages)

    def text_of(self, messages: Sequence[dict[str, str]]) -> str:
        """
        Return the text of a conversation up to the next answer.

        Args:
            messages: role and content of each.

        Raises:
            PromptError: there is no chat template, or it refuses them.
        """
        if not self.tokenizer.chat_template:
            raise PromptError("The model has no chat template.")
        try:
            return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
        except Exception as error:  # a template is a program
            what = "this conversation" if self.system is None else "a system message, or this one: go on without it"
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise PromptError(f"The model's chat template refuses {what} ({reason}).") from error

    def _ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return ids


def _listed(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def _parts(documents: Documents, starts: Sequence[int], kept: int, num_characters: int) -> tuple[DocumentPart, ...]:
    """Divide the tokens that are kept among the documents; a token belongs to the document that it begins in."""

    def tokens_before(character: int) -> int:
        if character <= num_characters:
            return bisect_left(starts, character)
        # What was not tokenized is taken to have tokens as long as those that were.
        return round(character * len(starts) / num_characters)

    ends = [0, *map(tokens_before, accumulate(map(len, documents.sections)))]
    return tuple(
        DocumentPart(document.name, end - start, min(max(kept - start, 0), end - start))
        for document, (start, end) in zip(documents.files, pairwise(ends), strict=True)
    )
