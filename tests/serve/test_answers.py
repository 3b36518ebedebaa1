"""Several answers to one request, and the log-probabilities of their tokens, as OpenAI's client gets them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from numpy.testing import assert_allclose
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_hybrid_cache import PrefixStore
from hf_hybrid_cache.chat import AnswerSettings
from serve.engines import Asking
from serve.running import DOCUMENT, NEW_TOKENS, Running, cached, loaded, serving, user

from chat import talks
from chat.thoughts import tokenizer_of
from models.byte_tokenizer import byte_tokenizer, model_for, model_in

# Of the tokens that are bytes.
NAMES = bytes_to_unicode()
# What the model's generation config lets never come: the other special tokens.
NEVER = [0, 1]
ASKED = [user(f"{DOCUMENT}\n\nWho signed it?")]
SAMPLED: dict[str, Any] = {"temperature": 1.2, "top_p": 0.98, "seed": 2**64 - 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Its tokens are bytes, but for the last one, which llguidance does not have; answers are not text of UTF-8."""
    tokenizer = byte_tokenizer(without=NAMES[255])
    folder = model_in(tmp_path_factory.mktemp("model"), 2**13, tokenizer, eos_token_id=2, suppress_tokens=NEVER)
    with serving(folder) as running:
        yield running


def joined(server: Running, messages: Any, **options: Any) -> dict[int, dict[str, Any]]:
    """Return the text, the tokens and the finish reason of each answer of a stream."""
    answers: dict[int, dict[str, Any]] = {}
    for chunk in server.ask(messages, stream=True, **options):
        for choice in chunk.choices:
            answer = answers.setdefault(choice.index, {"text": "", "tokens": [], "reason": None})
            assert answer["reason"] is None  # nothing comes after the end
            answer["text"] += choice.delta.content or ""
            answer["tokens"] += choice.logprobs.content if choice.logprobs else []
            answer["reason"] = choice.finish_reason
    return answers


def test_each_of_n_answers_is_that_of_a_request_with_its_own_seed(server: Running):
    """Each ends where it ends, though others go on."""
    options = SAMPLED | {"temperature": 1.9, "max_tokens": 300}
    together = server.ask(ASKED, n=8, **options)
    alone = [server.ask(ASKED, **options | {"seed": (SAMPLED["seed"] + i) % 2**64}) for i in range(8)]
    said = [(choice.message.content, choice.finish_reason) for choice in together.choices]
    assert said == [(each.choices[0].message.content, each.choices[0].finish_reason) for each in alone]
    assert [choice.index for choice in together.choices] == [*range(8)]
    assert together.usage.completion_tokens == sum(each.usage.completion_tokens for each in alone)
    assert len({text for text, _ in said}) == 8
    assert {reason for _, reason in said} == {"stop", "length"}
    for stop in ("no such text", said[0][0][3:5]):
        streamed = joined(server, ASKED, n=8, **options, stop=stop)
        for number, (text, reason) in enumerate(said):
            expected = (text.partition(stop)[0], "stop" if stop in text else reason)
            assert (streamed[number]["text"], streamed[number]["reason"]) == expected


def test_the_prompt_stays_in_memory_after_several_answers(server: Running):
    asked = [user(f"{DOCUMENT}\n\nWhere was it signed?")]
    server.ask(asked, n=8, temperature=1.0)
    prompt, known = cached(server.ask(asked, n=2))
    assert known == prompt - 1


@pytest.mark.parametrize("options", [{}, SAMPLED | {"n": 3, "frequency_penalty": 1.5}], ids=["one", "three"])
def test_logprobs_are_those_of_the_model_before_temperature_and_penalties(server: Running, options: dict[str, Any]):
    model, tokenizer = loaded(server.model)
    model, options = model.double(), options | {"logprobs": True, "top_logprobs": 20}
    prompt = talks.prompt_tokens(((each["role"], each["content"]) for each in ASKED), tokenizer)
    for choice in server.ask(ASKED, extra_body={"repetition_penalty": 1.3}, **options).choices:
        told = choice.logprobs.content
        said = bytes(byte for each in told for byte in each.bytes)
        assert said.decode(errors="replace") == choice.message.content
        assert len(told) == NEW_TOKENS or choice.finish_reason == "stop"
        token_ids = tokenizer.convert_tokens_to_ids([NAMES[byte] for byte in said])
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *token_ids]])).logits[0, len(prompt) - 1 : -1]
        logits[:, NEVER] = -torch.inf
        expected = logits.log_softmax(-1)
        assert_allclose(
            [each.logprob for each in told],
            expected[torch.arange(len(told)), torch.tensor(token_ids)],
            atol=1e-4,
        )
        top = [[one.logprob for one in each.top_logprobs] for each in told]
        assert_allclose(top, expected.topk(20).values, atol=1e-4)


def test_a_stream_tells_the_tokens_of_a_whole_answer_with_their_text(server: Running):
    options: dict[str, Any] = {
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 60,
        "n": 2,
        "temperature": 1.2,
        "seed": 5,
    }
    free = server.ask(ASKED, **options).choices[0].message.content
    for stop in ([], [free[20:22]], ["no such text"]):
        whole = server.ask(ASKED, **options, stop=stop)
        streamed = joined(server, ASKED, **options, stop=stop)
        for choice in whole.choices:
            assert streamed[choice.index]["tokens"] == choice.logprobs.content
            told = bytes(byte for each in choice.logprobs.content for byte in each.bytes)
            assert told.decode(errors="replace") == choice.message.content
            assert all(
                each.token == bytes(each.bytes).decode(errors="backslashreplace") for each in choice.logprobs.content
            )


def test_logprobs_are_the_same_with_drafts_and_without(server: Running):
    repeating: dict[str, Any] = {"max_tokens": 60, "frequency_penalty": -2, "presence_penalty": -2}
    asked = [user("It was signed by Ada in London. " * 20)]
    with_drafts, without = (
        server.ask(asked, **repeating, logprobs=True, top_logprobs=3, extra_body={"drafts": drafts})
        for drafts in (15, 0)
    )
    drafted, plain = (each.usage.completion_tokens_details for each in (with_drafts, without))
    assert 0 < drafted.accepted_prediction_tokens < 60 == with_drafts.usage.completion_tokens
    assert plain.accepted_prediction_tokens + plain.rejected_prediction_tokens == 0
    assert with_drafts.choices[0].logprobs == without.choices[0].logprobs


def test_completions_tell_tokens_in_lists_of_their_own(server: Running):
    answer = server.ask(DOCUMENT, logprobs=2, n=2, temperature=1.0, seed=3)
    chunks = [each.choices[0] for each in server.ask(DOCUMENT, logprobs=2, n=2, temperature=1.0, seed=3, stream=True)]
    for choice in answer.choices:
        told = choice.logprobs
        for before, token, offset in zip(["", *told.tokens], told.tokens, told.text_offset, strict=False):
            if len(before) < 2 > len(token):  # no part of a character
                assert choice.text[offset] == token
        for token, logprob, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
            assert len(top) in (2, 3)
            assert top[token] == logprob
        streamed = [each.logprobs for each in chunks if each.index == choice.index and each.logprobs]
        assert [token for each in streamed for token in each.tokens] == told.tokens
        assert [offset for each in streamed for offset in each.text_offset] == told.text_offset
    assert server.ask(DOCUMENT, logprobs=0).choices[0].logprobs.top_logprobs
    assert server.ask(DOCUMENT).choices[0].logprobs is None


def test_each_answer_has_a_thought_whose_tokens_are_not_told(tmp_path: Path):
    folder = model_in(tmp_path / "model", 2**12, tokenizer_of("R1"), eos_token_id=None)
    with serving(folder, "--max-thinking-tokens", "200") as server:
        options: dict[str, Any] = {"n": 8, "logprobs": True, "temperature": 1.9, "seed": 3}
        choices, streamed = server.ask(ASKED, **options).choices, joined(server, ASKED, **options)
        assert len({len(choice.message.reasoning_content) for choice in choices}) > 1
        for choice in choices:
            assert streamed[choice.index]["text"] == choice.message.content
            assert len(choice.logprobs.content) <= NEW_TOKENS
            told = bytes(byte for each in choice.logprobs.content for byte in each.bytes)
            assert told.decode(errors="replace") == choice.message.content
            assert streamed[choice.index]["tokens"] == choice.logprobs.content


def test_answers_of_recurrent_models_are_those_that_are_given_alone(tmp_path: Path):
    tokenizer = byte_tokenizer()
    asking = Asking(model_for(tokenizer, 2048, "qwen3_next"), tokenizer, PrefixStore(tmp_path))

    def answers(seed: int, count: int) -> list[list[int]]:
        settings = AnswerSettings(max_new_tokens=8, temperature=1.2, seed=seed)
        _, end, _ = asking.answer(DOCUMENT[:300], settings, number=count)
        return [answer.token_ids for answer in end.answers]

    assert answers(3, 4) == [answers(3 + number, 1)[0] for number in range(4)]


@pytest.mark.parametrize(
    "options", [{"n": 9}, {"n": 0}, {"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21}], ids=str
)
def test_numbers_of_answers_and_tokens_out_of_range_are_refused(server: Running, options: dict[str, Any]):
    with pytest.raises(openai.BadRequestError, match="|".join(options)):
        server.ask(ASKED, **options)
