"""The thoughts of answers: how a chat template shows them, where they end, and how long they may be."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from transformers import LogitsProcessor

# The end of a thought, where a template names it and writes no thought of earlier answers.
_END_MARK = re.compile(r"<(\w+:)?/think(ing)?>|\[/think(ing)?\]", re.IGNORECASE)


class Thought(str):
    """A piece of text that is of a thought, and not of the answer after it."""

    __slots__ = ()


@dataclass(frozen=True)
class ThoughtForm:
    """
    The form of the thoughts before answers to a prompt.

    Attributes:
        begin: mark that begins a thought.
        end: mark between a thought and the answer.
        answer: mark that begins an answer without a thought; may be empty.
        is_open: whether the prompt has begun the thought.
        begin_ids: tokens of the mark that begins a thought, with white space before it where the template has some.
        end_ids: tokens that end a thought, with the white space around the mark.
        answer_ids: tokens of the mark that begins an answer without one.
        hidden_ids: special tokens that are of none of the marks.
    """

    begin: str
    end: str
    answer: str
    is_open: bool
    begin_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    hidden_ids: frozenset[int]

    @property
    def mark_tokens(self) -> int:
        """Tokens of the marks, about."""
        return len(self.begin) + len(self.end_ids)

    @property
    def close(self) -> str:
        """The mark that ends a thought, without that which begins an answer."""
        return self.end.removesuffix(self.answer).rstrip()

    def parts(self, pieces: Iterable[str]) -> Iterator[str]:
        """
        Yield the pieces of a text without marks, those of thoughts as `Thought`; what may begin a mark waits.

        A model may think again after a thought; two are parted by an empty line.
        """
        held, is_thought, strips, again = "", True if self.is_open else None, True, False
        for piece, is_last in chain(((piece, False) for piece in pieces), [("", True)]):
            held += piece
            while True:
                if is_thought is None:
                    is_thought, rest = self.begun(held, is_last)
                    if is_thought is False and again and self.answer and rest == held:
                        is_thought = bool(held)  # an answer has the mark that the template writes before it
                    held = rest
                    strips = again or is_thought is not False
                    if is_thought and again:
                        yield Thought("\n\n")
                if not is_thought:
                    break
                thought, mark, after = held.partition(self.close)
                waiting = 0 if mark or is_last else overlap(held, self.close)
                ready = thought[: len(thought) - waiting].rstrip()
                yield Thought(ready.lstrip() if strips else ready)
                strips = strips and not ready.strip()
                held = after if mark else thought[len(ready) :]
                if not mark:
                    break
                is_thought, again = None, True
            if is_thought is None:
                yield ""
            elif not is_thought:
                held = held.lstrip() if strips else held
                strips = strips and not held
                yield held
                held = ""

    def begun(self, text: str, is_last: bool = False) -> tuple[bool | None, str]:
        """Return whether a text begins with a thought, `None` if more will tell, and the text without the mark."""
        begun = text.lstrip()
        for mark, is_thought in ((self.begin, True), (self.answer, False)):
            if mark and begun.startswith(mark):
                return is_thought, begun.removeprefix(mark)
        waits = not is_last and any(mark.startswith(begun) for mark in (self.begin, self.answer) if mark)
        return (None if waits else False), text


class ThoughtTokens:
    """
    Counts the tokens of a thought and of the answer after it, as they come.

    Args:
        form: of the thought; `None` for none.
        most: its tokens at most, without marks.
        decode: makes text of tokens.
    """

    def __init__(self, form: ThoughtForm | None, most: int, decode: Callable[[Sequence[int]], str]):
        self._form, self._most, self._decode = form, most, decode
        self._length = -1
        # After so many tokens the thought has begun, and ended; an answer without one has only an end, at 0.
        self._begin: int | None = None
        self._end: int | None = None
        self._left: tuple[int, ...] = ()  # tokens that end a thought which is too long

    def read(self, token_ids: Sequence[int]) -> None:
        """Take the tokens of an answer so far; they may be fewer than before, the last one another."""
        if len(token_ids) <= self._length:
            self._length = len(token_ids) - 1
            self._begin = None if self._begin is None or self._begin > self._length else self._begin
            self._end = None if self._end is None or self._end > self._length else self._end
        while self._length < len(token_ids):
            self._length += 1
            self._look(token_ids, self._length)

    @property
    def num_thought(self) -> int:
        """Tokens of the thought so far, with its marks."""
        return self._length if self._end is None and self._begin is not None else self._end or 0

    @property
    def num_answer(self) -> int:
        """Tokens after the thought; 0 before it has ended."""
        return self._length - self._end if self._end is not None else 0

    def form_begin(self, token_ids: Sequence[int]) -> int | None:
        """Return after how many tokens an answer has its form, as far as is known; `None` within a thought."""
        if self._form is None or self._end:
            return self._end or 0
        if self._begin is not None:
            return None
        mark = self._form.answer_ids
        return len(mark) if tuple(token_ids[: len(mark)]) == mark else 0

    def opening(self, token_ids: Sequence[int]) -> tuple[list[int], bool]:
        """Return the tokens with which a mark before the answer can go on, and whether there must be one."""
        if self._form is None or self._begin is not None or self._end is not None:
            return [], False
        marks, size = (self._form.begin_ids, self._form.answer_ids), len(token_ids)
        tokens = [mark[size] for mark in marks if len(mark) > size and mark[:size] == tuple(token_ids)]
        return tokens, bool(tokens and self._form.answer_ids)

    @property
    def forced(self) -> int | None:
        """The token that comes next, because the thought is too long; `None` for any."""
        if self._form is None or self._begin is None or self._end is not None:
            return None
        position = self._length - self._begin - self._most
        return self._left[position] if position >= 0 else None

    def _look(self, token_ids: Sequence[int], length: int) -> None:
        """Take note if the thought begins or ends after so many tokens."""
        form = self._form
        if self._end is not None:
            return
        if form is None:
            self._end = 0
        elif self._begin is None:
            is_thought, _ = (True, "") if form.is_open else form.begun(self._decode(token_ids[:length]))
            self._begin = length if is_thought else None
            self._end = 0 if is_thought is False else None
        elif (spent := length - self._begin) > self._most:
            self._end = length if spent == self._most + len(self._left) else None
        elif form.end in self._decode(token_ids[max(self._begin, length - len(form.end.encode())) : length]):
            self._end = length
        if form is not None and self._begin is not None and length == self._begin + self._most:
            last = tuple(token_ids[:length])
            # It may have begun to end by itself.
            sizes = range(min(length, len(form.end_ids) - 1), -1, -1)
            begun = next(size for size in sizes if last[length - size :] == form.end_ids[:size])
            self._left = form.end_ids[begun:]


class ThoughtLimit(LogitsProcessor):
    """
    Ends thoughts that are too long, so that an answer comes.

    Args:
        thoughts: of each answer.
        start: tokens of the prompts.
    """

    def __init__(self, thoughts: Sequence[ThoughtTokens], start: int):
        self._thoughts, self._start = thoughts, start

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        for thought, token_ids, row in zip(self._thoughts, input_ids[:, self._start :].tolist(), scores, strict=True):
            thought.read(token_ids)
            if thought.forced is not None:
                row.fill_(-torch.inf)
                row[thought.forced] = 0
        return scores


def overlap(text: str, mark: str) -> int:
    """Return how many of the last characters of a text begin a mark."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-size:])), 0)


def named_marks(texts: Iterable[str]) -> tuple[str, str] | None:
    """Return the marks that begin and end a thought, where one of some texts names the second."""
    found = next((match for text in texts if (match := _END_MARK.search(text))), None)
    return found and (found[0].replace("/", ""), found[0])
