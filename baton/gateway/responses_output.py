"""Answers of OpenAI's Responses API: an output as items, whole or as typed events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from baton.gateway import api
from baton.gateway.generation import Generation
from baton.gateway.responses import (
    FunctionChoice,
    FunctionTool,
    PlainText,
    ReasoningOptions,
    ResponsesRequest,
    TextOptions,
)
from baton.net.http_errors import CONTEXT_OVERFLOW, Failure
from baton.v1 import common_pb2, inference_pb2
from router.output.sink import Piece
from router.output.text_stream import ParsedOutput

ItemStatus = Literal["in_progress", "completed", "incomplete"]
FailureCode = Literal[
    "server_error", "rate_limit_exceeded", "invalid_prompt", "context_length_exceeded"
]


class OutputText(Struct, tag="output_text"):
    """The text of a message."""

    text: str = ""
    annotations: list[None] = []
    logprobs: list[None] = []


class ReasoningText(Struct, tag="reasoning_text"):
    """What the model thought."""

    text: str = ""


class ReasoningItem(Struct, tag="reasoning", kw_only=True):
    """What the model thought before it answered."""

    id: str
    status: ItemStatus = "in_progress"
    content: list[ReasoningText] = []
    summary: list[None] = []
    encrypted_content: None = None


class MessageItem(Struct, tag="message", kw_only=True):
    """What the model said."""

    id: str
    status: ItemStatus = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class FunctionCallItem(Struct, tag="function_call", kw_only=True):
    """A function that is called, with its arguments in JSON."""

    id: str
    status: ItemStatus = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


Item = ReasoningItem | MessageItem | FunctionCallItem


class InputTokensDetails(Struct):
    """How much of the input was cached; what was written to the cache is not counted."""

    cached_tokens: api.Count
    cache_write_tokens: api.Count = 0


class OutputTokensDetails(Struct):
    """How much of the output was reasoning."""

    reasoning_tokens: api.Count


class ResponseUsage(Struct):
    """Tokens of a response."""

    input_tokens: api.Count
    input_tokens_details: InputTokensDetails
    output_tokens: api.Count
    output_tokens_details: OutputTokensDetails
    total_tokens: api.Count
    baton: list[api.ServedBy] | UnsetType = UNSET  # for requests with x-baton-route


class IncompleteDetails(Struct):
    """Why an output was cut."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(Struct):
    """Why a stream failed behind its beginning; `code` is one of OpenAI's."""

    code: FailureCode
    message: str
    type: str
    param: str | None


class Response(Struct, kw_only=True):
    """The answer, with the settings that it was asked for with."""

    id: str
    object: Literal["response"] = "response"
    created_at: api.Count
    completed_at: api.Count | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    model: str
    output: list[Item] = []
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: ReasoningOptions
    temperature: float
    text: TextOptions
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice
    tools: list[FunctionTool]
    top_p: float
    background: Literal[False] = False
    previous_response_id: None = None
    store: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"


# By the kind of an item: the prefix of its id, and of its events' names.
_PREFIXES = {ReasoningItem: "rs", MessageItem: "msg", FunctionCallItem: "fc"}
_EVENTS = {
    ReasoningItem: "response.reasoning_text",
    MessageItem: "response.output_text",
    FunctionCallItem: "response.function_call_arguments",
}
# OpenAI's codes of failures, by status; all others are the server's.
_CODES: dict[int, FailureCode] = {
    429: "rate_limit_exceeded",
    400: "invalid_prompt",
}
Emit = Callable[..., None]
_encode = msgspec.json.Encoder().encode


@dataclass
class ResponseGeneration(Generation):
    """A response under way."""

    _num_events: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        emit = self._emit if self.parsed.options.stream else _ignore
        self._output = ItemsOutput(self.on_start, emit)

    @property
    def sinks(self) -> Sequence[ItemsOutput]:
        return [self._output]

    async def answer(self) -> bytes:
        return _encode(self._ended())

    def forget(self) -> None:
        del self._output

    def last_event(self, failure: Failure | None) -> bytes:
        if failure is None:
            response = self._ended()
            return self._events(f"response.{response.status}", response=response)
        error = msgspec.json.decode(failure.body, type=api.Error).error
        code: FailureCode = _CODES.get(failure.status, "server_error")
        if error.code == CONTEXT_OVERFLOW:
            code = "context_length_exceeded"
        if not self._num_events:  # only comments were sent
            return self._event("error", code=code, message=error.message, param=error.param)
        failed = ResponseError(code, error.message, error.type, error.param)
        done = [item for item in self._output.items if item.status == "completed"]
        response = self._response(status="failed", output=done, error=failed)
        return self._event("response.failed", response=response)

    def _emit(self, kind: str, **members: Any) -> None:
        events = self._events(kind, **members)
        if "delta" not in members:  # it repeats texts as long as what was asked and answered
            self.unread.allow(len(events))
        self.send(events)

    def _events(self, kind: str, **members: Any) -> bytes:
        """An event, and before the first one those that begin a response."""
        begin = b""
        if not self._num_events:
            for first in ("response.created", "response.in_progress"):
                begin += self._event(first, response=self._response())
        return begin + self._event(kind, **members)

    def _event(self, kind: str, **members: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._num_events, **members}
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(event))

    def _ended(self) -> Response:
        end = self._output.end
        usage = self.usage_of([end])
        reasoning = end.usage.reasoning_tokens
        cut = end.reason == common_pb2.FINISH_REASON_LENGTH
        return self._response(
            status="incomplete" if cut else "completed",
            completed_at=None if cut else int(time.time()),
            incomplete_details=IncompleteDetails() if cut else None,
            output=self._output.items,
            usage=ResponseUsage(
                usage.prompt_tokens,
                InputTokensDetails(end.usage.cached_tokens),
                usage.completion_tokens,
                OutputTokensDetails(reasoning),
                usage.total_tokens,
                usage.baton,
            ),
        )

    def _response(self, **members: Any) -> Response:
        body, defaults = self.parsed.options, self.service.admission.sampling_defaults
        assert isinstance(body, ResponsesRequest)
        return Response(
            id=f"resp_{self.started.request_id}",
            created_at=self.created,
            model=self.model,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning=body.reasoning or ReasoningOptions(),
            temperature=defaults["temperature"] if body.temperature is None else body.temperature,
            text=TextOptions((body.text and body.text.format) or PlainText()),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_p=defaults.get("top_p", 1.0) if body.top_p is None else body.top_p,
            **members,
        )


def _ignore(kind: str, **members: Any) -> None:
    """For an answer that is sent whole."""


@dataclass(eq=False)
class ItemsOutput:
    """An output as items, a `router.output.sink.Sink`. Each step is told as an event."""

    on_start: Callable[[inference_pb2.Started], None]
    emit: Emit

    def __post_init__(self) -> None:
        self.items: list[Item] = []
        self.end = inference_pb2.Finish()
        self._id = ""
        self._open: Item | None = None  # the last item, while more of it may come
        self._pieces: list[str] = []  # of its text
        self._place: dict[str, Any] = {}  # what events of it have in common,
        self._text_place: dict[str, Any] = {}  # and those of its text
        self._delta = ""  # the type of those with a piece

    def start(self, started: inference_pb2.Started) -> None:
        self._id = started.request_id
        self.on_start(started)

    def prompt(self, logprobs: common_pb2.PromptLogprobs) -> None:
        """Not asked for."""

    def put(self, piece: Piece) -> None:
        text, reason = piece.text, piece.finish_reason
        reasoning, calls = piece.parsed or ParsedOutput()
        if reasoning:
            self._add(ReasoningItem, reasoning)
        if calls and not calls[0].id:  # the rest of the open call, which text would end
            self._extend(calls[0].arguments)
            calls = calls[1:]
        if text:
            self._add(MessageItem, text)
        for call in calls:
            if call.id:
                item_id = self._new_id(FunctionCallItem)
                self._begin(FunctionCallItem(id=item_id, call_id=call.id, name=call.name))
            if call.arguments:
                self._extend(call.arguments)
        if reason:
            self._finish(reason)

    async def finish(self, finish: inference_pb2.Finish) -> None:
        self.end = finish

    def _finish(self, reason: common_pb2.FinishReason) -> None:
        cut = reason == common_pb2.FINISH_REASON_LENGTH
        # An output that ends by itself has an answer, though it may be empty.
        if not cut and (self._open is None or isinstance(self._open, ReasoningItem)):
            self._begin(MessageItem(id=self._new_id(MessageItem)))
        self._close("incomplete" if cut else "completed")

    def _add(self, kind: type[ReasoningItem | MessageItem], text: str) -> None:
        if not isinstance(self._open, kind):
            self._begin(kind(id=self._new_id(kind)))
        self._extend(text)

    def _new_id(self, kind: type[Item]) -> str:
        return f"{_PREFIXES[kind]}_{self._id}_{len(self.items)}"

    def _extend(self, text: str) -> None:
        self._pieces.append(text)
        self.emit(self._delta, **self._text_place, delta=text)

    def _begin(self, item: Item) -> None:
        self._close("completed")
        self._open = item
        self._place = {"item_id": item.id, "output_index": len(self.items)}
        self._text_place = self._place
        self._delta = f"{_EVENTS[type(item)]}.delta"
        self.items.append(item)
        self.emit("response.output_item.added", output_index=len(self.items) - 1, item=item)
        if not isinstance(item, FunctionCallItem):
            self._place = self._text_place = {**self._place, "content_index": 0}
            part: OutputText | ReasoningText = ReasoningText()
            if isinstance(item, MessageItem):
                part, self._text_place = OutputText(), {**self._place, "logprobs": []}
            self.emit("response.content_part.added", **self._place, part=part)

    def _close(self, status: ItemStatus) -> None:
        item, text = self._open, "".join(self._pieces)
        if item is None:
            return
        item.status = status
        done = f"{_EVENTS[type(item)]}.done"
        if isinstance(item, FunctionCallItem):
            item.arguments = text
            self.emit(done, **self._place, name=item.name, arguments=text)
        else:
            if isinstance(item, MessageItem):
                item.content = [OutputText(text)]
            else:
                item.content = [ReasoningText(text)]
            self.emit(done, **self._text_place, text=text)
            self.emit("response.content_part.done", **self._place, part=item.content[0])
        self.emit("response.output_item.done", output_index=len(self.items) - 1, item=item)
        self._open, self._pieces = None, []
