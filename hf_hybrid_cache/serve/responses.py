"""Requests and answers of OpenAI's Responses API, as far as they are chats of text that the client holds."""

import time
import uuid
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import AliasPath, Field, field_validator, model_validator

from ..chat import Answer, Conversation, Message, Thought
from .logprobs import Piece
from .protocol import MOST_MESSAGES, ChatMessage, ChatRequest, Effort, Format, usage_of


class _Item(ChatMessage):
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


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
    logprobs: Literal[False] = False
    store: bool = False
    include: tuple[str, ...] = ()
    truncation: Literal["auto", "disabled"] = "disabled"
    background: Literal[False] = False

    @field_validator("messages", mode="before")
    @classmethod
    def _as_messages(cls, given: Any) -> Any:
        if isinstance(given, str):
            return [{"role": "user", "content": given}]
        if not isinstance(given, list):
            return given
        # Of what a server has said, its thoughts are left out, as most templates do.
        return [each for each in given if not (isinstance(each, dict) and each.get("type") == "reasoning")]

    @property
    def prompt(self) -> Conversation:
        asked = super().prompt
        instructions = (Message("system", self.instructions),) if self.instructions else ()
        return asked._replace(messages=instructions + asked.messages)


class ResponseForm:
    """
    The form of the answer to one `ResponseRequest`, whole or as events.

    Args:
        model: name of the model.
    """

    end = ""

    def __init__(self, model: str):
        self._output, self._number = list[dict[str, Any]](), 0
        about = {"id": f"resp_{uuid.uuid4().hex}", "created_at": int(time.time()), "model": model}
        tools = {"tools": list[Any](), "tool_choice": "auto", "parallel_tool_calls": False}
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
        yield from self._open("reasoning" if isinstance(piece.text, Thought) else "message")
        [part] = self._output[-1]["content"]
        part["text"] += piece.text
        yield self._of_part(f"{part['type']}.delta", delta=piece.text, logprobs=[])

    def last(self, answers: Sequence[Answer], cached_tokens: int) -> Iterator[dict[str, Any]]:
        """Yield the events after the last piece."""
        is_whole = answers[0].finish_reason == "stop"
        status, usage = "completed" if is_whole else "incomplete", usage_of(answers, cached_tokens)
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
        if self._output:
            yield from self._close("completed")
        else:
            yield self._event("created", response=self._response)
            yield self._event("in_progress", response=self._response)
        item: dict[str, Any] = {"type": kind, "id": f"{kind[:3]}_{uuid.uuid4().hex}", "status": "in_progress"}
        if kind == "message":
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["role"] = "assistant"
        else:
            part, item["summary"] = {"type": "reasoning_text", "text": ""}, []
        self._output.append(item | {"content": [part]})
        yield self._of_item("added", item | {"content": []})
        yield self._of_part("content_part.added", part=part)

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        """End the last item."""
        item = self._output[-1]
        [part], item["status"] = item["content"], status
        yield self._of_part(f"{part['type']}.done", text=part["text"], logprobs=[])
        yield self._of_part("content_part.done", part=part)
        yield self._of_item("done", item)

    def _of_item(self, what: str, item: dict[str, Any]) -> dict[str, Any]:
        return self._event(f"output_item.{what}", output_index=len(self._output) - 1, item=item)

    def _of_part(self, name: str, **fields: Any) -> dict[str, Any]:
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, "content_index": 0}
        return self._event(name, **place, **fields)

    def _event(self, name: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": f"response.{name}", "sequence_number": self._number - 1, **fields}
