"""Answers of OpenAI's Responses API: output items, whole or as typed events."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import UNSET

from baton.errors import BatonError, ContextOverflow
from baton.gateway import answers, sse
from baton.gateway.chat_completions import chat_tokens
from baton.gateway.custom_tools import CustomInput
from baton.gateway.generation import Generation
from baton.gateway.output import ItemSink, token_text
from baton.gateway.responses import (
    ConversationId,
    PlainText,
    ReasoningOptions,
    ResponsesRequest,
    TextOptions,
)
from baton.gateway.responses_types import (
    CustomToolCallItem,
    FailureCode,
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    Item,
    MessageItem,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseError,
    ResponseUsage,
)
from baton.generation.tool_call import ToolCallDelta
from baton.net.http_errors import CONTEXT_OVERFLOW, Failure, failure_of
from baton.v1 import common_pb2, inference_pb2
from router.output.sink import Piece

# Prefixes of ids, and of names of events, by the class of the item.
_PREFIXES = {
    ReasoningItem: "rs",
    MessageItem: "msg",
    FunctionCallItem: "fc",
    CustomToolCallItem: "ctc",
}
_EVENTS = {
    ReasoningItem: "response.reasoning_text",
    MessageItem: "response.output_text",
    FunctionCallItem: "response.function_call_arguments",
    CustomToolCallItem: "response.custom_tool_call_input",
}
# OpenAI's codes of failures by status; others are "server_error".
_CODES: dict[int, FailureCode] = {
    429: "rate_limit_exceeded",
    400: "invalid_prompt",
}
_INSTRUCTIONS = ("system", "developer")
Emit = Callable[..., None]
_encode = msgspec.json.Encoder().encode


@dataclass
class ResponseGeneration(Generation):
    """A request to /v1/responses."""

    keep: Callable[[Response], Awaitable[None]] | None = None  # stores what has ended
    stores: bool = False  # whether the response is found again
    num_events: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.admitted = asyncio.Event()
        self.log = list[bytes]()  # events of a response in the background that are not stored yet
        self._end: Response | None = None
        body = self.parsed.options
        assert isinstance(body, ResponsesRequest)
        self._body = body
        emit = self._emit if body.stream else _ignore
        show = partial(token_text, self.admission.tokenizer) if body.with_logprobs else None
        self._output = ItemsOutput(self.on_start, emit, show, body.custom_tools, body.namespaces)

    @property
    def sinks(self) -> Sequence[ItemsOutput]:
        return [self._output]

    def on_start(self, started: inference_pb2.Started) -> None:
        super().on_start(started)
        if self._body.background and self._body.stream:
            self.send(self._begun())
        self.admitted.set()

    def send(self, event: bytes) -> None:
        if self._body.background:  # clients read what is stored
            self.log.append(event)
        else:
            super().send(event)

    async def _run_choices(self) -> None:
        await self._run_fitting()
        if self.keep is not None:
            await self.keep(self._ended())

    async def _run_fitting(self) -> None:
        """Runs the request, without its oldest turns if it asks for truncation and is too long."""
        if self._body.truncation == "auto":
            await self._truncate()
        await super()._run_choices()

    async def _truncate(self) -> None:
        chat, version = self.parsed.base.chat, self.target.version
        most = version.max_context - (self._body.max_output_tokens or 1)
        tenant, prompts = self.service.tenant_of(self.caller), version.admission.prompts
        while version.max_context:
            request = inference_pb2.TokenizeRequest(chat=chat)
            left_s = self.service.deadline_of(self.caller) - time.monotonic()
            with contextlib.suppress(ContextOverflow):
                tokens = await prompts.tokenize(request, version.max_context, left_s, tenant)
                if len(tokens) <= most:
                    break
            if not drop_oldest(chat):
                break

    async def answer(self) -> bytes:
        return _encode(self._ended())

    async def run_in_background(self) -> Response:
        """Runs the request without an answer; returns how it ended.

        Raises BatonError if it was not admitted.
        """
        failure: Failure | None = None
        try:
            await self._run_fitting()
            response = self._ended()
        except BatonError as error:
            if not self.admitted.is_set():
                raise
            failure = failure_of(error)
            response = self._failed(failure)
        finally:
            self.release()
        if self._body.stream:
            kind = "failed" if failure else response.status
            self.send(self._events(f"response.{kind}", response=response))
        return response

    def release(self) -> None:
        del self._output

    def last_event(self, failure: Failure | None) -> bytes:
        if failure is None:
            response = self._ended()
            return self._events(f"response.{response.status}", response=response)
        response = self._failed(failure)
        if not self.num_events:  # nothing but comments was sent
            error = response.error
            assert error is not None
            return self._event("error", code=error.code, message=error.message, param=error.param)
        return self._event("response.failed", response=response)

    def _failed(self, failure: Failure) -> Response:
        error = msgspec.json.decode(failure.body, type=answers.Error).error
        code: FailureCode = _CODES.get(failure.status, "server_error")
        if error.code == CONTEXT_OVERFLOW:
            code = "context_length_exceeded"
        failed = ResponseError(code, error.message, error.type, error.param)
        return self.response(status="failed", output=self._output.cut(), error=failed)

    def _emit(self, kind: str, **members: Any) -> None:
        events = self._events(kind, **members)
        if "delta" not in members:  # such events repeat whole texts of request and answer
            self.unread.allow(len(events))
        self.send(events)

    def _events(self, kind: str, **members: Any) -> bytes:
        """Encodes an event behind those that begin a response."""
        return self._begun() + self._event(kind, **members)

    def _begun(self) -> bytes:
        """Encodes the events that begin a response, unless they were sent."""
        first = () if self.num_events else ("response.created", "response.in_progress")
        return b"".join([self._event(kind, response=self.response()) for kind in first])

    def _event(self, kind: str, **members: Any) -> bytes:
        self.num_events += 1
        return encode_event(kind, self.num_events - 1, members)

    def _ended(self) -> Response:
        """The whole response; what is stored is what is answered."""
        if self._end is None:
            self._end = self._whole_response()
        return self._end

    def _whole_response(self) -> Response:
        end = self._output.end
        usage = self.usage_of([end])
        reasoning = end.usage.reasoning_tokens
        cut = end.reason == common_pb2.FINISH_REASON_LENGTH
        return self.response(
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

    def response(self, **members: Any) -> Response:
        """The response as it is now, with the settings of its request."""
        body, defaults = self._body, self.admission.sampling_defaults
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
            tools=body.supported_tools,
            background=bool(body.background),
            previous_response_id=body.previous_response_id,
            conversation=ConversationId(body.conversation_id) if body.conversation else None,
            service_tier=body.service_tier or "default",
            store=self.stores,
            top_logprobs=body.top_logprobs or 0,
            truncation=body.truncation or "disabled",
            top_p=defaults.get("top_p", 1.0) if body.top_p is None else body.top_p,
            **members,
        )


def encode_event(kind: str, number: int, members: Mapping[str, Any]) -> bytes:
    """An event of a stream, by its sequence number."""
    return sse.event(kind, _encode({"type": kind, "sequence_number": number, **members}))


def drop_oldest(chat: inference_pb2.Chat) -> bool:
    """Removes about a quarter of a conversation: its oldest turns but for system messages.

    Whole turns are removed, each from a user's message to the next; False if only one is left.
    """
    messages = chat.messages
    first = next((i for i, m in enumerate(messages) if m.role not in _INSTRUCTIONS), 0)
    size, total = 0, sum(m.ByteSize() for m in messages[first:])
    for at in range(first + 1, len(messages)):
        size += messages[at - 1].ByteSize()
        if messages[at].role == "user" and size * 4 >= total:
            del messages[first:at]
            return True
    return False


def _ignore(kind: str, **members: Any) -> None:
    """The `emit` of an answer that is not streamed."""


class ItemsOutput(ItemSink):
    """The sink that collects output in items, and emits an event for each change."""

    reasoning_type, text_type = ReasoningItem, MessageItem

    def __init__(
        self,
        on_start: Callable[[inference_pb2.Started], None],
        emit: Emit,
        show: Callable[[int], tuple[str, bytes]] | None = None,
        custom_tools: Collection[str] = (),
        namespaces: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    ) -> None:
        """`show` returns a token's text and bytes; None: without log-probabilities.

        `custom_tools`: names of the tools whose calls have a text as input. `namespaces`: namespace
        and name of tools that are in one.
        """
        super().__init__(on_start)
        self._namespaces = namespaces
        self._custom_tools = custom_tools
        self._input = CustomInput()  # of the open call of a custom tool
        self._input_parts = list[str]()
        self.emit = emit
        self._show = show
        self._logprobs: list[answers.ChatToken] = []  # of tokens whose text has not come yet
        self._item_logprobs: list[answers.ChatToken] = []  # of the open message
        self._item_members: dict[str, Any] = {}  # common members of the open item's events
        self._text_members: dict[str, Any] = {}  # common members of events with its text
        self._delta = ""  # type of events with a piece of text

    def new_item(self, kind: type[ReasoningItem | MessageItem]) -> Item:
        return kind(id=self._new_id(kind))

    def new_call(self, call: ToolCallDelta) -> Item:
        namespace, name = self._namespaces.get(call.name, (UNSET, call.name))
        is_custom = call.name in self._custom_tools
        kind = CustomToolCallItem if is_custom else FunctionCallItem
        return kind(id=self._new_id(kind), call_id=call.id, name=name, namespace=namespace)

    def _new_id(self, kind: type[Item]) -> str:
        return f"{_PREFIXES[kind]}_{self.request_id}_{len(self.items)}"

    def put(self, piece: Piece) -> None:
        if self._show is not None:
            if piece.parsed and any(piece.parsed) and not piece.text:
                self._logprobs.clear()  # of tokens that are no text of a message
            else:
                self._logprobs += chat_tokens(piece.logprobs, self._show)
        super().put(piece)

    def on_begin(self, item: Item) -> None:
        self._input, self._input_parts = CustomInput(), []
        index = len(self.items) - 1
        self._item_members = {"item_id": item.id, "output_index": index}
        self._text_members = self._item_members
        self._delta = f"{_EVENTS[type(item)]}.delta"
        self.emit("response.output_item.added", output_index=index, item=item)
        if not isinstance(item, FunctionCallItem | CustomToolCallItem):
            self._item_members = self._text_members = {**self._item_members, "content_index": 0}
            part: OutputText | ReasoningText = ReasoningText()
            if isinstance(item, MessageItem):
                part, self._text_members = OutputText(), {**self._item_members, "logprobs": []}
            self.emit("response.content_part.added", **self._item_members, part=part)

    def on_text(self, item: Item, text: str) -> None:
        members = self._text_members
        if self._logprobs and isinstance(item, MessageItem):
            members = {**members, "logprobs": self._logprobs}
            self._item_logprobs += self._logprobs
            self._logprobs = []
        if isinstance(item, CustomToolCallItem):
            self._add_input(item, self._input.push(text))
        else:
            self.emit(self._delta, **members, delta=text)

    def _add_input(self, item: CustomToolCallItem, text: str) -> None:
        if text:
            self._input_parts.append(text)
            self.emit(self._delta, **self._item_members, delta=text)

    def on_end(self, item: Item, text: str, *, cut: bool) -> None:
        item.status = "incomplete" if cut else "completed"
        done = f"{_EVENTS[type(item)]}.done"
        if isinstance(item, FunctionCallItem):
            item.arguments = text
            self.emit(done, **self._item_members, name=item.name, arguments=text)
        elif isinstance(item, CustomToolCallItem):
            self._add_input(item, "" if cut else self._input.close())
            item.input = "".join(self._input_parts)
            self.emit(done, **self._item_members, input=item.input)
        else:
            if isinstance(item, MessageItem):
                item.content = [OutputText(text, logprobs=self._item_logprobs)]
                self._text_members = {**self._item_members, "logprobs": self._item_logprobs}
                self._item_logprobs = []
            else:
                item.content = [ReasoningText(text)]
            self.emit(done, **self._text_members, text=text)
            self.emit("response.content_part.done", **self._item_members, part=item.content[0])
        self.emit("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def cut(self) -> list[Item]:
        """Ends the output where it is; returns its items, of which the open one is incomplete.

        There are no events: the one that tells the failure has all items.
        """
        self.emit = _ignore
        self._close(cut=True)
        return self.items

    def _finish(self, *, cut: bool) -> None:
        # An output that is not cut has an answer, which may be empty.
        if not cut and (self._open is None or isinstance(self._open, ReasoningItem)):
            self._begin(self.new_item(MessageItem))
        super()._finish(cut=cut)
