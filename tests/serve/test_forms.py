"""The server holds answers to the form that OpenAI's client asks for."""

import json
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from serve.running import DOCUMENT, Running, cached, user

ASKED = [user(f"{DOCUMENT}\n\nWho signed it?")]


class Place(BaseModel):
    town: str = Field(max_length=3)


class Signed(BaseModel):
    by: str = Field(max_length=3)
    day: Literal["Monday", "Tuesday"]
    place: Place | None


def of_schema(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema} | more}


def test_the_client_parses_an_answer_as_a_class_of_pydantic(server: Running):
    given: Any = {"model": server.model, "messages": ASKED, "response_format": Signed}
    for settings in {}, {"temperature": 1.5, "seed": 3}:
        choice = server.client.chat.completions.parse(**given, **settings, max_tokens=200).choices[0]
        assert (choice.finish_reason, type(choice.message.parsed)) == ("stop", Signed)
    with pytest.raises(openai.LengthFinishReasonError):
        server.client.chat.completions.parse(**given, max_tokens=5)


@pytest.mark.parametrize("strict", [{}, {"strict": True}, {"strict": False, "description": "of it"}], ids=str)
def test_an_answer_in_pieces_has_the_schema(strict: dict[str, Any], server: Running):
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}
    stream = server.ask(ASKED, response_format=of_schema(schema, **strict), stream=True, max_tokens=40)
    chunks = list(stream)
    jsonschema.validate(json.loads("".join(each.choices[0].delta.content or "" for each in chunks)), schema)
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_an_answer_is_an_object_or_any_text(server: Running):
    begun = server.ask(ASKED, response_format={"type": "json_object"}).choices[0]
    assert begun.message.content.startswith("{")
    free, text = (server.ask(ASKED, **more).choices[0] for more in ({}, {"response_format": {"type": "text"}}))
    assert free.message.content == text.message.content


def test_a_schema_that_cannot_be_held_is_refused_before_reading(server: Running):
    asked = [user(DOCUMENT.replace("Ada", "Eve"))]
    for response_format, message in (
        (of_schema({"not": {"type": "string"}}), 'Unimplemented keys: ["not"]'),
        (of_schema({"type": "strin"}), "Invalid type: strin"),
        ({"type": "json_schema"}, "json_schema goes with type 'json_schema'"),
        ({"type": "grammar"}, "'response_format.type' is wrong"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            server.ask(asked, response_format=response_format)
        assert message in str(refused.value)
        assert str(refused.value.param).startswith("response_format")
    assert cached(server.ask(asked))[1] < 128
