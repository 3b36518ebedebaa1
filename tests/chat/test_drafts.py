"""Answers of a conversation are drafted where that changes none of them, and say what was drafted."""

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import GenerationConfig, PreTrainedModel

from hf_hybrid_cache import fuse_decode
from hf_hybrid_cache.chat import AnswerSettings
from hf_hybrid_cache.decode_step import repeats_rows

from .talks import CACHES, QUESTIONS, chat_of, model_of
from common.soak import count, search_at_random

# Tokens that an answer has become likelier, so it repeats itself.
REPEATING = AnswerSettings(max_new_tokens=40, frequency_penalty=-2, presence_penalty=-2)
FORM = {"regex": "((ab|cd)(ef|gh)){30}", "max_new_tokens": 150}
CHANGES: Any = st.tuples(
    st.sampled_from([{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}, {"temperature": 1.5, "seed": 4}]),
    st.sampled_from([{}, {"frequency_penalty": 1.0, "presence_penalty": None}]),
    st.sampled_from([{}, {"stop": ("e", "Z")}]),
    st.sampled_from([{}, FORM]),
)


@functools.cache
def fused_model() -> PreTrainedModel:
    """A model whose answers may be drafted, and end where they have a form."""
    model = copy.deepcopy(model_of())
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    fuse_decode(model)
    return model


@pytest.mark.parametrize("cache", ["dynamic", "8 bits"])
@search_at_random(6)
@given(changes=CHANGES)
@example(changes=())
@example(changes=(FORM,))
def test_conversation_with_drafts_is_that_without(cache: str, changes: tuple[dict[str, Any], ...]):
    model, settings, drafted = fused_model(), REPEATING, 0
    for change in changes:
        settings = replace(settings, **change)
    chats = [chat_of(model, **CACHES[cache], settings=replace(settings, drafts=drafts)) for drafts in (15, 0)]
    for question in QUESTIONS:
        texts = ["".join(chat.ask(question)) for chat in chats]
        assert texts[0] == texts[1]
        ours, plain = (chat.last for chat in chats)
        assert (ours.token_ids, ours.finish_reason) == (plain.token_ids, plain.finish_reason)
        assert ours.drafted_tokens >= ours.accepted_tokens >= plain.drafted_tokens == 0
        drafted += ours.drafted_tokens
        count("an answer with drafts is that without")
    assert chats[0].token_ids == chats[1].token_ids
    assert chats[0].cache.get_seq_length() == chats[1].cache.get_seq_length()
    if changes in ((), (FORM,)):
        assert bool(drafted) == repeats_rows(model)


def test_answer_by_the_models_own_forward_is_not_drafted():
    chat = chat_of(settings=REPEATING)
    assert next(chat.ask_all(QUESTIONS[:1])).drafted_tokens == 0
