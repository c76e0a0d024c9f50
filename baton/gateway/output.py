"""One choice's output as it comes, and how completions and chats write it."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET

from baton.client.results import transport_name
from baton.gateway import api
from baton.gateway.api import ChatDelta, ChatLogprobs, ChatToken, CompletionLogprobs, FinishReason
from baton.text import Tokenizer
from baton.text.tool_calls import ToolCallDelta
from baton.v1 import common_pb2, inference_pb2
from router.dispatch.request_state import ParsedOutput

_REASONS: dict[int, FinishReason | None] = {
    common_pb2.FINISH_REASON_UNSPECIFIED: None,
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
_UNFINISHED = common_pb2.FINISH_REASON_UNSPECIFIED
_encode = msgspec.json.Encoder().encode
_PHASES = ("queue_ms", "ttft_ms", "transfer_ms", "tpot_ms", "e2e_ms")
_MIN_LOGPROB = -9999.0  # JSON has no infinity


class Output(ABC):
    """One choice, as a `router.frontend.Sink`: its pieces are written at once, or kept."""

    id_prefix: ClassVar[str]
    answer: ClassVar[type[api.Completion] | type[api.ChatCompletion]]
    chunk_object: ClassVar[Any]

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        *,
        logprobs: bool,
        token_ids: bool,
        echo: str,
        on_start: Callable[[inference_pb2.Started], None] = lambda started: None,
        event: Callable[[Any], bytes] = msgspec.json.encode,
        send: Callable[[bytes], None] | None = None,
    ) -> None:
        """`event` encodes a chunk's choice for `send`; without that all is kept for `whole`."""
        self._index = index
        self._tokenizer = tokenizer
        self._with_logprobs = logprobs
        self._with_token_ids = token_ids
        self._echo = echo  # what the text begins with
        self.start = on_start
        self._event = event
        self._send = send
        self._around_text: tuple[bytes, bytes] | None = (
            None  # of events that differ in their text alone
        )
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._positions: list[common_pb2.PositionLogprobs] = []
        self._parsed: list[ParsedOutput] = []
        self._begun = False
        self.end = inference_pb2.Finish()

    def put(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[common_pb2.PositionLogprobs],
        reason: common_pb2.FinishReason,
        parsed: ParsedOutput | None = None,
    ) -> None:
        if self._send is None:
            self._text.append(text)
            self._token_ids.extend(token_ids)
            self._positions.extend(logprobs)
            if parsed is not None:
                self._parsed.append(parsed)
            return
        beside = parsed is not None and any(parsed)
        if self._around_text is not None and not (reason or beside):
            if text or parsed is None:
                before, after = self._around_text
                self._send(before + _encode(text) + after)
            return
        if not beside:
            parsed = None
        elif parsed is not None and len(parsed.tool_calls) > 1:
            # A chunk for each: some clients look at a chunk's first one only.
            for call in parsed.tool_calls[:-1]:
                self.put(text, (), (), _UNFINISHED, ParsedOutput(parsed.reasoning, (call,)))
                text, parsed = "", ParsedOutput("", parsed.tool_calls[-1:])
        members = self._members(logprobs, list(token_ids), reason)
        text = text if self._begun else self._echo + text
        self._send(self._event(self._choice(text, parsed, **members)))
        if not self._begun:
            self._begun = True
            if not (reason or self._with_logprobs or self._with_token_ids):
                before, after = self._event(self._choice("", None, **members)).split(b':""')
                self._around_text = before + b":", after

    async def finish(self, finish: inference_pb2.Finish) -> None:
        self.end = finish

    def whole(self) -> Any:
        """The choice of an answer."""
        text, stop_reason = self._echo + "".join(self._text), self.end.stop or None
        members = self._members(self._positions, self._token_ids, self.end.reason)
        reasoning = "".join(parsed.reasoning for parsed in self._parsed)
        calls = [call for parsed in self._parsed for call in parsed.tool_calls]
        parsed = ParsedOutput(reasoning, calls)
        return self._choice(text, parsed, stop_reason=stop_reason, **members)

    def _members(
        self, positions: Sequence[common_pb2.PositionLogprobs], token_ids: list[int], reason: int
    ) -> dict[str, Any]:
        """What both kinds of choice have."""
        return {
            "index": self._index,
            "logprobs": self.logprobs(positions) if self._with_logprobs else None,
            "finish_reason": _REASONS[reason],
            "token_ids": token_ids if self._with_token_ids else UNSET,
        }

    def _token(self, token: common_pb2.TokenLogprob) -> tuple[tuple[str, bytes], float]:
        return shown(self._tokenizer, token.token_id), max(token.logprob, _MIN_LOGPROB)

    @abstractmethod
    def logprobs(self, positions: Sequence[common_pb2.PositionLogprobs]) -> Any:
        """Log-probabilities of these output positions, which follow those of the last call."""

    @abstractmethod
    def _choice(self, text: str, parsed: ParsedOutput | None, **members: Any) -> Any:
        """The API's choice with this output; that of a chunk has no `stop_reason`."""


class CompletionOutput(Output):
    """As /v1/completions has it."""

    id_prefix = "cmpl-"
    answer = api.Completion
    chunk_object = "text_completion"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def logprobs(self, positions: Sequence[common_pb2.PositionLogprobs]) -> CompletionLogprobs:
        """Four parallel lists."""
        found = CompletionLogprobs([], [], [], [])
        for position in positions:
            (text, piece), logprob = self._token(position.chosen)
            others = (self._token(other) for other in position.top)
            found.text_offset.append(self._offset)
            found.tokens.append(text)
            found.token_logprobs.append(logprob)
            found.top_logprobs.append({text: logprob, **{t: p for (t, _), p in others}})
            self._offset += len(self._utf8.decode(piece))
        return found

    def _choice(
        self, text: str, parsed: ParsedOutput | None, **members: Any
    ) -> api.CompletionChoice:
        return api.CompletionChoice(text=text, **members)


class ChatOutput(Output):
    """As /v1/chat/completions has it."""

    id_prefix = "chatcmpl-"
    answer = api.ChatCompletion
    chunk_object = "chat.completion.chunk"

    def logprobs(self, positions: Sequence[common_pb2.PositionLogprobs]) -> ChatLogprobs:
        """One entry for each token."""
        return ChatLogprobs(
            [
                ChatToken(
                    *self._entry(position.chosen),
                    [api.TopToken(*self._entry(other)) for other in position.top],
                )
                for position in positions
            ]
        )

    def _entry(self, token: common_pb2.TokenLogprob) -> tuple[str, float, list[int]]:
        (text, piece), logprob = self._token(token)
        return text, logprob, list(piece)

    def _choice(self, text: str, parsed: ParsedOutput | None, **members: Any) -> api.ChatChoice:
        reasoning, calls = parsed or ParsedOutput()
        beside: dict[str, Any] = {}
        if reasoning:
            beside = {"reasoning": reasoning, "reasoning_content": reasoning}
        if "stop_reason" in members:
            if calls:
                beside["tool_calls"] = _whole_calls(calls)
            content = None if beside and not text else text
            return api.ChatChoice(message=api.AssistantMessage(content, **beside), **members)
        if calls:
            beside["tool_calls"] = [_call_delta(call) for call in calls]
        delta = ChatDelta(UNSET if beside and self._begun and not text else text, **beside)
        if not self._begun:
            delta.role = "assistant"
        return api.ChatChoice(delta=delta, **members)


def _call_delta(call: ToolCallDelta) -> api.ToolCallDelta:
    function = api.CalledFunction(call.arguments, call.name or UNSET)
    if not call.id:
        return api.ToolCallDelta(index=call.index, function=function)
    return api.ToolCallDelta(index=call.index, id=call.id, type="function", function=function)


def _whole_calls(deltas: Sequence[ToolCallDelta]) -> list[api.ToolCall]:
    calls: list[api.ToolCall] = []
    for delta in deltas:
        if delta.id:
            function = api.CalledFunction("", delta.name)
            calls.append(api.ToolCall(id=delta.id, function=function))
        calls[-1].function.arguments += delta.arguments
    return calls


def usage_of(ends: Sequence[inference_pb2.Finish], n: int, *, with_routes: bool) -> api.Usage:
    """Tokens of the whole request: each prompt once, every choice's output."""
    usages = [end.usage for end in ends]
    prompt = sum(usage.prompt_tokens for usage in usages[::n])
    output = sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages[::n])
    details = api.PromptTokensDetails(cached)
    reasoning = sum(usage.reasoning_tokens for usage in usages)
    reasoned = api.CompletionTokensDetails(reasoning) if reasoning else UNSET
    served = [_served_by(end) for end in ends] if with_routes else UNSET
    return api.Usage(prompt, output, prompt + output, details, reasoned, served)


def _served_by(finish: inference_pb2.Finish) -> api.ServedBy:
    route, timing = finish.route, finish.timing
    return api.ServedBy(
        prefill=route.prefill or None,
        decode=route.decode or None,
        transport=transport_name(route.transport),
        attempts=route.attempts,
        transfer_bytes=timing.transfer_bytes,
        cached_tokens=finish.usage.cached_tokens,
        **{name: round(getattr(timing, name), 3) for name in _PHASES},
    )


def shown(tokenizer: Tokenizer, token_id: int) -> tuple[str, bytes]:
    """A token as text, and its own bytes.

    Bytes that are no character are shown as "bytes:\\x..", a token without a text as its id.
    """
    if not tokenizer.has_text:
        return f"token_id:{token_id}", b""
    text, piece = tokenizer.pieces.shown(token_id)
    if "\ufffd" in text:
        text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
    return text, piece
