"""One choice's output as it comes, and how completions and chats write it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from baton.client.results import transport_name
from baton.gateway import api
from baton.gateway.prompt_logprobs import PromptOutput
from baton.generation.enum_names import FINISH_REASONS
from baton.text import Tokenizer
from baton.v1 import common_pb2, inference_pb2
from router.output.sink import Piece
from router.output.text_stream import ParsedOutput

_STOPPED = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_TOOL_CALLS
_encode = msgspec.json.Encoder().encode
_PHASES = ("queue_ms", "ttft_ms", "transfer_ms", "tpot_ms", "e2e_ms")


@dataclass(eq=False)
class ChoiceOutput(ABC):
    """One choice, a `Sink`: its pieces are written at once, or kept."""

    id_prefix: ClassVar[str]
    answer: ClassVar[type[api.Completion] | type[api.ChatCompletion]]
    chunk_object: ClassVar[Any]

    index: int
    tokenizer: Tokenizer
    _: KW_ONLY
    with_logprobs: bool
    with_token_ids: bool
    with_reasoning: bool = True
    with_usage: bool = False  # of this output so far, in each of its chunks
    as_token_ids: bool = False  # tokens of log-probabilities are shown so
    of_prompt: PromptOutput = field(default_factory=PromptOutput)
    stop_token_ids: Collection[int] = ()
    on_prompt: Callable[[int], None] = lambda size: None  # how many log-probabilities it has
    start: Callable[[inference_pb2.Started], None] = lambda started: None
    event: Callable[[Any], bytes] = msgspec.json.encode  # of a chunk's choice, for `send`
    send: Callable[[bytes], None] | None = None  # without it all is kept for `whole`

    def __post_init__(self) -> None:
        # Of events that differ in their text alone, what is around it.
        self._around_text: tuple[bytes, bytes] | None = None
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self.num_tokens = 0
        self._positions: list[common_pb2.PositionLogprobs] = []
        self._parsed: list[ParsedOutput] = []
        self._begun = False
        self.end = inference_pb2.Finish()

    def prompt(self, logprobs: common_pb2.PromptLogprobs) -> None:
        self.of_prompt.logprobs = logprobs
        self.on_prompt(self.of_prompt.size)

    def put(self, piece: Piece) -> None:
        text, token_ids, logprobs, reason, stop, parsed = piece
        self.num_tokens += len(token_ids)
        if parsed is not None and not self.with_reasoning:
            parsed = parsed._replace(reasoning="")
        if self.send is None:
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
                self.send(before + _encode(text) + after)
            return
        if not beside:
            parsed = None
        elif parsed is not None and len(parsed.tool_calls) > 1:
            # A chunk for each: some clients look at a chunk's first one only.
            for call in parsed.tool_calls[:-1]:
                one = ParsedOutput(parsed.reasoning, (call,))
                self.put(Piece(text, parsed=one))
                text, parsed = "", ParsedOutput("", parsed.tool_calls[-1:])
        members = self._members(logprobs, list(token_ids), reason)
        if not self._begun:
            text = self.of_prompt.echo + text
        if reason:
            members["stop_reason"] = self._stop_reason(reason, stop, token_ids)
        self.send(self.event(self._chunk(text, parsed, **members)))
        if not self._begun:
            self._begun = True
            if not (reason or self.with_logprobs or self.with_token_ids or self.with_usage):
                before, after = self.event(self._chunk("", None, **members)).split(b':""')
                self._around_text = before + b":", after

    async def finish(self, finish: inference_pb2.Finish) -> None:
        self.end = finish

    def whole(self) -> Any:
        """The choice of an answer."""
        text, reason = self.of_prompt.echo + "".join(self._text), self.end.reason
        members = self._members(self._positions, self._token_ids, reason)
        stop_reason = self._stop_reason(reason, self.end.stop, self._token_ids)
        reasoning = "".join(parsed.reasoning for parsed in self._parsed)
        calls = [call for parsed in self._parsed for call in parsed.tool_calls]
        parsed = ParsedOutput(reasoning, calls)
        return self._whole(text, parsed, stop_reason=stop_reason, **members)

    @property
    def cumulative_logprob(self) -> float:
        """Of all its tokens, where log-probabilities were asked for."""
        return sum(position.chosen.logprob for position in self._positions)

    def prompt_logprobs(self) -> api.PromptLogprobs | UnsetType:
        """Of its prompt, where they are to be told."""
        return self.of_prompt.told(lambda token_id: self.shown(token_id)[0])

    def shown(self, token_id: int) -> tuple[str, bytes]:
        """A token as text, and its own bytes."""
        text, piece = token_text(self.tokenizer, token_id)
        return f"token_id:{token_id}" if self.as_token_ids else text, piece

    @classmethod
    def answer_members(cls, outputs: Sequence[ChoiceOutput]) -> dict[str, Any]:
        """What an answer has beside its choices and its usage."""
        return {}

    def _stop_reason(self, reason: int, stop: str, token_ids: Sequence[int]) -> str | int | None:
        """As vLLM has it: the stop string, or the stop token, that ended the output."""
        if reason not in _STOPPED or stop or not token_ids:
            return stop or None
        return token_ids[-1] if token_ids[-1] in self.stop_token_ids else None

    def _members(
        self, positions: Sequence[common_pb2.PositionLogprobs], token_ids: list[int], reason: int
    ) -> dict[str, Any]:
        """What both kinds of choice have."""
        return {
            "index": self.index,
            "logprobs": self.logprobs(positions) if self.with_logprobs else None,
            "finish_reason": FINISH_REASONS[reason],
            "token_ids": token_ids if self.with_token_ids else UNSET,
        }

    @abstractmethod
    def logprobs(self, positions: Sequence[common_pb2.PositionLogprobs]) -> Any:
        """Log-probabilities of these output positions, which follow those of the last call."""

    @abstractmethod
    def _chunk(self, text: str, parsed: ParsedOutput | None, **members: Any) -> Any:
        """The API's choice in a chunk, with this output."""

    @abstractmethod
    def _whole(self, text: str, parsed: ParsedOutput, **members: Any) -> Any:
        """The API's choice in a whole answer."""


def usage_of(
    ends: Sequence[inference_pb2.Finish], n: int, *, with_routes: bool
) -> api.CompletionUsage:
    """Tokens of the whole request: each prompt once, every choice's output."""
    usages = [end.usage for end in ends]
    prompt = sum(usage.prompt_tokens for usage in usages[::n])
    output = sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages[::n])
    details = api.PromptTokensDetails(cached)
    reasoning = sum(usage.reasoning_tokens for usage in usages)
    reasoned = api.CompletionTokensDetails(reasoning) if reasoning else UNSET
    served = [_served_by(end) for end in ends] if with_routes else UNSET
    return api.CompletionUsage(prompt, output, prompt + output, details, reasoned, served)


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


def token_text(tokenizer: Tokenizer, token_id: int) -> tuple[str, bytes]:
    """A token as text, and its own bytes.

    Bytes that are no character are shown as "bytes:\\x..", a token without a text as its id.
    """
    if not tokenizer.has_text:
        return f"token_id:{token_id}", b""
    text, piece = tokenizer.pieces.shown(token_id)
    if "\ufffd" in text:
        text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
    return text, piece
