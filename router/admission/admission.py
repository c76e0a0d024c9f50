"""Admission: turns a request into validated tokens, or refuses it before any work."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from baton.config import MAX_STREAM_INTERVAL
from baton.errors import (
    ContextOverflow,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    quoted,
)
from baton.generation.generation_config import DEFAULTS
from baton.generation.sampling_params import (
    FILL_CONTEXT,
    MAX_BAD_WORDS,
    MAX_CACHE_SALT_CHARS,
    MAX_SEED,
    Reasoning,
    SamplingParams,
    StructuredOutput,
)
from baton.generation.structured_output import GrammarCompiler
from baton.text import MAX_CHARS_AT_ONCE, Detokenizer, Tokenizer, check_stop_strings
from baton.text.stop_strings import MAX_STOP_CHARS
from baton.v1 import common_pb2, inference_pb2
from router.admission.chat import ChatFormats, check_messages, has_grammar
from router.admission.fair_queue import Flow
from router.admission.resume_ticket import ResumeTickets
from router.admission.tenants import AdmissionLease, Places, Tenant, Tenants
from router.admission.text_pool import Text, TextPool
from router.dispatch.request_state import TokenizedRequest

MAX_CHARS_PER_TOKEN = 16  # of a whole prompt; longer texts are refused before they are tokenized
# Of a prompt's tokens, with the alternatives at each, whose log-probabilities are told: 8 MiB.
MAX_PROMPT_LOGPROBS = 1 << 20
MAX_WORKERS = 64  # that one request may name
# What they do holds the interpreter lock: more of them would only delay the event loop.
_THREADS = 2
_PRIORITIES = common_pb2.Priority.values()
# Tokens a second before any worker has measured: only the order of virtual finish times matters
# then, and that follows from the prompts' sizes whatever the rate.
_ASSUMED_RATE = 1000.0
_RESUMED = "resumed_token_ids"

T = TypeVar("T")


@dataclass
class Choices:
    """What the n choices of one prompt share: one request to the tenant, one tokenized prompt."""

    total: int = 1  # of all the prompts that came together
    first: bool = True  # of these prompts: the one that is charged as a request
    cut_output: bool = False  # max_tokens is a default: cut to what the context leaves
    prompt: Sequence[int] | None = None  # once its first choice was admitted
    params: SamplingParams | None = None  # checked; not the seed and the prompt's log-probabilities
    places: Places = field(default_factory=Places)  # of all the prompts' choices

    def charged(self, number: int) -> int:
        """As `Tenant.enter` takes it: all choices for the first one, 0 for a further one."""
        return self.total if self.first and not number else 0


@dataclass(frozen=True)
class Admission:
    """What a router knows of its model, and which prompts it takes."""

    model: str
    tokenizer: Tokenizer
    default_timeout_s: float
    ttft_target_s: float = 0.0  # 0: none; a request's own goes first
    max_prompt_tokens: int = 0  # 0: what the context holds
    stream_interval: int = 1  # of requests that ask for none
    prefill_rate: Callable[[], float] = lambda: 0.0  # the fleet's, tokens a second; 0: not known
    tenants: Tenants = field(default_factory=Tenants)
    aliases: Sequence[str] = ()  # more names of the model
    grammars: GrammarCompiler = field(default_factory=lambda: GrammarCompiler(Path(), 0, ()))
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    sampling_defaults: Mapping[str, Any] = field(default_factory=lambda: DEFAULTS)
    tickets: ResumeTickets = field(default_factory=ResumeTickets)
    text_processes: int = 2  # for long texts
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_THREADS, "text"), init=False, repr=False
    )

    def __post_init__(self) -> None:
        """Raises ConfigError for parsers that do not fit the model."""
        self.chat_formats  # noqa: B018 - made now

    async def aclose(self) -> None:
        """Ends the processes for long texts."""
        await self._text_pool.close()

    def __str__(self) -> str:
        """For a log: what is served."""
        return f"{self.model} ({self.chat_formats})"

    @cached_property
    def chat_formats(self) -> ChatFormats:
        """How the model writes tool calls and reasoning."""
        return ChatFormats.of(self.tokenizer, self.tool_parser, self.reasoning_parser)

    @cached_property
    def _text_pool(self) -> TextPool:
        tokenizer = self.tokenizer
        arguments = (str(tokenizer.path.absolute()), tokenizer.fingerprint, self.tool_parser)
        return TextPool(arguments, self.text_processes)

    async def admit(
        self,
        request: inference_pb2.GenerateRequest,
        time_left_s: float | None,
        max_context: int,
        request_id: str,
        tenant: Tenant,
        choices: Choices,
        number: int = 0,
    ) -> TokenizedRequest:
        """The request in tokens. Raises InvalidRequest, ModelNotFound or DeadlineExceeded.

        Of several choices this is the one with that number, which is added to the seed.
        `max_context` is what workers take, 0 where none is known yet. Nothing is charged to the
        tenant before `enter`, but Overloaded is raised while none of its requests may enter.
        """
        if charged := choices.charged(number):
            tenant.check(charged)
        timeout_s = self.default_timeout_s if time_left_s is None else time_left_s
        if timeout_s <= 0:
            raise DeadlineExceeded("the deadline had passed when the request arrived")
        deadline = time.monotonic() + timeout_s
        self.check_model(request.model)
        _check_fields(request)
        seeded = request.sampling.HasField("seed")
        params = self._params(request, choices, number)
        check_stop_strings(request.stop)
        if request.stop and not self.tokenizer.has_text:
            raise InvalidRequest("this model has no text: stop at token ids instead", "stop")
        limit, resumed = self._limit(max_context), tuple(request.resumed_token_ids)
        if not request.truncate_prompt_tokens:
            check_length(len(request.token_ids.ids) + len(resumed), limit)
        if choices.prompt is None:
            tokens = await self.tokenize(request, max_context, timeout_s, tenant)
            # Four bytes a token, for as long as the request waits.
            choices.prompt = array("I", tokens[-request.truncate_prompt_tokens :])
        prompt, output_format = choices.prompt, None
        if request.HasField("chat"):
            output_format = self.chat_formats.output_format(request.chat, prompt)
            if output_format is not None:
                restrict = partial(self.chat_formats.restricted, params, request.chat)
                if has_grammar(params, request.chat):
                    params = await self.in_thread(restrict, output_format)
                else:
                    params = restrict(output_format)
        if params.structured_output is not None:
            await self._check_output(request, params, resumed, deadline)
        if resumed and len(resumed) >= params.max_tokens:
            raise InvalidRequest(
                f"{len(resumed)} tokens have come and {params.max_tokens} were asked for: "
                "nothing is left to generate",
                _RESUMED,
            )
        if resumed and params.temperature > 0 and not seeded:
            raise InvalidRequest(
                "to resume a stream that was sampled at random, its seed is needed", "sampling.seed"
            )
        self._check_prompt(prompt, resumed, limit, tenant)
        _check_prompt_logprobs(params, len(prompt))
        most = max(tenant.most_output(len(prompt), choices.total), len(resumed) + 1)
        has_own_most = (
            request.sampling.HasField("max_tokens") and request.sampling.max_tokens != FILL_CONTEXT
        )
        cut = choices.cut_output or not has_own_most
        interval = request.stream_interval or self.stream_interval
        return TokenizedRequest(
            request_id=request_id,
            prompt=prompt,
            params=fitting(params, len(prompt), limit, most, cut),
            stop=tuple(request.stop),
            include_stop=request.include_stop,
            show_special_tokens=request.show_special_tokens,
            cache_salt=tenant.salt(request.cache_salt),
            deadline=deadline,
            tenant=tenant.name,
            ttft_target_s=request.ttft_target_ms / 1000 or self.ttft_target_s,
            resumed=resumed,
            further_choice=bool(number),
            workers=frozenset(request.workers),
            output_format=output_format,
            stream_interval=1 if request.stop else min(interval, MAX_STREAM_INTERVAL),
        )

    def enter(
        self,
        request: TokenizedRequest,
        tenant: Tenant,
        priority: common_pb2.Priority,
        choices: Choices,
        number: int = 0,
    ) -> AdmissionLease:
        """Charges the request to its tenant and gives it its place; `with lease:` ends that.

        Its further choices are charged their output alone. Raises Overloaded at one of the tenant's
        limits, InvalidRequest where it could never fit.
        """
        charged, places = choices.charged(number), choices.places
        prompt_tokens = 0 if number else len(request.prompt)
        max_tokens = request.params.max_tokens - len(request.resumed)
        work_s, before = self._work_s(request), places.tokens
        lease = tenant.enter(
            prompt_tokens, max_tokens, work_s, priority, choices=charged, before=before
        )
        places.entered(tenant, charged, prompt_tokens + max_tokens * charged)
        request.pending = lease.prompt
        return lease

    def preview(
        self, request: TokenizedRequest, tenant: Tenant, priority: common_pb2.Priority
    ) -> TokenizedRequest:
        """The request as `enter` would return it; nothing is charged."""
        prompt = tenant.fair_queue.preview(tenant.flow, self._work_s(request), priority)
        return replace(request, pending=prompt)

    def check_model(self, model: str) -> None:
        """Raises ModelNotFound unless the request means the model that is served."""
        if model not in ("", self.model, *self.aliases):
            raise ModelNotFound(f"model {quoted(model)} is not served here; {self.model!r} is")

    async def in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Runs long work on one of two threads, which do nothing else."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    async def tokenize(
        self,
        request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
        max_context: int,
        timeout_s: float | None = None,
        tenant: Tenant | None = None,
    ) -> Sequence[int]:
        """The prompt's token ids, whichever way it was given. Raises as `TextPool.encode`.

        DeadlineExceeded, too. Short texts are tokenized at once: a process would take several times
        as long.
        """
        limit = self._limit(max_context)
        kind, special = request.WhichOneof("input"), request.add_special_tokens
        if not request.HasField("add_special_tokens"):
            special = kind == "text"
        if kind is None:
            raise InvalidRequest("give text, chat or token_ids", "input")
        if kind == "token_ids":
            return list(request.token_ids.ids)  # type: ignore[union-attr]
        # That of a prompt which is cut holds for what is left.
        most = 0 if getattr(request, "truncate_prompt_tokens", 0) else limit
        is_short, suffix = True, getattr(request, "suffix", "")
        if kind == "text":
            num_chars = len(request.text) + len(suffix)
            _check_chars(num_chars, limit)
            is_short = num_chars <= MAX_CHARS_AT_ONCE
        else:
            check_messages(request.chat.messages)
            num_bytes = request.chat.ByteSize()
            is_short = num_bytes <= MAX_CHARS_AT_ONCE
            if num_bytes > limit * MAX_CHARS_PER_TOKEN:  # to count takes longer
                _check_chars(sum(map(_num_chars, request.chat.messages)), limit)
        if is_short or not self.tokenizer.has_text:
            with contextlib.suppress(TimeoutError):
                return self._encode_at_once(request, suffix, most, special)
        salt = tenant.salt(getattr(request, "cache_salt", "")) if tenant else ""
        data = request.text.encode() if kind == "text" else request.chat.SerializeToString()
        text = Text(kind, data, suffix.encode(), most, special, salt)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._text_pool.encode(text, tenant.flow if tenant else Flow(""))
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed during tokenizing") from None

    def _encode_at_once(
        self,
        request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
        suffix: str,
        most: int,
        special: bool,
    ) -> list[int]:
        """Raises TimeoutError for a chat that takes longer than an event loop may be held."""
        if request.HasField("chat"):
            return self.chat_formats.encode(request.chat, most, special, at_once=True)
        if suffix:
            return self.tokenizer.encode_between(request.text, suffix, most)
        return self.tokenizer.encode(request.text, most, special)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included. Raises InvalidRequest."""
        if not self.tokenizer.has_text:
            raise InvalidRequest("this model has no tokenizer: its tokens have no text", "tokens")
        if token_ids and (largest := max(token_ids)) >= self.tokenizer.vocab_size:
            raise InvalidRequest(
                f"token id {largest} is not below the vocabulary size {self.tokenizer.vocab_size}",
                "tokens",
            )
        detokenizer = Detokenizer(self.tokenizer.pieces.showing_all)

        def text() -> str:
            return detokenizer.push(token_ids) + detokenizer.flush()

        return await self.in_thread(text) if len(token_ids) > MAX_CHARS_AT_ONCE else text()

    async def _check_output(
        self,
        request: inference_pb2.GenerateRequest,
        params: SamplingParams,
        resumed: tuple[int, ...],
        deadline: float,
    ) -> None:
        """Raises InvalidRequest for what cannot be compiled, or was not kept to so far."""
        output, own = params.structured_output, request.sampling.structured_output
        assert output is not None
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                try:
                    await self._compiled(output, resumed, params.reasoning)
                except InvalidRequest as error:
                    if output == StructuredOutput.from_proto(own) or error.field == _RESUMED:
                        raise
                    # Which schema it was that could not be compiled.
                    for i, tool in enumerate(request.chat.tools):
                        try:
                            await self._compiled(StructuredOutput(tool.parameters or "{}"))
                        except InvalidRequest as of_tool:
                            field = f"chat.tools[{i}].parameters"
                            raise InvalidRequest(str(of_tool), field) from error
                    if request.sampling.HasField("structured_output"):
                        await self._compiled(StructuredOutput.from_proto(own))
                    raise InvalidRequest(str(error), "chat.tools") from error
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while a grammar was compiled") from None

    async def _compiled(
        self,
        output: StructuredOutput,
        resumed: tuple[int, ...] = (),
        reasoning: Reasoning | None = None,
    ) -> None:
        await asyncio.wrap_future(self.grammars.check(output, resumed, reasoning))

    def _params(
        self, request: inference_pb2.GenerateRequest, choices: Choices, number: int
    ) -> SamplingParams:
        """Settings of a choice, which have in common with the first one's what takes memory."""
        own = request.sampling
        seed = own.seed + number if own.HasField("seed") else secrets.randbits(64)
        if choices.params is not None:
            top = own.prompt_logprobs if own.HasField("prompt_logprobs") else None
            return replace(choices.params, seed=seed & MAX_SEED, prompt_logprobs=top)
        params = SamplingParams.from_proto(own, seed & MAX_SEED, self.sampling_defaults)
        if request.bad_words:
            params = replace(params, bad_words=self._bad_words(request.bad_words))
        params.validate(self.tokenizer.vocab_size)
        choices.params = params
        return params

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        if len(words) > MAX_BAD_WORDS or any(len(word) > MAX_STOP_CHARS for word in words):
            raise InvalidRequest(
                f"at most {MAX_BAD_WORDS} texts of {MAX_STOP_CHARS} characters are taken",
                "bad_words",
            )
        return tuple(map(tuple, self.tokenizer.bad_words(words)))

    def _work_s(self, request: TokenizedRequest) -> float:
        tokens = len(request.prompt) + len(request.resumed)
        return tokens / (self.prefill_rate() or _ASSUMED_RATE)

    def _limit(self, max_context: int) -> int:
        """Longest sequence, tokens; 0 where none is known yet."""
        return _smallest(self.tokenizer.max_context, max_context)

    def _check_prompt(
        self, prompt: Sequence[int], resumed: Sequence[int], limit: int, tenant: Tenant
    ) -> None:
        if not prompt:
            raise InvalidRequest("the prompt has no tokens", "input")
        check_length(len(prompt) + len(resumed), limit)
        if (largest := max(chain(prompt, resumed))) >= self.tokenizer.vocab_size:
            raise InvalidRequest(
                f"token id {largest} is not below the vocabulary size {self.tokenizer.vocab_size}",
                "token_ids",
            )
        most = _smallest(self.max_prompt_tokens, tenant.config.max_prompt_tokens)
        if most and len(prompt) > most:
            raise ContextOverflow(
                f"the prompt has {len(prompt)} tokens and at most {most} are taken here",
                "input",
                most,
            )


def _check_fields(request: inference_pb2.GenerateRequest) -> None:
    if request.priority not in _PRIORITIES:
        raise InvalidRequest(f"there is no priority {request.priority}", "priority")
    if (size := len(request.cache_salt)) > (most := MAX_CACHE_SALT_CHARS):
        text = f"cache_salt has {size} characters and at most {most} are taken"
        raise InvalidRequest(text, "cache_salt")
    if (size := len(request.workers)) > MAX_WORKERS:
        raise InvalidRequest(f"it names {size} workers and at most {MAX_WORKERS} may be", "workers")


def _num_chars(message: inference_pb2.ChatMessage) -> int:
    calls = sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
    return len(message.role) + len(message.content) + len(message.reasoning) + calls


def _smallest(*limits: int) -> int:
    """0 is no limit."""
    return min((limit for limit in limits if limit), default=0)


def _check_prompt_logprobs(params: SamplingParams, num_tokens: int) -> None:
    if (top := params.prompt_logprobs) is None:
        return
    if num_tokens * (top + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"the log-probabilities of {num_tokens} tokens with {top} alternatives each are more "
            f"than {MAX_PROMPT_LOGPROBS}: ask for fewer",
            "sampling.prompt_logprobs",
        )


def check_length(num_tokens: int, limit: int) -> None:
    """Raises InvalidRequest where the context has no room for output."""
    if limit and num_tokens >= limit:
        raise ContextOverflow(
            f"the prompt has {num_tokens} tokens and the context holds {limit}, "
            "of which one must be left for output",
            "input",
            limit,
        )


def _check_chars(num_chars: int, limit: int) -> None:
    if limit and num_chars > limit * MAX_CHARS_PER_TOKEN:
        raise ContextOverflow(
            f"the prompt has {num_chars} characters and the context holds {limit} tokens, "
            f"{MAX_CHARS_PER_TOKEN} characters each at most",
            "input",
            limit,
        )


def fitting(
    params: SamplingParams, prompt_tokens: int, limit: int, most: int, cut: bool
) -> SamplingParams:
    """With `cut`, or FILL_CONTEXT, max_tokens becomes what the context leaves, `most` at most.

    Otherwise the caller chose it, and InvalidRequest is raised where it is too large.
    """
    left = limit - prompt_tokens
    if not limit or params.max_tokens <= left:
        return params
    if not cut and params.max_tokens != FILL_CONTEXT:
        raise ContextOverflow(
            f"max_tokens is {params.max_tokens}, but the context of {limit} tokens leaves "
            f"{left} behind a prompt of {prompt_tokens}",
            "sampling.max_tokens",
            limit,
        )
    return replace(params, max_tokens=min(left, most))
