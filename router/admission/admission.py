"""The door: turns a request into a validated `Ask` in tokens, or refuses it before any work."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from baton.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, quoted
from baton.sampling import FILL_CONTEXT, MAX_SEED, SamplingParams
from baton.text import AnyTokenizer, check_stop_strings
from baton.v1 import common_pb2, inference_pb2
from router.admission.tenants import Tenant, Tenants, Visit
from router.dispatch.request_state import Ask

MAX_MESSAGES = 4096
MAX_CHARS_PER_TOKEN = 16  # of a whole prompt; longer texts are refused before they are tokenized
_LONG_TEXT_CHARS = 4096  # longer texts are tokenized on a thread, off the event loop
_TEXT_THREADS = 4
_PRIORITIES = common_pb2.Priority.values()
# Tokens a second before any worker has measured: what counts is that the order of dues is right,
# and that follows from the prompts' sizes whatever the rate.
_ASSUMED_RATE = 1000.0

T = TypeVar("T")


@dataclass
class Choices:
    """What the n choices of one prompt share: one request to the tenant, one tokenized prompt."""

    total: int = 1  # of all the prompts that came together
    first: bool = True  # of these prompts: the one that is charged as a request
    cut_output: bool = False  # max_tokens is a default: cut to what the context leaves
    prompt: tuple[int, ...] | None = None  # once its first choice was admitted


@dataclass(frozen=True)
class Admission:
    """What a router knows of its model, and what it takes of a prompt."""

    model: str
    tokenizer: AnyTokenizer
    default_timeout_s: float
    ttft_target_s: float = 0.0  # 0: none; a request's own goes first
    max_prompt_tokens: int = 0  # 0: what the context holds
    prefill_rate: Callable[[], float] = lambda: 0.0  # the fleet's, tokens a second; 0: not known
    tenants: Tenants = field(default_factory=lambda: Tenants(None))
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_TEXT_THREADS, "text"), init=False, repr=False
    )

    async def admit(
        self,
        request: inference_pb2.GenerateRequest,
        time_left_s: float | None,
        max_context: int,
        request_id: str,
        tenant: Tenant | None = None,
        choices: Choices | None = None,
        number: int = 0,
    ) -> Ask:
        """The request in tokens. Raises InvalidRequest, ModelNotFound or DeadlineExceeded.

        Of several choices this is the one with that number, which is added to the seed.

        `max_context` is what workers take, 0 where none is known yet. The tenant is the one of
        callers without a key where none is given; nothing is charged to it before `enter`,
        but Overloaded is raised while none of its requests may enter.
        """
        tenant = tenant or self.tenants.of(None)
        choices = choices or Choices()
        if choices.first and not number:
            tenant.check_requests(choices.total)
        else:
            tenant.check_running()
        timeout_s = self.default_timeout_s if time_left_s is None else time_left_s
        if timeout_s <= 0:
            raise DeadlineExceeded("the deadline had passed when the request arrived")
        deadline = time.monotonic() + timeout_s
        self.check_model(request.model)
        _check_priority(request.priority)
        params = SamplingParams.from_proto(request.sampling)
        seeded = request.sampling.HasField("seed")
        seed = params.seed + number if seeded else secrets.randbits(64)
        params = replace(params, seed=seed & MAX_SEED)
        params.validate(self.tokenizer.vocab_size)
        self._check_stop(request.stop)
        self._check_length(len(request.token_ids.ids) + len(request.resumed_token_ids), max_context)
        if choices.prompt is None:
            try:
                async with asyncio.timeout(timeout_s):
                    choices.prompt = tuple(await self.tokenize(request, max_context))
            except TimeoutError:
                raise DeadlineExceeded("the deadline passed during tokenizing") from None
        prompt, resumed = choices.prompt, tuple(request.resumed_token_ids)
        self._check_resumed(resumed, request, params)
        self._check_prompt((*prompt, *resumed), max_context)
        self._check_size(prompt, tenant)
        most = max(tenant.most_output(len(prompt), choices.total), len(resumed) + 1)
        cut = choices.cut_output or not request.sampling.HasField("max_tokens")
        params = self._fitting(params, len(prompt), max_context, most, cut)
        return Ask(
            request_id=request_id,
            prompt=prompt,
            params=params,
            stop=tuple(request.stop),
            include_stop=request.include_stop,
            cache_salt=tenant.salt(request.cache_salt),
            deadline=deadline,
            tenant=tenant.name,
            ttft_target_s=request.ttft_target_ms / 1000 or self.ttft_target_s,
            resumed=resumed,
        )

    def enter(
        self,
        ask: Ask,
        tenant: Tenant,
        priority: common_pb2.Priority,
        choices: Choices | None = None,
        number: int = 0,
    ) -> tuple[Ask, Visit]:
        """Charges the request to its tenant and says when it is due; `with visit:` ends that.

        Its further choices are charged their output alone. Raises Overloaded at one of the tenant's
        limits, InvalidRequest where it could never fit.
        """
        choices = choices or Choices()
        visit = tenant.enter(
            0 if number else len(ask.prompt),
            ask.params.max_tokens - len(ask.resumed),
            self._work_s(ask),
            priority,
            choices=choices.total if choices.first and not number else 0,
        )
        return replace(ask, due=visit.due), visit

    def as_if_entered(self, ask: Ask, tenant: Tenant, priority: common_pb2.Priority) -> Ask:
        """The request as `enter` would give it, without charging anybody."""
        return replace(ask, due=tenant.due_now(self._work_s(ask), priority))

    def _work_s(self, ask: Ask) -> float:
        tokens = len(ask.prompt) + len(ask.resumed)
        return tokens / (self.prefill_rate() or _ASSUMED_RATE)

    def check_model(self, model: str) -> None:
        """Raises ModelNotFound unless the request means the model that is served."""
        if model not in ("", self.model):
            raise ModelNotFound(f"model {quoted(model)} is not served here; {self.model!r} is")

    async def in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Runs what takes long on one of a few threads, which serve nothing but texts."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    async def tokenize(
        self,
        request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
        max_context: int,
    ) -> list[int]:
        """The prompt's token ids, whichever way it was given."""
        limit = self._limit(max_context)
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidRequest("give text, chat or token_ids", "input")
        if kind == "token_ids":
            return list(request.token_ids.ids)  # type: ignore[union-attr]
        if kind == "chat":
            if not request.chat.messages:
                raise InvalidRequest("chat has no messages", "chat")
            self._check_chat(request.chat.messages, max_context)
            messages = request.chat.messages
            return await self.in_thread(self.tokenizer.encode_chat, messages, limit)
        self._check_chars(len(text := request.text), max_context)
        if len(text) > _LONG_TEXT_CHARS:
            return await self.in_thread(self.tokenizer.encode, text, limit)
        return self.tokenizer.encode(text)

    def _check_chat(self, messages: Sequence[inference_pb2.ChatMessage], max_context: int) -> None:
        if len(messages) > MAX_MESSAGES:
            raise InvalidRequest(
                f"chat may have {MAX_MESSAGES} messages at most, not {len(messages)}", "chat"
            )
        self._check_chars(sum(len(m.role) + len(m.content) for m in messages), max_context)

    def _check_chars(self, num_chars: int, max_context: int) -> None:
        limit = self._limit(max_context)
        if limit and num_chars > limit * MAX_CHARS_PER_TOKEN:
            raise InvalidRequest(
                f"the prompt has {num_chars} characters and the context holds {limit} tokens, "
                f"{MAX_CHARS_PER_TOKEN} characters each at most",
                "input",
            )

    def _check_stop(self, stop: Sequence[str]) -> None:
        check_stop_strings(stop)
        if stop and self.tokenizer.pieces is None:
            raise InvalidRequest("this model has no text: stop at token ids instead", "stop")

    def _check_resumed(
        self,
        resumed: tuple[int, ...],
        request: inference_pb2.GenerateRequest,
        params: SamplingParams,
    ) -> None:
        if not resumed:
            return
        if len(resumed) >= params.max_tokens:
            raise InvalidRequest(
                f"{len(resumed)} tokens have come and {params.max_tokens} were asked for: "
                "nothing is left to generate",
                "resumed_token_ids",
            )
        if params.temperature > 0 and not request.sampling.HasField("seed"):
            raise InvalidRequest(
                "to go on with a stream that was drawn at random, its seed is needed",
                "sampling.seed",
            )

    def _fitting(
        self,
        params: SamplingParams,
        prompt_tokens: int,
        max_context: int,
        most: int,
        cut: bool,
    ) -> SamplingParams:
        """With `cut`, or FILL_CONTEXT, max_tokens becomes what the context leaves, `most` at most.

        Otherwise the caller chose it, and InvalidRequest is raised where it is too large.
        """
        limit = self._limit(max_context)
        if not limit or params.max_tokens <= limit - prompt_tokens:
            return params
        if not cut and params.max_tokens != FILL_CONTEXT:
            raise InvalidRequest(
                f"max_tokens is {params.max_tokens}, but the context of {limit} tokens leaves "
                f"{limit - prompt_tokens} behind a prompt of {prompt_tokens}",
                "sampling.max_tokens",
            )
        return replace(params, max_tokens=min(limit - prompt_tokens, most))

    def _limit(self, max_context: int) -> int:
        """Longest sequence, tokens; 0 where nobody has told yet."""
        return min((n for n in (self.tokenizer.max_context, max_context) if n), default=0)

    def _check_length(self, num_tokens: int, max_context: int) -> None:
        limit = self._limit(max_context)
        if limit and num_tokens >= limit:
            raise InvalidRequest(
                f"the prompt has {num_tokens} tokens and the context holds {limit}, "
                "of which one must be left for output",
                "input",
            )

    def _check_prompt(self, prompt: Sequence[int], max_context: int) -> None:
        if not prompt:
            raise InvalidRequest("the prompt has no tokens", "input")
        self._check_length(len(prompt), max_context)
        if (largest := max(prompt)) >= self.tokenizer.vocab_size:
            raise InvalidRequest(
                f"token id {largest} is not below the vocabulary size {self.tokenizer.vocab_size}",
                "token_ids",
            )

    def _check_size(self, prompt: Sequence[int], tenant: Tenant) -> None:
        allowed = (self.max_prompt_tokens, tenant.limits.max_prompt_tokens)
        limit = min((n for n in allowed if n), default=0)
        if limit and len(prompt) > limit:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens and at most {limit} are taken here", "input"
            )


def _check_priority(priority: int) -> None:
    if priority not in _PRIORITIES:
        raise InvalidRequest(f"there is no priority {priority}", "priority")
