"""The server passes functions to the chat template, reads calls in answers, and forces them where it is asked to."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from hf_hybrid_cache import PrefixStore
from hf_hybrid_cache.chat import AnswerSettings, Call, Conversation, Message
from serve.engines import Asking
from serve.running import DOCUMENT, Running, cached, serving, user

from chat.calls import FORMS, called, function, tokenizer_of
from chat.talks import writing
from models.byte_tokenizer import model_for, model_in

WEATHER = function(
    "get_weather", city={"type": "string", "maxLength": 3}, days={"type": "integer", "minimum": 0, "maximum": 9}
)
SEARCH = function("search", text={"enum": ["a", "b"]})
ASKED = [user(f"{DOCUMENT}\n\nHow is the weather there?")]
SETTINGS = AnswerSettings(max_new_tokens=250, max_thinking_tokens=10)


@functools.cache
def model_of(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A random model, and a tokenizer with a form of calls."""
    tokenizer = tokenizer_of(name)
    model = model_for(tokenizer, 2**13)
    ends = [tokenizer.convert_tokens_to_ids(each) for each in ("<|im_end|>", "<|call|>") if each in tokenizer.vocab]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=0)
    return model, tokenizer


def asking_of(name: str, folder: Path) -> Asking:
    """Make an engine with a form of calls."""
    return Asking(*model_of(name), PrefixStore(folder))


def prompt_of(asked: Conversation, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the prompt as the tokenizer itself makes it."""
    given = [{"role": each.role, "content": each.content, **each.more} for each in asked.messages]
    options: dict[str, Any] = {"add_generation_prompt": True, "return_dict": False}
    return list(tokenizer.apply_chat_template(given, tools=[*asked.functions], **options))


def in_turn(call: Call, result: str) -> tuple[Message, ...]:
    """Return the messages of a call and its result."""
    given = called(call.id, call.name, json.loads(call.arguments))
    answer = Message("assistant", "", "", {"tool_calls": [given]})
    return answer, Message("tool", result, "", {"tool_call_id": call.id, "name": call.name})


@pytest.mark.parametrize("name", FORMS)
def test_a_call_is_forced_and_its_result_goes_back_in(name: str, tmp_path: Path):
    asking = asking_of(name, tmp_path)
    asked = Conversation(
        (Message("user", ASKED[0]["content"]),), (WEATHER, SEARCH), choice="required", is_parallel=False
    )
    text, end, [call] = asking.answer(asked, SETTINGS)
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in asked.functions}
    jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    before = prompt_of(asked, asking.tokenizer)
    assert (text, end.answers[0].finish_reason, end.answers[0].prompt_tokens) == ("", "tool_calls", len(before))

    asked = asked._replace(messages=asked.messages + in_turn(call, "It rains."))
    text, end, calls = asking.answer(asked._replace(choice="none"), SETTINGS)
    assert (calls, end.answers[0].prompt_tokens) == ([], len(prompt_of(asked, asking.tokenizer)))
    assert end.answers[0].finish_reason in ("stop", "length")
    assert text
    # All but the call is the prompt of before.
    assert end.cached_tokens >= len(before) - 10

    _, _, [call] = asking.answer(asked._replace(choice="search"), SETTINGS)
    assert (call.name, json.loads(call.arguments)["text"] in ("a", "b")) == ("search", True)


@pytest.mark.parametrize("name", FORMS)
def test_what_a_model_writes_of_itself_is_text_thought_and_calls(name: str, tmp_path: Path):
    asking, form = asking_of(name, tmp_path), FORMS[name]
    asked = Conversation((Message("user", "Hi"),), (WEATHER, SEARCH))
    call = f"{form.begin}{form.name}search{form.arguments}{form.text('text', 'a')}{form.call}{form.end}"
    call = call.replace("{{ call.id }}", "a" * 9).replace("{{ loop.index0 }}", "0")
    thought = form.thought.replace("{{ m.thinking }}", "Hm.")
    before = "" if name == "Llama" else "I look."
    for text, expected, calls in (
        (f"{before}{call}", before, [("search", '{"text": "a"}')]),
        (f"{form.turn[1]}It is so.", "It is so.", []),
    ):
        with writing(asking.model, asking.tokenizer, thought + text):
            told, end, found = asking.answer(asked, SETTINGS)
        assert (told, [(each.name, each.arguments) for each in found]) == (expected, calls)
        assert end.answers[0].finish_reason == ("tool_calls" if calls else "stop")
        assert end.answers[0].thinking == ("Hm." if thought else "")


@pytest.mark.parametrize("name", ["Hermes", "Llama", "gpt-oss", "odd", "Qwen3-Coder", "GLM", "MiniMax"])
def test_strict_arguments_and_schemas_are_held_where_a_call_is_free(name: str, tmp_path: Path):
    asking, form = asking_of(name, tmp_path), FORMS[name]
    asked = Conversation((Message("user", "Hi"),), (WEATHER, SEARCH), strict=frozenset({"search"}))
    begun = f"{form.begin}{form.name}search{form.arguments}".replace("{{ call.id }}", "a" * 9)
    with writing(asking.model, asking.tokenizer, begun):
        _, end, [call] = asking.answer(asked, SETTINGS)
    assert (call.name, json.loads(call.arguments)["text"] in ("a", "b")) == ("search", True)
    assert end.answers[0].finish_reason in ("tool_calls", "length")  # text may follow

    settings = AnswerSettings(max_new_tokens=100, schema={"enum": ["yes", "no"]})
    with writing(asking.model, asking.tokenizer, form.turn[1] + '"'):
        text, _, calls = asking.answer(asked, settings)
    assert (json.loads(text) in ("yes", "no"), calls) == (True, [])


@pytest.fixture(scope="module", params=["Hermes", "Qwen3-Coder"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    tokenizer = tokenizer_of(request.param)
    with serving(model_in(tmp_path_factory.mktemp("model"), 2**13, tokenizer, eos_token_id=2)) as running:
        yield running


def test_the_client_of_openai_calls_and_tells_the_result(server: Running):
    given: dict[str, Any] = {"tools": [WEATHER, SEARCH], "tool_choice": "required", "parallel_tool_calls": False}
    whole = server.ask(ASKED, **given, max_tokens=200)
    message = whole.choices[0].message
    [call] = message.tool_calls
    assert (message.content, whole.choices[0].finish_reason) == (None, "tool_calls")

    asked: Any = {"model": server.model, "messages": ASKED, "max_tokens": 200} | given
    with server.client.chat.completions.stream(**asked) as stream:
        choice = stream.get_final_completion().choices[0]
    [told] = choice.message.tool_calls or []
    assert (told.function.name, told.function.arguments) == (call.function.name, call.function.arguments)
    assert (choice.finish_reason, told.id != call.id) == ("tool_calls", True)

    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
    talk = [*ASKED, message.model_dump(), result]
    last = server.ask(talk, **given | {"tool_choice": "none"})
    assert last.choices[0].finish_reason in ("stop", "length")
    assert not last.choices[0].message.tool_calls
    assert cached(last)[1] >= cached(whole)[0]

    cut = server.ask(ASKED, **given, max_tokens=5)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 5)
    named = {"type": "function", "function": {"name": "search"}}
    [call] = server.ask(talk, **given | {"tool_choice": named}, max_tokens=200).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)["text"] in ("a", "b")) == ("search", True)


def test_calls_that_cannot_be_are_refused(server: Running):
    result = {"role": "tool", "tool_call_id": "x", "content": "Rain."}
    wrong = {"role": "assistant", "tool_calls": [called("x", "search", "[1]")]}
    for messages, more, message in (
        (ASKED, {"tool_choice": "required"}, "tool_choice asks for a function that tools does not have"),
        (ASKED, {"tools": [SEARCH, SEARCH]}, "two functions of one name"),
        (ASKED, {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "'tools.0' is not supported"),
        (ASKED, {"tools": [function("a b")]}, "'tools.0.function.name' is wrong"),
        ([*ASKED, result], {}, "no call before has the id 'x' of a result"),
        ([*ASKED, result | {"role": "user"}], {}, "tool_call_id goes with role 'tool'"),
        ([*ASKED, wrong], {}, "arguments must be an object, as JSON"),
        (
            ASKED,
            {"tools": [function("x", y={"not": {}})], "tool_choice": "required"},
            "tools has 'x', whose schema is not supported as it is",
        ),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            server.ask(messages, **more)
        assert message in str(refused.value)
