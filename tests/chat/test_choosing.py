"""The choice of tokens: nothing of a model's generation config acts unseen, and each answer has its own numbers."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_hybrid_cache.chat import AnswerSettings, not_followed, sampling

from chat.talks import QUESTIONS, chat_of, generated, model_of, said

SAMPLED = AnswerSettings(max_new_tokens=12, temperature=10.0)
# Of every token of the vocabulary that a sampled answer may have.
PRINTABLE = list(range(3, 97))
# A value of each field that changes what `generate` does, or makes an error of it.
FOLLOWED: dict[str, Any] = {
    "bad_words_ids": [[token] for token in PRINTABLE[::2]],
    "begin_suppress_tokens": PRINTABLE[1:],
    "bos_token_id": 1,
    "eos_token_id": [0, *PRINTABLE],
    "pad_token_id": 5,
    "sequence_bias": [[[PRINTABLE[7]], 100.0]],
    "suppress_tokens": PRINTABLE[5:],
}
# transformers warns of any value.
WARNED_OF = {"continuous_batching_config", "transformers_version"}
# Values of all other fields: each makes other answers, or an error, of some that are followed after all.
ODD = (3, 1e-9, 10_000)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[PreTrainedModel]:
    """Return a model whose generation config a test may change."""
    shared = model_of()
    monkeypatch.setattr(shared, "generation_config", GenerationConfig())
    return shared


# A model's generation config


@pytest.mark.default("values")
@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("form", [{"cache": "stock"}, {}, {"bits": 8}, {"store": True}], ids=str)
def test_answer_when_the_model_sets_what_is_not_followed_then_is_the_same(
    form: dict[str, Any], value: float, model: PreTrainedModel, tmp_path: Path
):
    form = form | {"store": tmp_path} if "store" in form else form

    def answers() -> list[list[int]]:
        chat = chat_of(model, **form)
        together = [answer.token_ids for answer in chat.ask_all(QUESTIONS)]
        return [said(chat, question) for question in QUESTIONS] + together

    expected = answers()
    vars(model.generation_config).update(not_followed_fields(value))
    assert answers() == expected


def not_followed_fields(value: Any) -> dict[str, Any]:
    """Return another value of each field but those that are followed: this one, or one that the field can have."""

    def is_possible(name: str, value: Any) -> bool:
        try:
            return GenerationConfig(**{name: value}) is not None
        except (ValueError, TypeError, AttributeError):
            return False

    names = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - FOLLOWED.keys()
    values = (value, 0.9, True, "static")
    found = {name: next((each for each in values if is_possible(name, each)), None) for name in names - WARNED_OF}
    return found | {"use_cache": False, "watermarking_config": {"bias": 20.0}}


@pytest.mark.parametrize("name", sorted(FOLLOWED.keys() - {"bos_token_id", "pad_token_id"}))
def test_answer_when_the_model_names_tokens_then_follows(name: str, model: PreTrainedModel):
    plain = said(chat_of(model), QUESTIONS[0])
    setattr(model.generation_config, name, FOLLOWED[name])
    chat = chat_of(model)
    answer = said(chat, QUESTIONS[0])
    assert answer != plain
    assert answer == generated(model, chat.token_ids[: -len(answer)])


def test_not_followed_names_what_a_model_sets_beside_settings_of_answers(model: PreTrainedModel):
    fields, settled = not_followed_fields(3), {"max_length", "do_sample", "cache_implementation"}
    settled |= {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens"}
    vars(model.generation_config).update(FOLLOWED | {name: fields.pop(name) for name in settled} | {"num_beams": 1})
    assert not_followed(model.generation_config) == {}
    vars(model.generation_config).update(fields)
    assert not_followed(model.generation_config) == {name: value for name, value in fields.items() if value}


def test_sampling_names_the_settings_that_a_model_samples_with(model: PreTrainedModel):
    wished = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    vars(model.generation_config).update(wished)
    assert sampling(model.generation_config) == {}
    model.generation_config.do_sample = True
    assert sampling(model.generation_config) == wished


# Random numbers: test_histories.py compares what they choose with what transformers does


def test_answers_when_sampled_then_leave_the_numbers_of_the_process_alone(model: PreTrainedModel):
    chat = chat_of(model, documents=())

    def answer(seed: int | None) -> list[int]:
        torch.manual_seed(5)  # an answer that read these numbers would be the same each time
        before = torch.get_rng_state()
        chat.settings = replace(SAMPLED, seed=seed)
        token_ids = said(chat, "Who?")
        chat.undo()
        assert torch.equal(torch.get_rng_state(), before)
        return token_ids

    answers = [answer(seed) for seed in (3, None, None, 3, 4, None)]
    assert answers[0] == answers[3]
    assert len(set(map(tuple, answers))) == 5


def test_answers_when_sampled_together_then_have_numbers_of_their_own(model: PreTrainedModel):
    answers = chat_of(model, settings=SAMPLED).ask_all(["Who?"] * 3, at_once=3)
    assert len({tuple(answer.token_ids) for answer in answers}) == 3


@pytest.mark.default("values")
@pytest.mark.parametrize("penalty", [None, 1e-10, 1e10])
@pytest.mark.parametrize("temperature", [1e-10, 1e10])
def test_answer_when_temperature_is_extreme_then_is_likeliest_or_any(
    temperature: float, penalty: float | None, model: PreTrainedModel
):
    greedy = AnswerSettings(max_new_tokens=12, repetition_penalty=penalty)
    likeliest = said(chat_of(model, settings=greedy), "Who?")
    settings = replace(greedy, temperature=temperature, top_p=0.999, top_k=90, seed=1)
    answer = said(chat_of(model, settings=settings), "Who?")
    assert penalty is not None or (answer == likeliest) == (temperature < 1)
