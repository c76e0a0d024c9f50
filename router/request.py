"""What a request is to the router, from admission to its last token.

    GenerateRequest  (from a caller: text, a chat or token ids)
    TokenizedRequest (validated: token ids, sampling settings, deadline)
    RequestState     (plus what has happened to it: attempts, delivered tokens, times)
    Demand           (what one attempt needs of workers; queueing and placement read only this)
    SequenceSpec     (what workers receive)

`PendingPrompt` is its entry in the weighted fair queue. Read this file before the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from baton.block_hash import adapted_salt, block_hash, root_hash
from baton.config.slo import Slo
from baton.errors import Overloaded
from baton.generation.sampling_params import Reasoning, SamplingParams
from baton.text.detokenizer import TokenPieces
from baton.text.reasoning import ReasoningFormat
from baton.text.scoring import Scoring
from baton.text.tool_parsers import ToolFormat, ToolSchemas
from baton.v1 import common_pb2, prefill_pb2

# How the prompt's KV reached the worker that decoded; values of a metric's label.
PROMPT_PATHS = ("handed_over", "local", "cached", "prefill_only")
PRIORITY_FACTORS = {
    common_pb2.PRIORITY_LOW: 0.25,
    common_pb2.PRIORITY_NORMAL: 1.0,
    common_pb2.PRIORITY_HIGH: 4.0,
}
_MAX_SHARED_FAILURES = 2  # failed steps of a request that shares its steps; then it runs alone
_MAX_UINT32 = (1 << 32) - 1  # limit of SequenceSpec's times: 49 days in ms, 71 minutes in µs
# Added by every router: workers compare these times with each other, also those that have passed.
_VIRTUAL_FINISH_OFFSET_S = 60.0


class LimitReached(Overloaded):
    """A limit of the tenant itself; its callers may see the message."""


@dataclass(frozen=True)
class TenantShare:
    """A tenant's weight and priority in the fair queue."""

    tenant: str
    weight: float = 1.0
    priority: common_pb2.Priority = common_pb2.PRIORITY_NORMAL

    @property
    def share(self) -> float:
        """Weight in fair queueing, relative to other tenants."""
        return self.weight * PRIORITY_FACTORS[self.priority]


@dataclass(eq=False)
class PendingPrompt:
    """A prompt that is not computed yet, and its place in the fair queue."""

    owner: TenantShare
    seconds: float  # prefill time on the whole fleet
    factor: float = 1.0  # of its priority
    share: float = 1.0  # its tenant's share for this request
    rank: float = 0.0  # orders the prompts of one tenant
    virtual_finish: float = 0.0  # orders all prompts; grows when prompts of its tenant pass it
    seconds_until: Callable[[PendingPrompt], float] = field(default=lambda prompt: 0.0, repr=False)
    user: str = ""  # the end user, of its tenant's

    @property
    def cost(self) -> float:
        """Virtual time by which it advances its tenant."""
        return self.seconds / self.share

    @property
    def fair_wait_s(self) -> float:
        """Seconds until it is computed if every active tenant uses its share."""
        return self.seconds_until(self)


@dataclass(frozen=True)
class OutputFormat:
    """Parts of a chat's output other than content; `pieces` show the markers of tool calls.

    `tool_schemas`: of the tools that may be called, if their types matter to the format.
    `implied_end`: a token, of a call, that ends reasoning and is not part of it.
    """

    pieces: TokenPieces
    reasoning: Reasoning | None = None
    text_reasoning: ReasoningFormat | None = None  # between texts instead of tokens
    tools: ToolFormat | None = None
    single_tool_call: bool = False  # further calls are dropped
    tool_schemas: ToolSchemas = field(default_factory=dict)
    implied_end: int | None = None

    @property
    def has_channels(self) -> bool:
        """Whether the output's format marks content and reasoning, too."""
        return self.tools is not None and self.tools.channels


_NOT_QUEUED = PendingPrompt(TenantShare(""), 0.0)


@dataclass(slots=True)
class TokenizedRequest:
    """A validated request in tokens; `pending` and `has_ticket` are set when it is admitted."""

    request_id: str
    prompt: Sequence[int]
    params: SamplingParams
    stop: tuple[str, ...]
    include_stop: bool
    cache_salt: str
    deadline: float  # time.monotonic()
    adapter: str = ""  # identity of its LoRA adapter, by which it is placed to its end
    tenant: str = ""
    user: str = ""  # end user of the tenant
    model: str = ""  # the version that serves it, as "chat@v1"
    ttft_target_s: float = 0.0  # 0: none
    show_special_tokens: bool = False  # in the text
    resumed: tuple[int, ...] = ()  # output tokens that an interrupted stream has delivered
    has_ticket: bool = False  # it resumes a request that a router of this cluster admitted
    is_further_choice: bool = False  # the first choice of its prompt has begun
    pending: PendingPrompt = _NOT_QUEUED
    workers: frozenset[str] = frozenset()  # the only ones that may serve it; empty: any
    output_format: OutputFormat | None = None  # None: all output is content
    stream_interval: int = 1  # least number of tokens delivered together
    tokenize_s: float = 0.0  # in which the prompt was rendered and tokenized, waits included
    grammar_s: float = 0.0  # in which its grammar was made and compiled; 0 without one
    scoring: Scoring | None = None  # of the prompt's labels, if they were asked for

    @property
    def accepted(self) -> bool:
        """Whether it was admitted before, so that it is not refused for lack of room."""
        return self.is_further_choice or self.has_ticket

    @property
    def kv_salt(self) -> str:
        """Salt of its blocks in prefix caches: of its own salt and its adapter."""
        return adapted_salt(self.cache_salt, self.adapter)

    @property
    def time_left_s(self) -> float:
        """Seconds until the deadline; never negative."""
        return max(0.0, self.deadline - time.monotonic())


@dataclass(frozen=True, eq=False)
class Demand:
    """What one attempt at a request needs of a pair of workers.

    It is made once for each attempt, and its prompt is hashed once, as far as any worker caches it.
    A decode worker computes up to `local_prefill_max_tokens` of the prompt itself, and more where
    that costs less and delays no token of its streams by more than `max_itl_s`; with 0 never.
    """

    token_ids: Sequence[int]  # the prompt, then what earlier attempts delivered
    pending: PendingPrompt
    adapter: str = ""  # it needs workers that hold it
    cache_salt: str = ""  # of its adapter, too
    max_new_tokens: int = 0  # 0: not known
    local_prefill_max_tokens: int = 0
    max_itl_s: float = math.inf
    decodes: bool = True  # False: no tokens are generated and a prefill worker serves it alone
    uses_cache: bool = True  # False: the whole prompt is computed, whatever is cached
    first_token_by: float = math.inf  # time.monotonic(): its TTFT target
    _chains: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False)

    @property
    def needed_workers(self) -> tuple[bool, str]:
        """Which workers it needs: of both roles or prefill alone, and with which adapter."""
        return self.decodes, self.adapter

    @property
    def num_tokens(self) -> int:
        """Tokens to compute where nothing is cached."""
        return len(self.token_ids)

    def hashes(self, block_size: int) -> Iterator[int]:
        """Hashes of its full blocks; the last token is left out, as it is always computed."""
        chain = self._chains.setdefault(block_size, [root_hash(self.cache_salt)])
        for number in range(1, (self.num_tokens - 1) // block_size + 1 if self.uses_cache else 1):
            if number == len(chain):
                tokens = self.token_ids[(number - 1) * block_size : number * block_size]
                chain.append(block_hash(chain[-1], tokens))
            yield chain[number]


@dataclass(slots=True)
class RequestState:
    """What has happened to a request so far; each attempt adds to it."""

    request: TokenizedRequest
    started: float = field(default_factory=time.monotonic)
    started_ns: int = field(default_factory=time.time_ns)  # wall clock, for traces
    delivered: list[int] = field(init=False)
    attempts: int = 0
    failures: float = 0.0  # failed attempts, reduced by delivered tokens; see `dispatch.failover`
    failed_steps: int = 0  # attempts that ended because an engine step failed
    workers: set[str] = field(default_factory=set)  # incarnations that were called for it
    failed_workers: set[str] = field(default_factory=set)
    cached_tokens: int | None = None
    predicted_ttft_s: float = 0.0  # at admission; 0: nothing was known
    placed_at: float | None = None
    first_at: float | None = None
    last_at: float | None = None
    prefill_queue_ms: float = 0.0
    transfer_bytes: int = 0
    transfer_ms: float = 0.0
    route: common_pb2.Route = field(default_factory=common_pb2.Route)
    # Those of the current attempt; complete before its first token.
    prompt_logprobs: common_pb2.PromptLogprobs | None = None
    pooled: Sequence[float] = ()  # the prompt's embedding, or the logits of its labels
    _demand: Demand | None = field(default=None, repr=False)
    _sampling: common_pb2.SamplingParams | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.delivered = list(self.request.resumed)

    @property
    def decodes(self) -> bool:
        """Whether tokens are to be generated; if not, a prefill worker alone serves it."""
        return self.request.params.max_tokens > 0

    @property
    def runs_alone(self) -> bool:
        """Whether its steps have no other sequence, because steps with it kept failing."""
        return self.failed_steps >= _MAX_SHARED_FAILURES

    def spec(self, handoff_id: str) -> common_pb2.SequenceSpec:
        """The sequence for workers: prompt and delivered tokens are the prompt, positions go on."""
        request = self.request
        if self._sampling is None:  # made once for all attempts; it may have thousands of token ids
            self._sampling = request.params.to_proto()
        spec = common_pb2.SequenceSpec(
            handoff_id=handoff_id,
            token_ids=(*request.prompt, *self.delivered),
            prompt_tokens=len(request.prompt),
            sampling=self._sampling,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            alone=self.runs_alone,
        )
        self.set_times(spec)
        return spec

    def set_times(self, spec: common_pb2.SequenceSpec) -> None:
        """Sets the times of a spec, which are relative to when it is sent."""
        pending = self.request.pending
        virtual_finish_s = pending.fair_wait_s + _VIRTUAL_FINISH_OFFSET_S
        spec.time_left_ms = min(_MAX_UINT32, max(1, int(self.request.time_left_s * 1000)))
        spec.virtual_finish_ms = min(_MAX_UINT32, max(0, int(virtual_finish_s * 1000)))
        spec.prompt_us = min(_MAX_UINT32, max(0, int(pending.seconds * 1e6)))

    def demand(self, local_prefill_max_tokens: int, max_itl_s: float) -> Demand:
        """What workers must have room for; the same object until more tokens are delivered.

        A request that has begun to stream has met its TTFT target.
        """
        request, demand = self.request, self._demand
        if demand is None or demand.num_tokens != len(request.prompt) + len(self.delivered):
            has_target = request.ttft_target_s > 0 and not self.delivered
            demand = self._demand = Demand(
                token_ids=(*request.prompt, *self.delivered) if self.delivered else request.prompt,
                pending=request.pending,
                adapter=request.adapter,
                cache_salt=request.kv_salt,
                max_new_tokens=request.params.max_tokens - len(self.delivered),
                local_prefill_max_tokens=local_prefill_max_tokens * self.decodes,
                max_itl_s=max_itl_s,
                decodes=self.decodes,
                uses_cache=request.params.prompt_logprobs is None,
                first_token_by=self.started + request.ttft_target_s if has_target else math.inf,
            )
        return demand

    def deliver(self, token_ids: Sequence[int]) -> float | None:
        """Counts tokens as delivered; returns seconds since the last delivery, if there was one."""
        now = time.monotonic()
        gap_s = None if self.last_at is None else now - self.last_at
        self.first_at = self.first_at or now
        self.last_at = now
        self.delivered += token_ids
        return gap_s

    @property
    def ttft_s(self) -> float:
        """Time from arrival to the first token; 0 before it."""
        return (self.first_at or self.started) - self.started

    @property
    def tpot_s(self) -> float:
        """Mean time between output tokens after the first."""
        steps = max(1, len(self.delivered) - len(self.request.resumed) - 1)
        return ((self.last_at or self.started) - (self.first_at or self.started)) / steps

    @property
    def e2e_s(self) -> float:
        """Time since arrival."""
        return time.monotonic() - self.started

    def is_within(self, slo: Slo) -> bool:
        return slo.met(self.ttft_s, self.tpot_s, self.e2e_s)

    def record_prefill(self, message: prefill_pb2.PrefillResponse) -> None:
        """Stores the queue time, cached tokens and transfer that a prefill worker reports."""
        if message.HasField("started"):
            if self.first_at is None:
                self.prefill_queue_ms += message.started.queue_ms
            self.record_cached(message.started.cached_tokens)
        elif message.HasField("committed"):
            self.transfer_bytes += message.committed.transfer_bytes
            self.transfer_ms += message.committed.transfer_ms
            self.route.transport = message.committed.transport

    def record_cached(self, num_tokens: int) -> None:
        """Stores how many of the prompt's tokens the first attempt found in a cache."""
        if self.cached_tokens is None:
            self.cached_tokens = min(num_tokens, len(self.request.prompt))

    @property
    def prompt_path(self) -> str:
        """How the prompt's KV reached the last attempt's decode worker: one of PROMPT_PATHS."""
        if self.route.prefill:
            return "handed_over" if self.route.transport else "prefill_only"
        return "cached" if self.cached_tokens else "local"

    def usage(self) -> common_pb2.Usage:
        """Token counts, each token counted once however often it was retried."""
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
        """The workers of the attempt that finished, and the number of attempts."""
        route = common_pb2.Route()
        route.CopyFrom(self.route)
        route.attempts = self.attempts
        return route
