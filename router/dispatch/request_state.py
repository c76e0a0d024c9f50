"""One request's state that survives any worker: what was requested, what was delivered, and when.

Detokenizer and stop strings are part of it, so no worker's death can lose half a character or half
a stop string.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.config import PROVING_TOKENS
from baton.config.slo import Slo
from baton.errors import BatonError, InternalError
from baton.generation.sampling_params import Reasoning, ReasoningTracker, SamplingParams
from baton.text import Detokenizer, StopStrings, Tokenizer
from baton.text.detokenizer import TokenPieces
from baton.text.tool_calls import ToolCallDelta, ToolFormat, ToolParser
from baton.v1 import common_pb2, prefill_pb2
from router.admission.fair_queue import FairQueue, Flow, PendingPrompt
from router.admission.wait_queue import Earmark, QueueEntry
from router.placement.cost_model import PlacementRequest

WAYS = ("handed_over", "local", "cached", "prefill_only")
_MOST_SHARED = 2  # steps that failed with a request before it has to run alone
_MOST_TIME = (1 << 32) - 1  # what SequenceSpec holds: 49 days in ms, 71 minutes in µs
# Added by every router: workers need the order, also of times that have passed.
_VIRTUAL_FINISH_OFFSET_S = 60.0


_FIRST = FairQueue().preview(Flow(""), 0.0)


@dataclass(frozen=True)
class OutputFormat:
    """What a chat's output consists of beside content; `pieces` show the markers of tool calls."""

    pieces: TokenPieces
    reasoning: Reasoning | None = None
    tools: ToolFormat | None = None
    single_tool_call: bool = False  # further ones are dropped


@dataclass(slots=True)
class TokenizedRequest:
    """A validated request in tokens. Its place in the fair queue, and its ticket, are set later."""

    request_id: str
    prompt: Sequence[int]
    params: SamplingParams
    stop: tuple[str, ...]
    include_stop: bool
    cache_salt: str
    deadline: float  # time.monotonic()
    tenant: str = ""
    ttft_target_s: float = 0.0  # 0: none
    show_special_tokens: bool = False  # in the text
    resumed: tuple[int, ...] = ()  # output tokens that another stream has delivered
    has_ticket: bool = False  # that a router gave it: it was admitted there
    further_choice: bool = False  # of a prompt whose first one has begun
    # Its place in the fair queue; before it enters that, the first one.
    pending: PendingPrompt = _FIRST
    workers: frozenset[str] = frozenset()  # that alone may serve it; empty: any
    output_format: OutputFormat | None = None  # None: all of it is content
    stream_interval: int = 1  # tokens that come together, at least

    @property
    def accepted(self) -> bool:
        """Whether that was decided before it came, so that it is not refused for want of room."""
        return self.further_choice or self.has_ticket

    @property
    def time_left_s(self) -> float:
        """Until the deadline; never negative."""
        return max(0.0, self.deadline - time.monotonic())


@dataclass(slots=True)
class RequestState:
    """What has happened to a request so far. One attempt after another adds to it."""

    request: TokenizedRequest
    started: float = field(default_factory=time.monotonic)
    started_ns: int = field(default_factory=time.time_ns)  # wall clock, for traces
    delivered: list[int] = field(init=False)
    attempts: int = 0
    failures: float = 0.0  # attempts that failed, less those that delivered tokens pay for
    failed_steps: int = 0  # of these, attempts that a failed step ended; see `failed`
    workers: set[str] = field(default_factory=set)  # that were called for it
    failed_workers: set[str] = field(default_factory=set)
    cached_tokens: int | None = None
    predicted_ttft_s: float = 0.0  # when it was admitted; 0: nothing was known
    placed_at: float | None = None
    first_at: float | None = None
    last_at: float | None = None
    prefill_queue_ms: float = 0.0
    transfer_bytes: int = 0
    transfer_ms: float = 0.0
    route: common_pb2.Route = field(default_factory=common_pb2.Route)
    # Of this attempt; whole before its first token.
    prompt_logprobs: common_pb2.PromptLogprobs | None = None
    embedding: Sequence[float] = ()
    _placement: PlacementRequest | None = field(default=None, repr=False)
    _sampling: common_pb2.SamplingParams | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.delivered = list(self.request.resumed)

    @property
    def decodes(self) -> bool:
        """Whether tokens are to be generated; if not, a prefill worker alone serves it."""
        return self.request.params.max_tokens > 0

    def spec(self, handoff_id: str) -> common_pb2.SequenceSpec:
        """The failover rule: prompt and delivered tokens are the new prompt, positions go on."""
        request = self.request
        if self._sampling is None:  # the same for all attempts; it may have thousands of token ids
            self._sampling = request.params.to_proto()
        spec = common_pb2.SequenceSpec(
            handoff_id=handoff_id,
            token_ids=(*request.prompt, *self.delivered),
            prompt_tokens=len(request.prompt),
            sampling=self._sampling,
            cache_salt=request.cache_salt,
            alone=self.alone,
        )
        self.set_times(spec)
        return spec

    def set_times(self, spec: common_pb2.SequenceSpec) -> None:
        """Those of a spec that is sent now."""
        virtual_finish_s = self.request.pending.fair_s + _VIRTUAL_FINISH_OFFSET_S
        spec.time_left_ms = min(_MOST_TIME, max(1, int(self.request.time_left_s * 1000)))
        spec.virtual_finish_ms = min(_MOST_TIME, max(0, int(virtual_finish_s * 1000)))
        spec.prompt_us = min(_MOST_TIME, max(0, int(self.request.pending.seconds * 1e6)))

    @property
    def alone(self) -> bool:
        """Whether it shares no step with others: it may be what the failed ones had in common."""
        return self.failed_steps >= _MOST_SHARED

    def failed(self, error: BatonError, num_tokens: int) -> bool:
        """An attempt has failed, after so many tokens; whether the request is the cause.

        A few tokens prove nothing: each attempt brings one, of prefill. With enough of them, what
        failed was another sequence of the step.
        """
        self.failures = max(0.0, self.failures - num_tokens / PROVING_TOKENS) + 1
        was_alone, is_proven = self.alone, num_tokens >= PROVING_TOKENS
        if is_proven:
            self.failed_steps = 0
        self.failed_steps += isinstance(error, InternalError)
        return was_alone and not is_proven and isinstance(error, InternalError)

    def placement_request(
        self, local_prefill_max_tokens: int, max_itl_s: float
    ) -> PlacementRequest:
        """What placement has to find room for; the same one until more is delivered."""
        request, kept = self.request, self._placement
        if kept is None or kept.num_tokens != len(request.prompt) + len(self.delivered):
            kept = self._placement = PlacementRequest(
                token_ids=(*request.prompt, *self.delivered) if self.delivered else request.prompt,
                pending=request.pending,
                cache_salt=request.cache_salt,
                new_tokens=request.params.max_tokens - len(self.delivered),
                local_prefill_max_tokens=local_prefill_max_tokens * self.decodes,
                max_itl_s=max_itl_s,
                decodes=self.decodes,
                caches=request.params.prompt_logprobs is None,
            )
        return kept

    def queue_entry(self, earmark: Earmark) -> QueueEntry:
        """Its entry in the wait queue. One that has begun to stream has met its TTFT target."""
        request = self.request
        has_target = request.ttft_target_s > 0 and not self.delivered
        return QueueEntry(
            pending=request.pending,
            num_tokens=len(request.prompt) + len(self.delivered),
            first_token_by=self.started + request.ttft_target_s if has_target else math.inf,
            decodes=self.decodes,
            earmark=earmark,
        )

    def deliver(self, token_ids: Sequence[int]) -> float | None:
        """Counts tokens as given to the caller, once; seconds since the last ones, if any came."""
        now = time.monotonic()
        gap_s = None if self.last_at is None else now - self.last_at
        self.first_at = self.first_at or now
        self.last_at = now
        self.delivered += token_ids
        return gap_s

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token; 0 before it."""
        return (self.first_at or self.started) - self.started

    @property
    def tpot_s(self) -> float:
        """Mean time between output tokens after the first."""
        steps = max(1, len(self.delivered) - len(self.request.resumed) - 1)
        return ((self.last_at or self.started) - (self.first_at or self.started)) / steps

    @property
    def e2e_s(self) -> float:
        return time.monotonic() - self.started

    def is_within(self, slo: Slo) -> bool:
        return slo.met(self.ttft_s, self.tpot_s, self.e2e_s)

    def note(self, message: prefill_pb2.PrefillResponse) -> None:
        """Keeps what the caller gets to know in the end of a prefill worker's message."""
        if message.HasField("started"):
            if self.first_at is None:
                self.prefill_queue_ms += message.started.queue_ms
            self.note_cached(message.started.cached_tokens)
        elif message.HasField("committed"):
            self.transfer_bytes += message.committed.transfer_bytes
            self.transfer_ms += message.committed.transfer_ms
            self.route.transport = message.committed.transport

    def note_cached(self, num_tokens: int) -> None:
        """Prompt tokens that came from a cache; the first attempt's count stands."""
        if self.cached_tokens is None:
            self.cached_tokens = num_tokens

    @property
    def way(self) -> str:
        """How its KV came to the decode worker of the last attempt: one of WAYS."""
        if self.route.prefill:
            return "handed_over" if self.route.transport else "prefill_only"
        return "cached" if self.cached_tokens else "local"

    def usage(self) -> common_pb2.Usage:
        """Tokens counted once, whatever was retried."""
        return common_pb2.Usage(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=len(self.delivered),
            cached_tokens=self.cached_tokens or 0,
        )

    def timing(self) -> common_pb2.Timing:
        placed = self.placed_at or self.started
        return common_pb2.Timing(
            queue_ms=(placed - self.started) * 1e3 + self.prefill_queue_ms,
            ttft_ms=self.ttft_s * 1e3,
            tpot_ms=self.tpot_s * 1e3,
            e2e_ms=self.e2e_s * 1e3,
            transfer_ms=self.transfer_ms,
            transfer_bytes=self.transfer_bytes,
        )

    def final_route(self) -> common_pb2.Route:
        """The workers of the attempt that finished."""
        route = common_pb2.Route()
        route.CopyFrom(self.route)
        route.attempts = self.attempts
        return route


class ParsedOutput(NamedTuple):
    """What an output has beside content, or a piece of it."""

    reasoning: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()


class TextStream:
    """Turns one request's tokens, in order, into text; `stop` is set once a stop string was met.

    The text is content. What else the output has, by the request's format, is in `parsed`; stop
    strings are not looked for in reasoning.
    """

    def __init__(self, tokenizer: Tokenizer, request: TokenizedRequest) -> None:
        output = request.output_format
        pieces = output.pieces if output else tokenizer.pieces
        if request.show_special_tokens:
            pieces = pieces.showing_all
        self._detokenizer = Detokenizer(pieces, request.prompt)
        self._stops = StopStrings(request.stop, request.include_stop)
        self._singly = bool(request.stop)
        self._parser = _OutputParser(output) if output else None
        self.stop: str | None = None
        self.parsed: ParsedOutput | None = None  # of the last tokens; None without a format
        if request.resumed:
            self.advance(request.resumed, None)  # its text was sent by the stream that broke

    @property
    def calls_tools(self) -> bool:
        return self._parser is not None and self._parser.calls_tools

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.tracker.num_tokens if self._parser and self._parser.tracker else 0

    def advance(self, token_ids: Sequence[int], finish_reason: str | None) -> tuple[str, int]:
        """Content that new tokens make certain, and how many of them it took to meet a stop string.

        With a `finish_reason` they are the last, and the content is all that is left. A token that
        ended the sequence by itself ("stop") is no text.
        """
        parser = self._parser
        if parser is None:
            return self._text(token_ids, finish_reason)
        shown = token_ids[:-1] if finish_reason == "stop" else token_ids
        reasoned = parser.take_reasoning(shown, self._detokenizer, last=finish_reason is not None)
        text, count = self._text(token_ids[reasoned:], finish_reason)
        cut = finish_reason == "length" or self.stop is not None
        text, self.parsed = parser.parse(text, last=cut or finish_reason is not None, cut=cut)
        return text, reasoned + count

    def _text(self, token_ids: Sequence[int], finish_reason: str | None) -> tuple[str, int]:
        if finish_reason is None and not self._singly:
            return self._detokenizer.push(token_ids), len(token_ids)
        shown = token_ids[:-1] if finish_reason == "stop" else token_ids
        text, count = "", 0
        for tokens in ([token] for token in shown) if self._singly else (shown,):
            certain, self.stop = self._stops.push(self._detokenizer.push(tokens))
            text, count = text + certain, count + len(tokens)
            if self.stop is not None:
                return text, count
        if finish_reason is not None:
            rest, self.stop = self._stops.push(self._detokenizer.flush())
            text += rest + ("" if self.stop is not None else self._stops.flush())
        return text, len(token_ids)


class _OutputParser:
    """Parts an output into reasoning, content and tool calls. A function of its tokens.

    White space around reasoning belongs to the model's format, and is dropped.
    """

    def __init__(self, output: OutputFormat) -> None:
        self.tracker = ReasoningTracker(output.reasoning) if output.reasoning else None
        self._begin = output.reasoning.begin_token_id if output.reasoning else -1
        self._tools = (
            ToolParser(output.tools, single=output.single_tool_call) if output.tools else None
        )
        self._reasoning = ""  # of the last tokens
        self._space: str | None = None  # behind reasoning; None before it
        self._behind_reasoning = False

    @property
    def calls_tools(self) -> bool:
        return self._tools is not None and self._tools.num_calls > 0

    def take_reasoning(
        self, token_ids: Sequence[int], detokenizer: Detokenizer, *, last: bool
    ) -> int:
        """How many of an output's next tokens are reasoning, whose text `parse` returns."""
        self._reasoning = ""
        tracker = self.tracker
        if tracker is None:
            return 0
        count = tracker.take(token_ids)
        if not (count or (last and tracker.inside)):
            return 0
        tokens = [token for token in token_ids[:count] if token != self._begin]
        ends = not tracker.inside
        text = detokenizer.push(tokens[:-1] if ends else tokens)
        if ends or last:
            text += detokenizer.flush()
        self._behind_reasoning = ends
        if self._space is not None or (text := text.lstrip()):
            text = (self._space or "") + text
            self._reasoning = text.rstrip()
            self._space = text[len(self._reasoning) :]
        return count

    def parse(self, text: str, *, last: bool, cut: bool) -> tuple[str, ParsedOutput]:
        """Content, and what else there is; see `ToolParser.push`."""
        if self._behind_reasoning and (text := text.lstrip()):
            self._behind_reasoning = False
        calls: Sequence[ToolCallDelta] = ()
        if self._tools is not None:
            text, calls = self._tools.push(text, last=last, cut=cut)
        return text, ParsedOutput(self._reasoning, calls)
