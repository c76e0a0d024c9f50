"""The span of a request, with attributes of OpenTelemetry's conventions for generative AI."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from typing import Any

from opentelemetry.trace import Span

from baton.telemetry.tracing import PROVIDER
from baton.text import Tokenizer
from baton.v1 import common_pb2, inference_pb2
from router.request import RequestState, TokenizedRequest

_FINISH_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_call",
}
_FRAME_CHARS = 64  # of a message in addition to its text
_MAX_INT = (1 << 63) - 1  # largest attribute


def first_attributes(operation: str) -> dict[str, str]:
    """Attributes at the start of any request's span."""
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
    }


def admission_times(admitted: TokenizedRequest) -> dict[str, float]:
    """Attributes of the span in which a request was admitted: what took time, in milliseconds."""
    times = {"baton.tokenize_ms": admitted.tokenize_s * 1e3}
    if admitted.grammar_s:
        times["baton.grammar_ms"] = admitted.grammar_s * 1e3
    return times


class RequestSpan:
    """Writes a request's settings and result into its span.

    With `max_chars` above 0 also the prompt and the answer, up to that many characters of each: the
    end of a longer prompt, the beginning of a longer answer.
    """

    def __init__(self, span: Span, tokenizer: Tokenizer, max_chars: int) -> None:
        self._span, self._tokenizer = span, tokenizer
        self._max_chars = max_chars if span.is_recording() else 0

    def admitted(
        self, request: inference_pb2.GenerateRequest, admitted: TokenizedRequest, choices: int
    ) -> None:
        """Records the request; choices: number of answers to its prompt."""
        if not self._span.is_recording():
            return
        params = admitted.params
        attributes: dict[str, Any] = {
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.frequency_penalty": params.frequency_penalty,
            "gen_ai.request.presence_penalty": params.presence_penalty,
            "gen_ai.usage.input_tokens": len(admitted.prompt),
        }
        if choices > 1:
            attributes["gen_ai.request.choice.count"] = choices
        if (output := params.structured_output) is not None:
            attributes["gen_ai.output.type"] = "json" if output.json_schema else "text"
        if request.sampling.HasField("seed") and params.seed <= _MAX_INT:
            attributes["gen_ai.request.seed"] = params.seed
        if admitted.stop:
            attributes["gen_ai.request.stop_sequences"] = admitted.stop
        if self._max_chars:
            messages = list(self._input(request, admitted))
            attributes["gen_ai.input.messages"] = json.dumps(messages, ensure_ascii=False)
        self._span.set_attributes(attributes)

    def ended(self, model: str, state: RequestState, reason: common_pb2.FinishReason) -> None:
        """Records the answer, or its delivered part if the request fails."""
        if not self._span.is_recording():
            return
        finish = _FINISH_REASONS.get(reason)
        attributes: dict[str, Any] = {
            "gen_ai.response.id": state.request.request_id,
            "gen_ai.response.model": model,
            "gen_ai.usage.output_tokens": len(state.delivered),
            "gen_ai.usage.cache_read.input_tokens": state.cached_tokens or 0,
        }
        if finish:
            attributes["gen_ai.response.finish_reasons"] = (finish,)
        if self._max_chars:
            text = self._tokenizer.decode(state.delivered[: self._max_chars])
            message = {**_message("assistant", text[: self._max_chars]), "finish_reason": finish}
            attributes["gen_ai.output.messages"] = json.dumps([message], ensure_ascii=False)
        self._span.set_attributes(attributes)

    def _input(
        self, request: inference_pb2.GenerateRequest, admitted: TokenizedRequest
    ) -> Iterator[dict[str, Any]]:
        """The last messages of a conversation, or a prompt as one, up to the limit."""
        if not request.HasField("chat"):
            # The request's own text may be another prompt's by now: they share a message.
            text = self._tokenizer.decode(admitted.prompt[-self._max_chars :])
            yield _message("user", text[-self._max_chars :])
            return
        kept, left = deque[dict[str, Any]](), self._max_chars
        for message in reversed(request.chat.messages):
            if left <= 0:
                break
            kept.appendleft(_message(message.role, message.content[-left:]))
            left -= len(message.content) + _FRAME_CHARS
        yield from kept


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}
