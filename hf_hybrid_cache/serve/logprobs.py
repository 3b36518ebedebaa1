"""The log-probabilities of an answer's tokens, told with the pieces of text that these begin in."""

import codecs
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..chat import Call, Generation, Generator, Thought, TokenChoice

# What cannot be said in JSON, as OpenAI does.
_IMPOSSIBLE = -9999.0


class Told(NamedTuple):
    """A token of an answer, and the likeliest ones there, by bytes and log-probability; and its place in the text."""

    token: bytes
    logprob: float
    likeliest: list[tuple[bytes, float]]
    offset: int


class Piece(NamedTuple):
    """A piece of one of some answers: text, a `Thought` where it is of one, with the tokens told with it; or a call."""

    number: int
    text: str
    tokens: Sequence[Told] = ()
    call: Call | None = None


class Telling:
    """
    Tells the tokens of one answer; those of its thought, and special ones that are not of its text, are left out.

    Args:
        made: what is generated, with log-probabilities.
        number: of the answer.
        generator: generates it.

    Raises:
        SettingError: the bytes of the tokens are not known.
    """

    def __init__(self, made: Generation, number: int, generator: Generator):
        self._choices, self._stop = made.choices[number], made.settings.stop
        self._vocabulary, self._thought = generator.vocabulary("logprobs"), generator.counted(made)
        # As in the text, which has second marks of a thought.
        self._is_hidden = made.thought.hidden_ids.__contains__ if made.thought else self._vocabulary.is_special_token
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_taken, self._waiting = 0, deque[Told]()
        # Of the tokens that were taken, among them some before the answer's text; of that so many characters are told.
        self._text, self._begin, self._num_told = "", 0, 0

    def until(self, text: str) -> list[Told]:
        """Return the tokens that begin before the end of this piece of the text, and were not told before."""
        if isinstance(text, Thought) or not text:
            return []
        self._take(self._choices[:])
        if not self._num_told:  # white space at the begin is no text after a thought, nor with some tokenizers
            self._begin = max(0, self._text.find(text))
            while len(self._waiting) > 1 and self._waiting[0].offset < self._waiting[1].offset <= self._begin:
                self._waiting.popleft()
        self._num_told += len(text)
        return self._before(self._begin + self._num_told)

    def rest(self, num_tokens: int) -> list[Told]:
        """Return the tokens that were not told, of so many, up to a text that ended the answer."""
        self._take(self._choices[:num_tokens])
        ends = [place for stop in self._stop if (place := self._text.find(stop, self._begin)) >= 0]
        return self._before(min(ends, default=len(self._text) + 1))

    def _take(self, choices: list[TokenChoice]) -> None:
        """Take the tokens that have come, which these are."""
        self._thought.read([each.token_id for each in choices])
        new, self._num_taken = choices[max(self._num_taken, self._thought.num_thought) :], len(choices)
        for choice in new:
            if not self._is_hidden(choice.token_id):
                token, offset = self._vocabulary.decode_bytes([choice.token_id]), len(self._text)
                likeliest = [(self._vocabulary.decode_bytes([each]), logprob) for each, logprob in choice.likeliest]
                self._text += self._decoder.decode(token)
                self._waiting.append(Told(token, choice.logprob, likeliest, offset))

    def _before(self, end: int) -> list[Told]:
        told = list[Told]()
        while self._waiting and self._waiting[0].offset < end:
            each = self._waiting.popleft()
            told.append(each._replace(offset=max(0, each.offset - self._begin)))
        return told


def chat_form(tokens: Sequence[Told]) -> dict[str, Any]:
    """Return tokens as chat completions have them."""

    def form(token: bytes, logprob: float) -> dict[str, Any]:
        return {"token": _name(token), "logprob": max(logprob, _IMPOSSIBLE), "bytes": [*token]}

    content = [
        form(each.token, each.logprob) | {"top_logprobs": [form(*one) for one in each.likeliest]} for each in tokens
    ]
    return {"content": content, "refusal": None}


def text_form(tokens: Sequence[Told]) -> dict[str, Any]:
    """Return tokens as completions have them, where the likeliest ones have the token itself among them."""
    rows = [[*each.likeliest, (each.token, each.logprob)] for each in tokens]
    return {
        "tokens": [_name(each.token) for each in tokens],
        "token_logprobs": [max(each.logprob, _IMPOSSIBLE) for each in tokens],
        "top_logprobs": [{_name(token): max(logprob, _IMPOSSIBLE) for token, logprob in row} for row in rows],
        "text_offset": [each.offset for each in tokens],
    }


def _name(token: bytes) -> str:
    r"""Return a token as text, and a part of a character as OpenAI writes it: \xf0\x9f."""
    return token.decode(errors="backslashreplace")
