"""OpenAI's client gets from `/v1/responses` the answers of chat completions."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from serve.running import DOCUMENT, NEW_TOKENS, Running, serving, user

from chat.calls import called, function
from chat.calls import tokenizer_of as calls_of
from chat.thoughts import tokenizer_of
from models.byte_tokenizer import model_in

QUESTION = f"{DOCUMENT}\n\nWho signed it?"


class Signed(BaseModel):
    year: int


def respond(server: Running, given: Any, **options: Any) -> Any:
    options = {"max_output_tokens": NEW_TOKENS} | options
    return server.client.responses.create(model=server.model, input=given, **options)


def test_a_response_is_the_answer_of_a_chat(server: Running):
    asked = [{"role": "system", "content": "Be short."}, user(QUESTION)]
    chat = server.ask(asked)
    for given in (
        QUESTION,
        [user(QUESTION)],
        [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}],
    ):
        response = respond(server, given, instructions="Be short.", store=True, include=[], tools=[])
        assert response.output_text == chat.choices[0].message.content
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.usage.input_tokens == chat.usage.prompt_tokens
        assert response.usage.output_tokens == NEW_TOKENS
    later = respond(server, [user(QUESTION), *response.output, user("Why?")], instructions="Be short.")
    said = {"role": "assistant", "content": response.output_text}
    assert later.output_text == server.ask([*asked, said, user("Why?")]).choices[0].message.content
    assert later.usage.input_tokens_details.cached_tokens >= response.usage.input_tokens - 1


def test_a_streamed_response_is_the_whole_one(server: Running):
    for format in ({"type": "text"}, {"type": "json_schema", "name": "A", "schema": {"enum": ["abc"]}, "strict": True}):
        options = {"text": {"format": format}}
        whole, events = respond(server, QUESTION, **options), [*respond(server, QUESTION, stream=True, **options)]
        assert [event.sequence_number for event in events] == [*range(len(events))]
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
        assert events[-1].type == f"response.{whole.status}"
        assert events[-1].response.output_text == whole.output_text
        with server.client.responses.stream(
            model=server.model, input=QUESTION, **options, max_output_tokens=12
        ) as stream:
            assert [event.type for event in stream] == [event.type for event in events]  # parts add up
    assert (whole.output_text, whole.status) == ('"abc"', "completed")


def test_logprobs_of_a_response_are_those_of_a_chat(server: Running):
    options: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    [choice] = server.ask([user(QUESTION)], logprobs=True, top_logprobs=3).choices
    told = [each.model_dump() for each in choice.logprobs.content]
    [item] = respond(server, QUESTION, **options).output
    assert [each.model_dump() for each in item.content[0].logprobs] == told
    events = [*respond(server, QUESTION, stream=True, **options)]
    streamed = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    assert [each.logprob for each in streamed] == [each["logprob"] for each in told]
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert [each.token for each in done.logprobs] == [each["token"] for each in told]
    [item] = respond(server, QUESTION, include=["reasoning.encrypted_content"]).output
    assert item.content[0].logprobs == []


def test_a_response_is_parsed_as_a_class_of_pydantic(server: Running):
    parsed = server.client.responses.parse(model=server.model, input=QUESTION, text_format=Signed, max_output_tokens=99)
    assert isinstance(parsed.output_parsed, Signed)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"given": [{"type": "function_call_output", "call_id": "1"}]}, "input.0"),
        ({"given": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "[]"}]}, "input.0"),
        ({"given": [user("a"), {"role": "user", "content": "b", "weight": 1}]}, "input.1.weight"),
        ({"given": [user("a"), {"role": "user", "content": [{"type": "input_image"}]}]}, "input.1.content.0.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ],
    ids=str,
)
def test_what_a_response_cannot_do_is_refused_by_its_name(server: Running, fields: dict[str, Any], name: str):
    with pytest.raises(openai.BadRequestError) as refused:
        respond(server, **{"given": "Who?"} | fields)
    assert str(refused.value.param).startswith(name)


@pytest.mark.parametrize("name", ["Hermes", "Llama"])
def test_a_call_is_an_item_of_a_response_and_its_result_goes_back_in(name: str, tmp_path: Path):
    weather = function("get_weather", city={"enum": ["Turin", "Rome"]})["function"]
    tools, asked = [{"type": "function", **weather}, {"type": "web_search"}], user(f"{DOCUMENT}\n\nHow is it there?")
    folder = model_in(tmp_path / "model", 2**13, calls_of(name), eos_token_id=2)
    with serving(folder, "--lenient") as server:
        options = {"tools": tools, "instructions": "Be short.", "parallel_tool_calls": False, "max_output_tokens": 99}
        response = respond(server, [asked], **options, tool_choice={"type": "function", "name": "get_weather"})
        [call] = response.output
        assert (call.type, call.name, response.status) == ("function_call", "get_weather", "completed")
        assert json.loads(call.arguments)["city"] in ("Turin", "Rome")
        forced = {"model": server.model, "input": [asked], **options, "tool_choice": "required"}
        with server.client.responses.stream(**forced) as stream:
            events = [event.type for event in stream]
            assert stream.get_final_response().output[0].arguments == call.arguments
        assert events[2:-1] == [
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
        ]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
        later = respond(server, [asked, *response.output, result], **options, tool_choice="none")
        said = server.ask(
            [
                {"role": "system", "content": "Be short."},
                asked,
                {"role": "assistant", "tool_calls": [called(call.call_id, call.name, json.loads(call.arguments))]},
                {"role": "tool", "tool_call_id": call.call_id, "content": "It rains."},
            ],
            tools=[{"type": "function", "function": weather}],
            tool_choice="none",
            max_tokens=99,
        )
        assert later.output_text == said.choices[0].message.content
        assert later.usage.input_tokens_details.cached_tokens > 100
        with pytest.raises(openai.BadRequestError, match="'nothing'"):
            respond(server, [asked, result | {"call_id": "nothing"}], **options)


def test_a_thought_is_an_item_before_the_answer(tmp_path: Path):
    folder = model_in(tmp_path / "model", 2**12, tokenizer_of("R1, of many tokens"), eos_token_id=None)
    with serving(folder, "--max-thinking-tokens", "40") as server:
        response = respond(server, QUESTION)
        chat = server.ask([user(QUESTION)])
        thought, message = response.output
        assert (thought.type, thought.content[0].text) == ("reasoning", chat.choices[0].message.reasoning_content)
        assert message.content[0].text == chat.choices[0].message.content
        details = chat.usage.completion_tokens_details
        assert response.usage.output_tokens_details.reasoning_tokens == details.reasoning_tokens
        events = [*respond(server, QUESTION, stream=True)]
        text = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
        assert text == thought.content[0].text
        assert respond(server, [user(QUESTION), *response.output, user("Why?")]).status == "incomplete"
        assert len(respond(server, QUESTION, reasoning={"effort": "none"}).output) == 1
