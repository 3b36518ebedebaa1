"""Finding the last question and the system message in the tokens of a conversation, by its chat template."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ..runs.prompts import MARK, PromptError, conversation_text

_OTHER_MARK = "<<hf-hybrid-cache, too>>"


@dataclass(frozen=True)
class LastTurn:
    """
    The last question of a conversation.

    Attributes:
        start: the number of tokens before it; `None` for the first question where it is not known where the document
            ends.
        question: its text; where `start` is `None`, the last paragraph of document and question.
        answer: the text after it.
    """

    start: int | None
    question: str
    answer: str


def last_turn(tokenizer: PreTrainedTokenizerBase, token_ids: list[int], document_tokens: int | None) -> LastTurn | None:
    """
    Find the last question and its answer; `None` without a chat template, or without a question.

    Args:
        tokenizer: of the model.
        token_ids: of a conversation.
        document_tokens: how many of them are the document's; `None` where that is not known.
    """
    if not tokenizer.chat_template:
        return None
    try:
        _, _, after = conversation_text(tokenizer, [".", MARK, _OTHER_MARK]).partition(MARK)
    except PromptError:  # the template knows only one question
        return None
    to_question, _, to_answer = after.partition(_OTHER_MARK)
    question_ids, answer_ids = _ids(tokenizer, to_question), _ids(tokenizer, to_answer)
    first = document_tokens or 0
    end = _last(answer_ids, token_ids, first, len(token_ids)) if answer_ids else None
    if end is None:
        return None
    answer = _text(tokenizer, token_ids[end + len(answer_ids) :])
    # Before the first answer there are a system message and the document, too.
    answer_before = _last(answer_ids, token_ids, first, end)
    if answer_before is None and document_tokens is not None:
        return LastTurn(document_tokens, _text(tokenizer, token_ids[document_tokens:end]), answer)
    start = None
    if answer_before is not None and question_ids:
        start = _last(question_ids, token_ids, answer_before, end)
    if start is not None:
        return LastTurn(start, _text(tokenizer, token_ids[start + len(question_ids) : end]), answer)
    question = _text(tokenizer, token_ids[:end]).rpartition("\n\n")[2]
    return LastTurn(None, question.strip(), answer)


class SystemMessage:
    """
    The system message at the start of a conversation.

    Args:
        tokenizer: its chat template says where the message goes.

    Raises:
        PromptError: the chat template has no place for a system message.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        if not tokenizer.chat_template:
            raise PromptError("The model has no chat template, and so no system message.")
        self._before, self._after = self._around()
        self._default = conversation_text(tokenizer, [MARK]).partition(MARK)[0]

    def tokens(self, text: str) -> list[int]:
        """
        The tokens of a message, from the start of the conversation to the document.

        Raises:
            PromptError: the chat template changes the text of the message.
        """
        start, mark, _ = conversation_text(self._tokenizer, [MARK], text).partition(MARK)
        if not mark or text not in start:
            raise PromptError("The model's chat template changes this system message, so it cannot be set.")
        return _ids(self._tokenizer, start)

    def num_tokens(self, token_ids: list[int], is_saved: bool) -> int:
        """
        The number of tokens before the document, in a conversation whose message was not set here.

        Args:
            token_ids: of the conversation.
            is_saved: whether the conversation comes from a file; it may have a system message then.

        Raises:
            PromptError: the tokens do not say where the document begins.
        """
        default = _ids(self._tokenizer, self._default)
        # Without marks around the message, a document could begin with the same tokens.
        is_marked = not self._before.startswith(self._default)
        if token_ids[: len(default)] == default and (is_marked or not is_saved):
            return len(default)
        before, after = _ids(self._tokenizer, self._before), _ids(self._tokenizer, self._after)
        end = _first(after, token_ids)
        if end is None or not is_saved or not is_marked or token_ids[: len(before)] != before:
            raise PromptError("It cannot be told where the document of this conversation begins: no message is set.")
        return end + len(after)

    def _around(self) -> tuple[str, str]:
        """The text before the message, and the text between it and the document."""
        text = conversation_text(self._tokenizer, [_OTHER_MARK], MARK)
        before, _, rest = text.partition(MARK)
        between, mark, _ = rest.partition(_OTHER_MARK)
        if not mark or not between:
            raise PromptError("The model's chat template has no system message.")
        return before, between


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _text(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    return str(tokenizer.decode(token_ids, skip_special_tokens=True)).strip()


def _first(wanted: Sequence[int], token_ids: Sequence[int]) -> int | None:
    """The index at which `wanted` first begins; `None` if it is not there."""
    starts = range(len(token_ids) - len(wanted) + 1)
    return next((start for start in starts if token_ids[start : start + len(wanted)] == wanted), None)


def _last(wanted: Sequence[int], token_ids: Sequence[int], first: int, end: int) -> int | None:
    """The index from `first` on at which `wanted` last begins before `end`; `None` if it is not there."""
    starts = range(end - len(wanted), first - 1, -1)
    return next((start for start in starts if token_ids[start : start + len(wanted)] == wanted), None)
