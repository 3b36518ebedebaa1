"""Requests and answers of OpenAI's Responses API, as far as they are chats of text that the client holds."""

import time
import uuid
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Annotated, Any, Literal, Self

from pydantic import AliasPath, Field, field_validator, model_validator

from ..chat import Answer, Call, Thought
from .logprobs import Piece, chat_form
from .protocol import (
    MOST_MESSAGES,
    MOST_TOOLS,
    Called,
    ChatMessage,
    ChatRequest,
    Effort,
    Format,
    Function,
    Named,
    Part,
    Parts,
    Strict,
    ToolCall,
    usage_of,
)

_LOGPROBS = "message.output_text.logprobs"


class _Item(Strict):
    type: Literal["message", "reasoning", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Parts = Field([])
    call_id: str | None = None
    name: str | None = None
    arguments: Any = None
    output: Parts | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    _call: ToolCall

    @model_validator(mode="before")
    @classmethod
    def _without_thought(cls, given: Any) -> Any:
        # Of what a server has said, its thoughts are left out, as most templates do.
        is_thought = isinstance(given, dict) and given.get("type") == "reasoning"
        return {"type": "reasoning"} if is_thought else given

    @model_validator(mode="after")
    def _whole(self) -> Self:
        needed = {"message": ("role",), "function_call": ("call_id", "name", "arguments")}
        needed["function_call_output"] = ("call_id", "output")
        if missing := [name for name in needed.get(self.type, ()) if getattr(self, name) is None]:
            raise ValueError(f"an item of type {self.type!r} has no {' and no '.join(missing)}")
        if self.type == "message" and not self.content and self.role != "assistant":
            raise ValueError("only an assistant's message may have no content")
        if self.type == "function_call":
            called = Called.model_validate({"name": self.name, "arguments": self.arguments})
            self._call = ToolCall(id=str(self.call_id), function=called)
        return self


class _Function(Function):
    type: Literal["function"]


class _Chosen(Named):
    type: Literal["function"]


class _Format(Format):
    @model_validator(mode="before")
    @classmethod
    def _nested(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("type") != "json_schema":
            return given
        return {"type": given["type"], "json_schema": {name: given[name] for name in given if name != "type"}}


class ResponseRequest(ChatRequest):
    """`POST /v1/responses`, whose fields are those of `ChatRequest` by other names. Nothing is stored."""

    messages: list[_Item] = Field(  # type: ignore[assignment]
        validation_alias="input", min_length=1, max_length=MOST_MESSAGES
    )
    instructions: str = ""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = Field(None, validation_alias="max_output_tokens")
    response_format: _Format = Field(_Format(type="text"), validation_alias=AliasPath("text", "format"))
    reasoning_effort: Effort | None = Field(None, validation_alias=AliasPath("reasoning", "effort"))
    n: Literal[1] = 1
    store: bool = False
    include: tuple[str, ...] = ()
    truncation: Literal["auto", "disabled"] = "disabled"
    background: Literal[False] = False
    tools: Annotated[list[_Function], Field(max_length=MOST_TOOLS)] = Field([])  # type: ignore[assignment]
    tool_choice: Literal["none", "auto", "required"] | _Chosen = "auto"  # type: ignore[assignment]

    @model_validator(mode="before")
    @classmethod
    def _with_included(cls, given: Any) -> Any:
        include = given.get("include") if isinstance(given, dict) else None
        return given | {"logprobs": True} if isinstance(include, list) and _LOGPROBS in include else given

    @field_validator("messages", mode="before")
    @classmethod
    def _as_messages(cls, given: Any) -> Any:
        return [{"role": "user", "content": given}] if isinstance(given, str) else given

    @property
    def functions(self) -> list[Function]:
        return [*self.tools]

    @property
    def choice(self) -> str:
        return self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.name

    @property
    def said(self) -> list[ChatMessage]:
        """The messages of a chat; calls are of the answer before them."""
        said: list[ChatMessage] = []
        if self.instructions:
            said.append(ChatMessage(role="system", content=[Part(type="text", text=self.instructions)]))
        for each in self.messages:
            if each.role is not None:
                said.append(ChatMessage(role=each.role, content=each.content))
            elif each.type == "function_call_output":
                said.append(ChatMessage(role="tool", content=each.output or [], tool_call_id=each.call_id))
            elif each.type == "function_call":
                if not said or said[-1].role != "assistant":
                    said.append(ChatMessage(role="assistant"))
                said[-1] = said[-1].model_copy(update={"tool_calls": [*said[-1].tool_calls, each._call]})
        return said


class ResponseForm:
    """
    The form of the answer to one `ResponseRequest`, whole or as events.

    Args:
        model: name of the model.
        asked: the request.
    """

    end = ""

    def __init__(self, model: str, asked: ResponseRequest):
        self._output, self._number = list[dict[str, Any]](), 0
        about = {"id": f"resp_{uuid.uuid4().hex}", "created_at": int(time.time()), "model": model}
        tools = asked.model_dump(include={"tools", "tool_choice", "parallel_tool_calls"})
        self._response: dict[str, Any] = {
            "object": "response",
            "status": "in_progress",
            "output": self._output,
            "store": False,
        }
        self._response |= about | tools | dict.fromkeys(("error", "incomplete_details", "usage"))

    def whole(self, pieces: Sequence[Piece], answers: Sequence[Answer], cached_tokens: int) -> dict[str, Any]:
        """Return the whole answer, of whose prompt some tokens were not computed."""
        events = chain(*map(self.events, pieces), self.last(answers, cached_tokens))
        response: dict[str, Any] = [*events][-1]["response"]
        return response

    def events(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yield the events of a piece; each is told before the next one is taken, because what it has changes."""
        if piece.call is not None:
            yield from self._called(piece.call)
            return
        yield from self._open("reasoning" if isinstance(piece.text, Thought) else "message")
        [part] = self._output[-1]["content"]
        part["text"] += piece.text
        rows = chat_form(piece.tokens)["content"]
        if rows:
            part["logprobs"] += rows
        yield self._of_part(f"{part['type']}.delta", delta=piece.text, logprobs=rows)

    def last(self, answers: Sequence[Answer], cached_tokens: int) -> Iterator[dict[str, Any]]:
        """Yield the events after the last piece."""
        is_whole = answers[0].finish_reason in ("stop", "tool_calls")
        status, usage = "completed" if is_whole else "incomplete", usage_of(answers, cached_tokens)
        if not self._output or self._output[-1]["type"] != "function_call":
            yield from self._open("message")
            yield from self._close(status)
        self._response |= {
            "status": status,
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": answers[0].thinking_tokens},
                "total_tokens": usage["total_tokens"],
            },
        }
        yield self._event(status, response=self._response)

    def _open(self, kind: str) -> Iterator[dict[str, Any]]:
        """Begin an item of the answer, if the last one is of another kind."""
        if self._output and self._output[-1]["type"] == kind:
            return
        yield from self._begin()
        item: dict[str, Any] = {"type": kind, "id": f"{kind[:3]}_{uuid.uuid4().hex}", "status": "in_progress"}
        if kind == "message":
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["role"] = "assistant"
        else:
            part, item["summary"] = {"type": "reasoning_text", "text": ""}, []
        self._output.append(item | {"content": [part]})
        yield self._of_item("added", item | {"content": []})
        yield self._of_part("content_part.added", part=part)

    def _begin(self) -> Iterator[dict[str, Any]]:
        """Begin the answer, or end its last item, so that another one may follow."""
        if not self._output:
            yield self._event("created", response=self._response)
            yield self._event("in_progress", response=self._response)
        elif self._output[-1]["type"] != "function_call":
            yield from self._close("completed")

    def _called(self, call: Call) -> Iterator[dict[str, Any]]:
        """Tell a call, which is whole."""
        yield from self._begin()
        item = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": call.id, "name": call.name}
        self._output.append(item | {"arguments": call.arguments, "status": "completed"})
        place = {"item_id": item["id"], "output_index": len(self._output) - 1}
        yield self._of_item("added", item | {"arguments": "", "status": "in_progress"})
        yield self._event("function_call_arguments.delta", **place, delta=call.arguments)
        yield self._event("function_call_arguments.done", **place, arguments=call.arguments, name=call.name)
        yield self._of_item("done", self._output[-1])

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        """End the last item."""
        item = self._output[-1]
        [part], item["status"] = item["content"], status
        yield self._of_part(f"{part['type']}.done", text=part["text"], logprobs=part.get("logprobs", []))
        yield self._of_part("content_part.done", part=part)
        yield self._of_item("done", item)

    def _of_item(self, what: str, item: dict[str, Any]) -> dict[str, Any]:
        return self._event(f"output_item.{what}", output_index=len(self._output) - 1, item=item)

    def _of_part(self, name: str, **fields: Any) -> dict[str, Any]:
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, "content_index": 0}
        return self._event(name, **place, **fields)

    def _event(self, name: str, /, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": f"response.{name}", "sequence_number": self._number - 1, **fields}
