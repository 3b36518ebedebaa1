"""Questions after a document, as tokens: several of them continue it together."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...cache import DynamicHybridCache
from ...layers import HybridLayer
from ..runs.prompts import PromptError, context_length, question_tokens
from .questions import Question


@dataclass(frozen=True)
class FollowingQuestion:
    """
    A question, and the tokens that follow the document.

    Attributes:
        question: its line in the file.
        token_ids: what follows the document.
        room: tokens of an answer for which the model's context has room.
    """

    question: Question
    token_ids: list[int]
    room: int

    @classmethod
    def after(
        cls, prefix: torch.Tensor, question: Question, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> "FollowingQuestion":
        """
        A question after the tokens of a document, `[1, tokens]`.

        Raises:
            PromptError: the model's context has no room for an answer, or the chat template changes the question.
        """
        token_ids = question_tokens(tokenizer, prefix[0].tolist(), prefix.shape[1], question.question)
        longest = context_length(model)
        room = longest - prefix.shape[1] - len(token_ids)
        if room < 1:
            raise PromptError(
                f"The document takes {prefix.shape[1]:,} tokens, the question {len(token_ids):,}, and the model's "
                f"context is {longest:,}: no room is left for an answer. Ask a shorter question."
            )
        return cls(question, token_ids, room)


def number_together(following: Sequence[FollowingQuestion], at_once: int, max_new_tokens: int) -> int:
    """Count the first questions that are answered together; one whose answer the context cuts short is alone."""
    have_room = takewhile(lambda each: each.room >= max_new_tokens, following[:at_once])
    return max(1, len(list(have_room)))


def prompts_together(prefix: torch.Tensor, following: Sequence[FollowingQuestion]) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The prompts of several questions about a document, `[questions, tokens]`, and their attention mask.

    Shorter questions are padded after the document, so that all prompts begin with it. Padding is a token of the
    document, which a repetition penalty counts already.

    Args:
        prefix: `[1, tokens]`, of the document.
        following: the questions.
    """
    longest = max(len(each.token_ids) for each in following)
    padding = [longest - len(each.token_ids) for each in following]
    last = int(prefix[0, -1])
    rows = [[last] * pads + each.token_ids for pads, each in zip(padding, following, strict=True)]
    input_ids = torch.cat([prefix.expand(len(rows), -1), torch.tensor(rows)], dim=1)
    positions = torch.arange(input_ids.shape[1]) - prefix.shape[1]
    is_padding = (positions >= 0) & (positions < torch.tensor(padding)[:, None])
    return input_ids, (~is_padding).long()


def can_answer_together(model: PreTrainedModel) -> bool:
    """Whether padding after a document changes no answer: attention sees all tokens, and positions can be given."""
    layers = DynamicHybridCache(model.config).layers
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    return takes_positions and all(isinstance(layer, HybridLayer) for layer in layers)
