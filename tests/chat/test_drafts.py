"""Answers of a conversation are drafted where that changes none of them, and say what was drafted."""

import copy
from dataclasses import replace

import pytest

from hf_hybrid_cache import fuse_decode
from hf_hybrid_cache.chat import AnswerSettings
from hf_hybrid_cache.decode_step import repeats_rows

from .talks import CACHES, QUESTIONS, chat_of, model_of

# Tokens that an answer has become likelier, so it repeats itself.
REPEATING = AnswerSettings(max_new_tokens=40, frequency_penalty=-2, presence_penalty=-2)
SETTINGS = {
    "greedy": REPEATING,
    "sampled": replace(REPEATING, temperature=0.8, top_p=0.9, seed=3),
    "a text that ends it": replace(REPEATING, stop=("e", "Z")),
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("cache", ["dynamic", "8 bits"])
def test_conversation_with_drafts_is_that_without(cache: str, settings: str):
    model = copy.deepcopy(model_of())
    fuse_decode(model)
    chats = [chat_of(model, **CACHES[cache], settings=replace(SETTINGS[settings], drafts=drafts)) for drafts in (15, 0)]
    drafted = 0
    for question in QUESTIONS:
        texts = ["".join(chat.ask(question)) for chat in chats]
        assert texts[0] == texts[1]
        ours, plain = (chat.last for chat in chats)
        assert (ours.token_ids, ours.finish_reason) == (plain.token_ids, plain.finish_reason)
        assert ours.drafted_tokens >= ours.accepted_tokens >= plain.drafted_tokens == 0
        drafted += ours.drafted_tokens
    assert chats[0].token_ids == chats[1].token_ids
    assert chats[0].cache.get_seq_length() == chats[1].cache.get_seq_length()
    assert bool(drafted) == repeats_rows(model) or settings != "greedy"


def test_answer_by_the_models_own_forward_is_not_drafted():
    chat = chat_of(settings=REPEATING)
    assert next(chat.ask_all(QUESTIONS[:1])).drafted_tokens == 0
