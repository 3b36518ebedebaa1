"""Requests and answers as OpenAI's API has them (https://platform.openai.com/docs/api-reference)."""

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from operator import getitem
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, from_json

from ..chat import Answer, AnswerSettings, Call, Conversation, Message, SettingError, Thought, arguments_text
from ..chat.forms import FORMS
from ..chat.settings import LEAST_TEMPERATURE, SWITCHES
from ..errors import HybridCacheError
from .logprobs import Piece, Told, chat_form, text_form

_Kind = TypeVar("_Kind", bound=BaseModel)
MOST_MESSAGES, MOST_TOOLS = 2**14, 128
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
_RETRY_SECONDS = 5
_MOST_ANSWERS, _MOST_LOGPROBS, _MOST_STOPS = 8, 20, 64
# Fields that are taken with their neutral value alone.
_NEUTRAL = {
    "best_of",
    "echo",
    "logit_bias",
    "suffix",
}


class APIError(HybridCacheError, RuntimeError):
    """
    An error that a client is told.

    Args:
        status: of HTTP.
        message: a sentence.
        code: a name of the error, or `None`.
        parameter: of the request that is wrong, or `None`.
    """

    def __init__(self, status: int, message: str, code: str | None = None, parameter: str | None = None):
        super().__init__(message)
        self.status, self.code, self.parameter = status, code, parameter
        self.headers = {"Retry-After": str(_RETRY_SECONDS)} if status in (429, 503) else {}

    def body(self) -> dict[str, Any]:
        """Return the error as JSON."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.parameter, "code": self.code}}


class Strict(BaseModel):
    """Refuses fields that it does not have; `null` is as good as nothing."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: each for name, each in given.items() if each is not None} if isinstance(given, dict) else given


class Part(Strict):
    """A part of a message's text."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


def _in_parts(given: Any) -> Any:
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


# A text, or a list of parts of one.
Parts = Annotated[list[Part], BeforeValidator(_in_parts)]


class Named(Strict):
    """The name of a function."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class Called(Named):
    """A call of a function."""

    arguments: dict[str, Any]

    @field_validator("arguments", mode="before")
    @classmethod
    def _of_json(cls, given: Any) -> Any:
        if not (text := arguments_text(given)):
            raise ValueError("arguments must be an object, as JSON")
        return json.loads(text)


class Function(Named):
    """A function that an answer may call."""

    # Chat templates expect these two, too.
    description: str = ""
    parameters: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    strict: bool = False


class _Of(Strict, Generic[_Kind]):
    type: Literal["function"] = "function"
    function: _Kind


class ToolCall(_Of[Called]):
    """A call in a message."""

    id: str
    index: int | None = None


class ChatMessage(Strict):
    """A message of a request."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Parts = []
    reasoning_content: str = ""
    name: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _with_content(self) -> "ChatMessage":
        if not self.content and self.role not in ("assistant", "tool"):
            raise ValueError("only an assistant's or a tool's message may have no content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant's message has tool_calls")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id goes with role 'tool', and with no other")
        return self


class _Schema(Strict):
    name: str = ""
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool = False


class Format(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type 'json_schema', and with no other")
        return self

    @property
    def of_answer(self) -> dict[str, Any] | None:
        """The schema that the answer has, strict or not; `None` for any text."""
        if self.json_schema is not None:
            return self.json_schema.json_schema
        return {"type": "object"} if self.type == "json_object" else None


class _StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Request(Strict):
    """The fields that all requests have. A field that says what is always so is taken with that value alone."""

    model: str = ""
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = Field(
        None, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    stop: tuple[str, ...] = Field(default=(), max_length=_MOST_STOPS)
    drafts: int | None = None
    response_format: Format = Format(type="text")
    n: Annotated[int, Field(ge=1, le=_MOST_ANSWERS)] = 1
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] = {}
    store: bool = False
    # Of the client's own books, of queues and caches: no answer is another one.
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prediction: Any = None
    cache_prompt: bool | None = None
    id_slot: int | None = None
    keep_alive: float | str | None = None
    priority: int | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _as_tuple(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str) else given

    @field_validator("temperature")
    @classmethod
    def _at_least(cls, given: float | None) -> float | None:
        return 0.0 if given is not None and given < LEAST_TEMPERATURE else given

    @property
    def max_new_tokens(self) -> int | None:
        """The limit of the answer's tokens; `None` for the server's."""
        return self.max_tokens

    def settings(self, default: AnswerSettings) -> AnswerSettings:
        """
        Return the settings of the answer.

        Args:
            default: the server's, for what the request does not say.

        Raises:
            APIError: one is out of its range.
        """
        names = vars(default).keys() - {*FORMS}
        given = {name: value for name in names if (value := getattr(self, name, None)) not in (None, ())}
        if values := given.get("chat_template_kwargs"):
            given["chat_template_kwargs"] = {**(default.chat_template_kwargs or {}), **values}
        if not given.get("temperature", default.temperature):
            given |= dict.fromkeys(("top_p", "top_k", "min_p", "seed"))  # clients send these whether or not they sample
        try:
            return replace(default, **given, schema=self.response_format.of_answer)
        except SettingError as error:  # whose message begins with the name of the setting
            name = str(error).partition(" ")[0]
            where = "response_format" if name == "schema" else name
            raise APIError(400, str(error), "invalid_value", where) from error


class ChatRequest(Request):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    given_top_logprobs: Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)] = Field(0, validation_alias="top_logprobs")
    tools: Annotated[list[_Of[Function]], Field(max_length=MOST_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | _Of[Named] = "auto"
    parallel_tool_calls: bool = True
    max_thinking_tokens: int | None = None
    reasoning_effort: Effort | None = None
    template_values: dict[str, Any] = Field({}, validation_alias="chat_template_kwargs")

    @model_validator(mode="after")
    def _with_logprobs(self) -> Self:
        if self.given_top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs, which nothing asks for")
        return self

    @property
    def top_logprobs(self) -> int | None:
        """The likeliest tokens that are told at each token; `None` where not even that is."""
        return self.given_top_logprobs if self.logprobs else None

    @property
    def thinking(self) -> bool | None:
        """Whether the model thinks, by the names that clients have for it; `None` for the server's."""
        switches = [self.template_values[name] for name in SWITCHES if name in self.template_values]
        return False if self.reasoning_effort == "none" else next((bool(each) for each in switches), None)

    @property
    def chat_template_kwargs(self) -> dict[str, Any]:
        """The values of variables of the chat template."""
        effort = {} if self.reasoning_effort in (None, "none") else {"reasoning_effort": self.reasoning_effort}
        return effort | self.template_values

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @model_validator(mode="after")
    def _with_known_functions(self) -> Self:
        names, messages = [each.name for each in self.functions], self.said
        if len({*names}) < len(names):
            raise ValueError("tools has two functions of one name")
        if names and (self.n > 1 or self.logprobs):
            raise ValueError("tools goes with no n above 1, and without logprobs")
        if self.choice not in {"none", "auto", *names} and not (self.choice == "required" and names):
            raise ValueError("tool_choice asks for a function that tools does not have")
        called = {call.id for each in messages for call in each.tool_calls}
        if unknown := [each.tool_call_id for each in messages if each.tool_call_id not in {None, *called}]:
            raise ValueError(f"no call before has the id {unknown[0]!r} of a result")
        return self

    def without_tools(self, is_lenient: bool) -> list[str]:
        """Leave out what the chat template does not take, and return its name; raises `APIError` unless lenient."""
        if not is_lenient:
            message = "'tools' is not supported by the chat template: leave it out, or start the server with --lenient."
            raise APIError(400, message, "unsupported_parameter", "tools")
        self.tools, self.tool_choice = [], "auto"
        return ["tools"]

    @property
    def functions(self) -> list[Function]:
        """The functions that the answer may call."""
        return [each.function for each in self.tools]

    @property
    def choice(self) -> str:
        """The name of the function that it must call, or "required" for any; else "auto", or "none"."""
        return self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.function.name

    @property
    def said(self) -> list[ChatMessage]:
        """The messages."""
        return self.messages

    @property
    def prompt(self) -> Conversation:
        """The messages, and what may be called; what OpenAI calls developer is system in chat templates."""
        roles, messages, said = {"developer": "system"}, list[Message](), self.said
        names = {call.id: call.function.name for each in said for call in each.tool_calls}
        for each in said:
            more: dict[str, Any] = {}
            if each.tool_calls:
                more["tool_calls"] = [call.model_dump(exclude={"index"}) for call in each.tool_calls]
            if each.tool_call_id is not None:
                more = {"tool_call_id": each.tool_call_id, "name": names[each.tool_call_id]}
            content = "\n".join(part.text for part in each.content)
            messages.append(Message(roles.get(each.role, each.role), content, each.reasoning_content, more))
        functions = [each.model_dump(include={"name", "description", "parameters"}) for each in self.functions]
        tools = tuple({"type": "function", "function": each} for each in functions)
        strict = frozenset(each.name for each in self.functions if each.strict)
        return Conversation(tuple(messages), tools, self.choice, strict, self.parallel_tool_calls)


class TextRequest(Request):
    """`POST /v1/completions`."""

    prompt: str
    echo: Literal[False] = False
    best_of: Literal[1] = 1
    top_logprobs: Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)] | None = Field(None, validation_alias="logprobs")
    suffix: Annotated[str, Field(max_length=0)] = ""

    @field_validator("prompt", mode="before")
    @classmethod
    def _only(cls, given: Any) -> Any:
        return given[0] if isinstance(given, list) and len(given) == 1 else given  # as LangChain sends it


def parsed(
    kind: type[ChatRequest] | type[TextRequest], body: bytes, is_lenient: bool = False
) -> tuple[ChatRequest | TextRequest, list[str]]:
    """
    Return the request that a body of JSON is, and the fields that were left out of it.

    Args:
        kind: of the request.
        body: as it came.
        is_lenient: whether fields that are not supported are left out.

    Raises:
        APIError: it is no such request.
    """
    ignored: list[str] = []
    try:
        value = from_json(body)
    except ValueError as error:
        raise APIError(400, f"The request is wrong: {error}.", "invalid_value") from error
    while True:
        try:
            return kind.model_validate(value), ignored
        except ValidationError as error:
            errors = error.errors(include_url=False, include_context=False, include_input=False)
            errors.sort(key=lambda each: each["loc"][-1:] != ("type",))  # what is of another type has other fields
            unsupported = [place for each in errors if (place := _unsupported(each))]
            if unsupported and is_lenient:
                places = [*dict.fromkeys(unsupported)]
                for place in reversed(places):  # those of a list from its end on
                    _leave_out(value, place)
                ignored += map(_named, places)
                continue
            place = _unsupported(errors[0])
            name = _named(place or errors[0]["loc"])
            if place:
                message = f"{name!r} is not supported: leave it out, or start the server with --lenient."
                raise APIError(400, message, "unsupported_parameter", name) from error
            where = repr(name) if name else "The request"
            why = errors[0]["msg"].removeprefix("Value error, ")  # pydantic's words for any ValueError
            raise APIError(400, f"{where} is wrong: {why}.", "invalid_value", name or None) from error


def _unsupported(error: ErrorDetails) -> tuple[int | str, ...]:
    """Return the place of a field that an error says is not supported; empty for another error."""
    place = error["loc"]
    if place[:1] == ("tools",) and place[2:] == ("type",) and error["type"] == "literal_error":
        return place[:2]  # a tool of another kind
    return place[:1] if place and place[0] in _NEUTRAL else place if error["type"] == "extra_forbidden" else ()


def _named(place: Sequence[int | str]) -> str:
    return ".".join(map(str, place))


def _leave_out(value: Any, place: Sequence[int | str]) -> None:
    """Leave a field out of a value."""
    *path, last = place
    del reduce(getitem, path, value)[last]


class Form:
    """
    The form of the answer to one request, whole or as events.

    Args:
        model: name of the model.
        is_chat: whether it is a `ChatRequest`.
        has_usage: whether the last event has the numbers of tokens.
    """

    end = "data: [DONE]\n\n"

    def __init__(self, model: str, is_chat: bool, has_usage: bool):
        self._is_chat, self._has_usage, self._begun = is_chat, has_usage, set[int]()
        self._object, id_begin = ("chat.completion", "chatcmpl") if is_chat else ("text_completion", "cmpl")
        self._common = {"id": f"{id_begin}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, pieces: Sequence[Piece], answers: Sequence[Answer], cached_tokens: int) -> dict[str, Any]:
        """Return whole answers, of whose prompt some tokens were not computed."""
        choices = []
        for number, answer in enumerate(answers):
            own = [each for each in pieces if each.number == number]
            text = "".join(each.text for each in own if each.call is None and not isinstance(each.text, Thought))
            calls = [_called(each.call) for each in own if each.call is not None]
            thought = {"reasoning_content": answer.thinking} if answer.thinking else {}
            called = {"content": text or None, "tool_calls": calls} if calls else {"content": text}
            said = {"message": {"role": "assistant"} | called | thought} if self._is_chat else {"text": text}
            choices.append(self._choice(number, said, [token for each in own for token in each.tokens], answer))
        return {**self._common, "object": self._object, "choices": choices} | {
            "usage": usage_of(answers, cached_tokens)
        }

    def events(self, piece: Piece, answer: Answer | None = None) -> Iterator[dict[str, Any]]:
        """Yield the event of a piece; the last one has the answer that it ends."""
        role = {} if piece.number in self._begun else {"role": "assistant"}
        self._begun.add(piece.number)
        name = "reasoning_content" if isinstance(piece.text, Thought) else "content"
        told: dict[str, Any] = {name: piece.text}
        if piece.call is not None:
            told = {"tool_calls": [_called(piece.call) | {"index": piece.call.index}]}
        said = {"delta": role | ({} if answer else told)} if self._is_chat else {"text": piece.text}
        yield self._chunk([self._choice(piece.number, said, piece.tokens, answer)])

    def last(self, answers: Sequence[Answer], cached_tokens: int) -> Iterator[dict[str, Any]]:
        """Yield the events after the last piece."""
        for number, answer in enumerate(answers):
            yield from self.events(Piece(number, ""), answer)
        if self._has_usage:
            yield self._chunk([]) | {"usage": usage_of(answers, cached_tokens)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._common, "object": f"{self._object}{'.chunk' * self._is_chat}", "choices": choices}

    def _choice(
        self, number: int, said: dict[str, Any], tokens: Sequence[Told], answer: Answer | None
    ) -> dict[str, Any]:
        reason = answer and (answer.finish_reason if answer.finish_reason in ("stop", "tool_calls") else "length")
        told = (chat_form if self._is_chat else text_form)(tokens) if tokens else None
        return {"index": number, **said, "logprobs": told, "finish_reason": reason}


def _called(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def usage_of(answers: Sequence[Answer], cached_tokens: int) -> dict[str, Any]:
    """Return the numbers of tokens of answers to one prompt."""
    made, before = sum(len(each.token_ids) for each in answers), answers[0].prompt_tokens
    accepted = answers[0].accepted_tokens  # one of several has no drafts
    completion = {
        "reasoning_tokens": sum(each.thinking_tokens for each in answers),
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": answers[0].drafted_tokens - accepted,
    }
    details = {"prompt_tokens_details": {"cached_tokens": cached_tokens}, "completion_tokens_details": completion}
    return {"prompt_tokens": before, "completion_tokens": made, "total_tokens": before + made} | details
