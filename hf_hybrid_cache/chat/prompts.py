"""The tokens of prompts: what comes before a document, the document as far as it fits, and questions after it."""

import inspect
import re
import uuid
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, zip_longest
from typing import Any, Self

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..documents import Documents
from ..errors import HybridCacheError
from .settings import AnswerSettings
from .thinking import ThoughtForm, named_marks
from .tools import CallForm, Message, call_form

# What follows a question where there is no chat template.
_ANSWER = "\nAnswer:"
# Characters of a token at most, on average over a long text; more are tokenized only if a document has fewer.
_MOST_CHARACTERS = 8
# Tokens beside those that are kept, so that the end of a piece changes none of them.
_MARGIN = 256
# Tokens of a long context that documents leave to an answer, however long it may be, and to questions before it.
_ANSWER_TOKENS, _QUESTION_TOKENS = 512, 256
# A notice names so many documents of a kind at most.
_MOST_NAMES = 10
_LAST_TAG = re.compile(r"[<\[][^<\[\s]*(?=\s*$)")
# Names that chat templates have for the thought before an answer.
_THOUGHTS = ("reasoning_content", "thinking")


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
            why: it was not, such as "the context is 8,192".
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


@dataclass(frozen=True)
class Asked:
    """
    A question, and the prompt that ends with it.

    Attributes:
        question: its text; empty for a prompt that is used as it is.
        token_ids: of the whole prompt.
        room: tokens of the model's context that are left for an answer.
        thought: form of the thought before the answer; `None` for none.
    """

    question: str
    token_ids: list[int]
    room: int
    thought: ThoughtForm | None = None

    @classmethod
    def of(cls, question: str, token_ids: list[int], context: int, thought: ThoughtForm | None = None) -> Self:
        """Return a question in a context of so many tokens; raises `PromptError` if it has no room for an answer."""
        if len(token_ids) >= context:
            raise PromptError(
                f"The prompt has {len(token_ids):,} tokens, and the context is {context:,}: no room is left "
                "for an answer."
            )
        return cls(question, token_ids, context - len(token_ids), thought)


def context_length(model: PreTrainedModel) -> int:
    """Return the tokens that the model can attend to; a very large number where its config has no limit."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 2**31 - 1


def room_for_answer(context: int, new_tokens: int) -> int:
    """Return the tokens of a context that documents leave to an answer of so many tokens at most."""
    return min(new_tokens, _ANSWER_TOKENS, context // 4)


def room_for_documents(context: int, leave: int | None, new_tokens: int) -> int:
    """Return the tokens of a context that documents take at most; raises `PromptError` if what they leave is all."""
    if leave is None:
        leave = new_tokens + min(_QUESTION_TOKENS, context // 16)
    if context <= leave:
        raise PromptError(
            f"{leave:,} tokens are left to questions and answers, and the context is {context:,}: ask for "
            "shorter answers."
        )
    return context - leave


class ChatTemplate:
    """
    The tokens of a conversation, by the tokenizer's chat template if it has one.

    Special tokens are those of the template alone: texts that look like one are texts. A document is tokenized without
    the question after it, so that other questions can follow it.

    Args:
        tokenizer: of the model.
        system: system message; `None` for that of the chat template.

    Raises:
        PromptError: there is no place for a system message.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: str | None = None):
        self.tokenizer, self.system = tokenizer, system
        self._values: dict[str, Any] = {}  # of variables of the template
        # No text has them, because nobody knows them: a place in a conversation, and texts of special tokens.
        self._place, self._mark = uuid.uuid4().hex, uuid.uuid4().hex
        self._special = {id: each for id, each in tokenizer.added_tokens_decoder.items() if each.special}
        self._ids_by_text = {each.content: id for id, each in self._special.items()}
        texts = sorted(self._ids_by_text, key=len, reverse=True)
        self._special_texts = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        if system is not None and (
            not tokenizer.chat_template or self._as_text(system.strip()) not in self._conversation([self._place])
        ):
            raise PromptError("The model has no chat template with a system message: leave it out.")

    def given(self, settings: AnswerSettings) -> Self:
        """Return the template with the values that settings give to its variables; raises `PromptError` for others'."""
        values = settings.template_values
        if values == self._values:
            return self
        own = {"messages", *inspect.signature(self.tokenizer.apply_chat_template).parameters}
        if taken := sorted(own & values.keys()):
            raise PromptError(f"chat_template_kwargs has no place for {', '.join(taken)}: leave it out.")
        other = copy(self)
        other._values = values
        vars(other).pop("thought", None)
        return other

    @cached_property
    def thought(self) -> ThoughtForm | None:
        """
        The form of thoughts, as the template writes that of a last answer, or names the mark at its end.

        `None` where it does neither, and no token of the tokenizer is such a mark.
        """
        if not self.tokenizer.chat_template:
            return None
        thought, content = uuid.uuid4().hex, uuid.uuid4().hex
        asked, usual = [("user", self._place)], copy(self)
        usual._values = {}
        try:
            prompt, usual_prompt = self._rendered(asked), usual._rendered(asked)
            whole = usual._rendered([*asked, ("assistant", content, thought)], is_asked=False)
            plain = usual._rendered([*asked, ("assistant", content)], is_asked=False).partition(content)[0]
        except PromptError:  # of an answer that is the last message
            return None
        before, _, after = whole.partition(thought)
        end, has_content, _ = after.partition(content)
        begin = ""
        if has_content and end.strip() and before.startswith(usual_prompt.rstrip()):
            # Where nothing is between, the prompt has begun the thought, by its last tag.
            begin = before.removeprefix(usual_prompt.rstrip()).strip() or "".join(_LAST_TAG.findall(usual_prompt))
        if not begin:
            token_texts = (each.content for each in self.tokenizer.added_tokens_decoder.values())
            marks = named_marks([str(self.tokenizer.chat_template), *token_texts])
            if marks is None:
                return None
            begin, end = marks[0], f"\n{marks[1]}\n\n"
        answer = plain.removeprefix(usual_prompt).strip() if plain.startswith(usual_prompt) else ""
        shown = begin + end + answer
        answer = "" if begin in answer or end.strip() in answer else answer
        written = before.removeprefix(usual_prompt).rstrip()  # with the white space that a model writes before it
        written = written if written.strip() == begin else begin
        begin_ids, end_ids, answer_ids = (
            tuple(self._tokenized(mark, add_special_tokens=False)[0]) for mark in (written, end, answer)
        )
        return ThoughtForm(
            begin,
            end.strip(),
            answer,
            prompt.rstrip().endswith(begin),
            begin_ids,
            end_ids,
            answer_ids,
            frozenset(id for id, each in self._special.items() if each.content not in shown),
        )

    @cached_property
    def calls(self) -> CallForm | None:
        """The form of calls of functions; `None` where the template takes none, or `call_form` finds none."""
        usual = copy(self)
        usual._values = {}

        def written(messages: Sequence[Message], functions: Sequence[dict[str, Any]], is_asked: bool = False) -> str:
            with suppress(PromptError):
                return usual._rendered(messages, is_asked, functions)
            return ""

        tokens = {each.content: id for id, each in self.tokenizer.added_tokens_decoder.items()}
        return call_form(written, self.thought, tokens, self._ids_by_text) if self.tokenizer.chat_template else None

    def answer_tokens(self, settings: AnswerSettings, context: int) -> int:
        """Return the tokens that are left to an answer, and to its thought, which has less room in a short context."""
        thinks = settings.thinking is not False and self.given(settings).thought is not None
        of_thought = min(settings.max_thinking_tokens, context // 4) if thinks else 0
        return room_for_answer(context, settings.max_new_tokens) + of_thought

    def room_to_ask(self, questions: Sequence[str], settings: AnswerSettings, context: int) -> int:
        """
        Return the tokens of a context that are left to any of some questions, and its answer.

        What a question leaves is half of the rest at least: one that is longer may have no room.
        """
        lengths, answer = [], self.answer_tokens(settings, context)
        for question in questions:
            with suppress(PromptError):
                lengths.append(len(self.conversation([question], document=[])))
        half = (context - answer) // 2
        return answer + max((length for length in lengths if length <= half), default=min(lengths, default=0))

    def start(self, document: str = "") -> list[int]:
        """
        Return the tokens from the start to the end of a document, or to where the first question begins.

        Raises:
            PromptError: the chat template refuses it, or changes what follows.
        """
        return self._encoded(self._before_question(document.strip()), self._adds_special_tokens)[0]

    def conversation(
        self, turns: Sequence[str], document: Sequence[int] | None = None, thoughts: Sequence[str] = ()
    ) -> list[int]:
        """
        Return the tokens of a conversation up to the next answer.

        The template is asked about all of it each time: what it says of earlier turns may depend on later ones.

        Args:
            turns: questions and answers in turn; a question is the last one.
            document: the tokens that `start` returned of the document that the first question follows; `None` for none.
            thoughts: before the answers, of which the template says what is repeated.

        Raises:
            PromptError: the chat template refuses the conversation, or changes the first question.
        """
        if document is not None:
            text = self._conversation([f"{self._place}\n\n{turns[0]}", *turns[1:]], thoughts)
            _, mark, after = text.partition(self._place)
            if not mark:
                raise PromptError("The model's chat template changes the question, so it cannot follow a document.")
            return [*document, *self._encoded(after)[0]]
        text, start = self._conversation(turns, thoughts), self._before_question()
        if not text.startswith(start):
            return self._encoded(text, self._adds_special_tokens)[0]
        return [*self.start(), *self._encoded(text[len(start) :])[0]]

    def request(
        self, messages: Sequence[tuple[Any, ...]], functions: Sequence[dict[str, Any]] = ()
    ) -> tuple[list[int], int]:
        """
        Return the tokens of messages up to the next answer, and how many of them another question may follow.

        These are the tokens up to the last blank line of the last message, or up to this message.

        Args:
            messages: the first fields of a `Message` each.
            functions: that may be called, as OpenAI's API has them.

        Raises:
            PromptError: there is no chat template, or it refuses them.
        """
        if not self.tokenizer.chat_template:
            raise PromptError("The model has no chat template.")
        *before, last = (Message(*each) for each in messages)
        text = self._rendered([*before, last], functions=functions)
        without = self._rendered([*before, last._replace(content=self._place)], functions=functions)
        start = max(0, without.rfind(self._place))
        shared = max(start, text.rfind("\n\n", start, start + len(self._as_text(last.content).strip())) + 2)
        token_ids, starts = self._encoded(text)
        return token_ids, _tokens_within(starts, len(self._plain(text[:shared])))

    def whole_prompt(self, text: str) -> tuple[list[int], int]:
        """
        Return the tokens of a text that is a whole prompt, and how many of them end with its last blank line.

        Raises:
            PromptError: it has none.
        """
        begins = bool(self.tokenizer.bos_token) and text.startswith(str(self.tokenizer.bos_token))
        token_ids, starts = self._tokenized(text, add_special_tokens=not begins)
        if not token_ids:
            raise PromptError("The prompt is empty.")
        return token_ids, _tokens_within(starts, text.rfind("\n\n") + 2 if "\n\n" in text else 0)

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
            ids, starts = self._encoded(self._as_text(piece))
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
            "it: ask for shorter answers, or take a longer context."
        )

    @property
    def _adds_special_tokens(self) -> bool:
        """Whether the tokenizer begins a prompt, and not the template."""
        return not self.tokenizer.chat_template

    def _before_question(self, document: str = "") -> str:
        """Return the text up to the end of a document, or to where the first question begins."""
        between = "\n\n" if document else ""
        # A template may trim a message, and so the separator after an empty document.
        before, mark, _ = self._conversation([f"{document}{between}{self._place}"]).rpartition(self._place)
        if not mark or not before.endswith(between):
            raise PromptError("The model's chat template changes the question, so it cannot follow a document.")
        return before.removesuffix(between)

    def _conversation(self, turns: Sequence[str], thoughts: Sequence[str] = ()) -> str:
        """Return the text of questions and answers up to the next answer, with marks, see `_as_text`."""
        if not self.tokenizer.chat_template:
            ends = (_ANSWER, "\n\n")
            return "".join(f"{self._as_text(text)}{ends[index % 2]}" for index, text in enumerate(turns))
        messages: list[tuple[str, ...]] = []
        for question, answer, thought in zip_longest(turns[::2], turns[1::2], thoughts, fillvalue=""):
            messages += [("user", question), ("assistant", answer, thought)]
        del messages[len(turns) :]
        return self._rendered(messages if self.system is None else [("system", self.system), *messages])

    def _rendered(
        self, messages: Sequence[tuple[Any, ...]], is_asked: bool = True, functions: Sequence[dict[str, Any]] = ()
    ) -> str:
        """Return what the chat template makes of messages, see `request`, with marks, see `_as_text`."""
        given = [
            {"role": role, "content": content, **dict.fromkeys(_THOUGHTS if thought else (), thought), **more}
            for role, content, thought, more in (Message(*each) for each in messages)
        ]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    self._as_texts(given),
                    tools=self._as_texts(functions) or None,
                    tokenize=False,
                    add_generation_prompt=is_asked,
                    **self._values,
                )
            )
        except Exception as error:  # a template is a program
            what = "this conversation" if self.system is None else "a system message, or this one: go on without it"
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise PromptError(f"The model's chat template refuses {what} ({reason}).") from error

    def _as_text(self, content: str) -> str:
        """Return a text with marks in place of what looks like special tokens; those of the template stay."""
        return self._special_texts.sub(lambda found: f"<{self._mark}:{self._ids_by_text[found[0]]}>", content)

    def _as_texts(self, value: Any) -> Any:
        """Return a value of JSON with marks in its texts, see `_as_text`."""
        if isinstance(value, dict):
            return {self._as_text(name): self._as_texts(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [*map(self._as_texts, value)]
        return self._as_text(value) if isinstance(value, str) else value

    def _plain(self, text: str) -> str:
        """Return a text without marks."""
        return re.sub(f"<{self._mark}:([0-9]+)>", lambda found: self._special[int(found[1])].content, text)

    def _encoded(self, text: str, add_special_tokens: bool = False) -> tuple[list[int], list[int]]:
        """Return the tokens of a text with marks, and the characters, of the text without them, where each begins."""
        plain = self._plain(text)
        token_ids, starts = self._tokenized(plain, add_special_tokens=add_special_tokens)
        added = self.tokenizer.num_special_tokens_to_add() if add_special_tokens else 0
        if sum(map(self._special.__contains__, token_ids)) == len(self._special_texts.findall(text)) + added:
            return token_ids, starts
        token_ids, starts, before, position, strips = [], [], 0, 0, False
        for found in [*self._special_texts.finditer(text), None]:
            piece = self._plain(text[position : found.start() if found else len(text)])
            token = found and self._special[self._ids_by_text[found[0]]]
            kept = piece.lstrip() if strips else piece
            skipped = len(piece) - len(kept)
            ids, places = self._tokenized(
                kept.rstrip() if token and token.lstrip else kept,
                add_special_tokens=add_special_tokens and not token_ids,
                split_special_tokens=True,
            )
            token_ids += ids
            starts += [before + skipped + place for place in places]
            before += len(piece)
            if found and token:
                token_ids.append(self._ids_by_text[found[0]])
                starts.append(before)
                before, position, strips = before + len(found[0]), found.end(), token.rstrip
        return token_ids, starts

    def _tokenized(self, text: str, **options: bool) -> tuple[list[int], list[int]]:
        """Return the tokens of a text, and the characters at which they begin."""
        if not text and not options.get("add_special_tokens"):
            return [], []
        if self.tokenizer.is_fast:
            encoded = self.tokenizer(text, return_offsets_mapping=True, verbose=False, **options)
            return encoded["input_ids"], [start for start, _ in encoded["offset_mapping"]]
        ids: list[int] = self.tokenizer(text, verbose=False, **options)["input_ids"]
        return ids, [index * len(text) // len(ids) for index in range(len(ids))]  # it does not say where they begin


def _tokens_within(starts: Sequence[int], characters: int) -> int:
    """Return how many tokens, by where they begin, end in so many first characters of a text."""
    return max(0, bisect_right(starts, characters) - 1)


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
