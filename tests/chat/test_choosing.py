"""The choice of tokens: nothing of a model's generation config acts unseen, and each answer has its own numbers."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CompileConfig, GenerationConfig, PreTrainedModel

from hf_hybrid_cache.chat import AnswerSettings, not_followed
from hf_hybrid_cache.chat.choosing import Sampling

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
NOT_FOLLOWED: dict[str, Any] = {
    "assistant_confidence_threshold": 0.9,
    "assistant_early_exit": 1,
    "assistant_ensemble_weight": 0.5,
    "assistant_lookbehind": 3,
    "cache_config": {"backend": "quanto"},
    "cache_implementation": "static",
    "compile_config": CompileConfig(),
    "constraints": [[4]],
    "decoder_start_token_id": 7,
    "disable_compile": True,
    "diversity_penalty": 0.5,
    "do_sample": True,
    "dola_layers": "high",
    "early_stopping": True,
    "encoder_no_repeat_ngram_size": 1,
    "encoder_repetition_penalty": 5.0,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "exponential_decay_length_penalty": [1, 3.0],
    "force_words_ids": [[4]],
    "forced_bos_token_id": 4,
    "forced_eos_token_id": 4,
    "guidance_scale": 3.0,
    "is_assistant": True,
    "length_penalty": 2.0,
    "low_memory": True,
    "max_cache_len": 64,
    "max_length": 3,
    "max_matching_ngram_size": 2,
    "max_new_tokens": 2,
    "max_time": 1e-9,
    "min_length": 10_000,
    "min_new_tokens": 10_000,
    "min_p": 0.5,
    "no_repeat_ngram_size": 1,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "num_beam_groups": 2,
    "num_beams": 4,
    "num_return_sequences": 2,
    "output_attentions": True,
    "output_hidden_states": True,
    "output_logits": True,
    "output_scores": True,
    "penalty_alpha": 0.6,
    "prefill_chunk_size": 2,
    "prompt_lookup_num_tokens": 3,
    "remove_invalid_values": True,
    "renormalize_logits": True,
    "repetition_penalty": 9.0,
    "return_dict_in_generate": True,
    "speculation_type": "dflash",
    "stop_strings": ["e"],
    "target_lookbehind": 3,
    "temperature": 9.0,
    "token_healing": True,
    "top_h": 0.1,
    "top_k": 3,
    "top_p": 0.1,
    "typical_p": 0.1,
    "use_cache": False,
    "use_mtp": True,
    "watermarking_config": {"bias": 20.0},
}
# It is not passed on, and transformers warns of any value.
DEPRECATED = {"continuous_batching_config"}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[PreTrainedModel]:
    """Return a model whose generation config a test may change."""
    shared = model_of()
    monkeypatch.setattr(shared, "generation_config", GenerationConfig())
    return shared


# A model's generation config


def test_every_field_of_transformers_generation_config_is_named():
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}
    assert fields - DEPRECATED == fields & (FOLLOWED.keys() | NOT_FOLLOWED.keys())
    assert not FOLLOWED.keys() & NOT_FOLLOWED.keys()


@pytest.mark.parametrize("form", [{"cache": "stock"}, {}, {"bits": 8}, {"store": True}], ids=str)
def test_answer_when_the_model_sets_what_is_not_followed_then_is_the_same(
    form: dict[str, Any], model: PreTrainedModel, tmp_path: Path
):
    form = form | {"store": tmp_path} if "store" in form else form
    chat = chat_of(model, **form)
    expected = [said(chat, question) for question in QUESTIONS]
    together = [answer.token_ids for answer in chat.ask_all(QUESTIONS)]
    vars(model.generation_config).update(NOT_FOLLOWED)
    chat = chat_of(model, **form)
    assert [said(chat, question) for question in QUESTIONS] == expected
    assert [answer.token_ids for answer in chat.ask_all(QUESTIONS)] == together


@pytest.mark.parametrize("name", sorted(FOLLOWED.keys() - {"bos_token_id", "pad_token_id"}))
def test_answer_when_the_model_names_tokens_then_follows(name: str, model: PreTrainedModel):
    plain = said(chat_of(model), QUESTIONS[0])
    setattr(model.generation_config, name, FOLLOWED[name])
    chat = chat_of(model)
    answer = said(chat, QUESTIONS[0])
    assert answer != plain
    assert answer == generated(model, chat.token_ids[: -len(answer)])


def test_not_followed_names_what_a_model_sets_beside_settings_of_answers(model: PreTrainedModel):
    settled = {"temperature", "top_p", "top_k", "repetition_penalty", "max_length", "max_new_tokens", "do_sample"}
    settled |= {"use_cache", "cache_implementation"}
    vars(model.generation_config).update(FOLLOWED | {name: NOT_FOLLOWED[name] for name in settled} | {"num_beams": 1})
    assert not_followed(model.generation_config) == {}
    vars(model.generation_config).update(NOT_FOLLOWED)
    rest = {name: value for name, value in NOT_FOLLOWED.items() if name not in settled}
    assert not_followed(model.generation_config) == {
        name: value for name, value in rest.items() if name in vars(GenerationConfig())
    }


# Random numbers


@pytest.mark.parametrize(
    "settings",
    [
        AnswerSettings(temperature=1.0),
        AnswerSettings(temperature=0.6, top_k=5),
        AnswerSettings(temperature=2.0, top_p=0.7),
    ],
    ids=str,
)
def test_tokens_when_sampled_then_are_as_frequent_as_their_probabilities(settings: AnswerSettings):
    logits = torch.randn(2, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    probabilities = (logits / settings.temperature).softmax(dim=-1)
    for row in probabilities:
        likely = row.sort(descending=True)
        kept = settings.top_k or 10
        if settings.top_p is not None:
            kept = 1 + int((likely.values.cumsum(0) < settings.top_p).sum())
        row[likely.indices[kept:]] = 0
    sampling = Sampling(replace(settings, seed=1), 2, torch.device("cpu"))
    ids, draws = torch.zeros(2, 1, dtype=torch.long), 2000
    counts = torch.zeros(2, 10)
    for _ in range(draws):
        chosen = sampling(ids, logits.float())
        counts += chosen == 0
        assert chosen.isinf().sum(dim=-1).tolist() == [9, 9]
    for seen, expected in zip(counts, probabilities, strict=True):
        possible = expected > 0
        assert not seen[~possible].any()
        wanted = (expected / expected.sum() * draws)[possible]
        chi_square, freedom = float(((seen[possible] - wanted) ** 2 / wanted).sum()), len(wanted) - 1
        assert chi_square < freedom + 4 * (2 * freedom) ** 0.5  # its mean, and four times its deviation


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
    chat = chat_of(model, settings=SAMPLED)
    same = ["Who?"] * 3
    assert len({tuple(answer.token_ids) for answer in chat.ask_all(same, at_once=3)}) == 3
    chat.settings = replace(SAMPLED, seed=3)
    alone = [answer.token_ids for answer in chat.ask_all(QUESTIONS, at_once=1)]
    together = list(chat.ask_all(QUESTIONS, at_once=3))
    assert [answer.together for answer in together] == [3, 3, 3]
    assert [answer.token_ids for answer in together] == alone


@pytest.mark.parametrize("penalty", [None, 1e-10, 1e10])
@pytest.mark.parametrize("temperature", [1e-10, 1e10])
def test_answer_when_temperature_is_extreme_then_is_likeliest_or_any(
    temperature: float, penalty: float | None, model: PreTrainedModel
):
    model.generation_config.suppress_tokens = PRINTABLE[::2]
    greedy = AnswerSettings(max_new_tokens=12, repetition_penalty=penalty)
    likeliest = said(chat_of(model, settings=greedy), "Who?")
    settings = replace(greedy, temperature=temperature, top_p=0.999, top_k=90, seed=1)
    answer = said(chat_of(model, settings=settings), "Who?")
    assert penalty is not None or (answer == likeliest) == (temperature < 1)
    assert not set(answer) & set(PRINTABLE[::2])
