"""Requests and answers as OpenAI's API has them (https://platform.openai.com/docs/api-reference)."""

import time
import uuid
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ..chat import Answer, AnswerSettings, SettingError
from ..errors import HybridCacheError

_RETRY_SECONDS = 5
_MOST_MESSAGES = 2**14
# Fields that are taken with their neutral value alone.
_NEUTRAL = {
    "n",
    "best_of",
    "echo",
    "logit_bias",
    "logprobs",
    "response_format",
    "store",
    "suffix",
    "tool_choice",
    "tools",
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


class _Strict(BaseModel):
    """Refuses fields that it does not have; `null` is as good as nothing."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: each for name, each in given.items() if each is not None} if isinstance(given, dict) else given


class _Part(_Strict):
    type: Literal["text"]
    text: str


class _Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: list[_Part]
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _in_parts(cls, given: Any) -> Any:
        return [{"type": "text", "text": given}] if isinstance(given, str) else given


class _StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Request(_Strict):
    """The fields that all requests have. A field that says what is always so is taken with that value alone."""

    model: str = ""
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    stop: tuple[str, ...] = Field(default=(), max_length=4)
    drafts: int | None = None
    n: Literal[1] = 1
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] = {}
    store: Literal[False] = False
    # Of the client's own books.
    user: str | None = None
    metadata: dict[str, str] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _as_tuple(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str) else given

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
        given = {name: value for name in vars(default) if (value := getattr(self, name)) not in (None, ())}
        if not given.get("temperature", default.temperature):
            given |= dict.fromkeys(("top_p", "top_k", "seed"))  # clients send these whether or not they sample
        try:
            return replace(default, **given)
        except SettingError as error:  # whose message begins with the name of the setting
            raise APIError(400, str(error), "invalid_value", str(error).partition(" ")[0]) from error


class ChatRequest(Request):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[_Message], Field(min_length=1, max_length=_MOST_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Literal[False] = False
    response_format: dict[Literal["type"], Literal["text"]] = {"type": "text"}
    tools: Annotated[list[Any], Field(max_length=0)] = []
    tool_choice: Literal["none", "auto"] = "auto"
    parallel_tool_calls: bool = True

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def prompt(self) -> tuple[tuple[str, str], ...]:
        """Role and text of each message; what OpenAI calls developer is system in chat templates."""
        roles = {"developer": "system"}
        return tuple(
            (roles.get(each.role, each.role), "".join(part.text for part in each.content)) for each in self.messages
        )


class TextRequest(Request):
    """`POST /v1/completions`."""

    prompt: str
    echo: Literal[False] = False
    best_of: Literal[1] = 1
    suffix: Annotated[str, Field(max_length=0)] = ""


def parsed(kind: type[ChatRequest] | type[TextRequest], body: bytes) -> ChatRequest | TextRequest:
    """Return the request that a body of JSON is; raises `APIError` if it is none."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        name = ".".join(map(str, first["loc"])) or None
        if first["type"] == "extra_forbidden" or (name or "").partition(".")[0] in _NEUTRAL:
            raise APIError(400, f"{name!r} is not supported: leave it out.", "unsupported_parameter", name) from error
        where = "The request" if name is None else repr(name)
        raise APIError(400, f"{where} is wrong: {first['msg']}.", "invalid_value", name) from error


class Form:
    """
    The form of the answer to one request.

    Args:
        model: name of the model.
        is_chat: whether it is a `ChatRequest`.
    """

    def __init__(self, model: str, is_chat: bool):
        self._is_chat = is_chat
        self._object, id_begin = ("chat.completion", "chatcmpl") if is_chat else ("text_completion", "cmpl")
        self._common = {"id": f"{id_begin}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, text: str, answer: Answer, cached_tokens: int) -> dict[str, Any]:
        """Return a whole answer, of whose prompt some tokens were not computed."""
        said = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        return self._formed(self._object, said, answer) | _usage(answer, cached_tokens)

    def piece(self, text: str, is_first: bool, answer: Answer | None = None) -> dict[str, Any]:
        """Return a piece of an answer; the last one has the answer that it ends."""
        role = {"role": "assistant"} if is_first else {}
        said = {"delta": role | ({} if answer else {"content": text})} if self._is_chat else {"text": text}
        return self._formed(f"{self._object}{'.chunk' * self._is_chat}", said, answer)

    def usage(self, answer: Answer, cached_tokens: int) -> dict[str, Any]:
        """Return the piece after the last one, which has the numbers of tokens."""
        return self.piece("", False) | {"choices": []} | _usage(answer, cached_tokens)

    def _formed(self, kind: str, said: dict[str, Any], answer: Answer | None) -> dict[str, Any]:
        reason = answer and ("stop" if answer.finish_reason == "stop" else "length")
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason}
        return {**self._common, "object": kind, "choices": [choice]}


def _usage(answer: Answer, cached_tokens: int) -> dict[str, Any]:
    made, before = len(answer.token_ids), answer.prompt_tokens
    accepted = answer.accepted_tokens
    rejected = answer.drafted_tokens - accepted
    details = {
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected},
    }
    return {"usage": {"prompt_tokens": before, "completion_tokens": made, "total_tokens": before + made} | details}
