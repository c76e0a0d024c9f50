"""Admission: validates and tokenizes a request, or refuses it before any work on it."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from baton.config import MAX_STREAM_INTERVAL, RouterConfig
from baton.errors import ConfigError, DeadlineExceeded, InvalidRequest, quoted
from baton.generation.generation_config import DEFAULTS
from baton.generation.sampling_params import (
    FILL_CONTEXT,
    MAX_BAD_WORDS,
    MAX_SEED,
    Reasoning,
    SamplingParams,
    StructuredOutput,
)
from baton.generation.structured_output import GrammarCompiler
from baton.text import MAX_CHARS_AT_ONCE, Tokenizer, check_stop_strings
from baton.text.scoring import Scoring
from baton.text.stop_strings import MAX_STOP_CHARS
from baton.v1 import common_pb2, inference_pb2
from router.admission.chat import ChatFormats, has_grammar
from router.admission.prompt_tokenizer import PromptTokenizer
from router.admission.tenants import AdmissionLease, ReservedChoices, Tenant, Tenants
from router.admission.validation import (
    check_fields,
    check_length,
    check_prompt,
    check_prompt_logprobs,
    check_resumed,
    fit_max_tokens,
    num_kept,
    smallest_limit,
)
from router.request import OutputFormat, TokenizedRequest

# Tokens a second before any worker has measured its rate: then only the order of virtual finish
# times matters, which follows from the prompts' sizes at any rate.
_ASSUMED_RATE = 1000.0


@dataclass
class PromptChoices:
    """State shared by the n choices of one prompt: a single charge and a single tokenization."""

    total: int = 1  # choices of all prompts of the body
    of_prompt: int = 1  # choices of this one
    first: bool = True  # of the body's prompts: the one that is charged as a request
    cut_output: bool = False  # max_tokens is a default: reduce it to the context's room
    prompt: Sequence[int] | None = None  # set when the first choice is admitted
    params: SamplingParams | None = None  # validated; without seed and prompt log-probabilities
    reserved: ReservedChoices = field(default_factory=ReservedChoices)  # for all prompts

    def num_charged(self, number: int) -> int:
        """`choices` for `Tenant.enter`: all for the first choice, 0 for a further one."""
        return self.total if self.first and not number else 0


class Admission:
    """Admits requests for a model: all its versions that have one tokenizer."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        tenants: Tenants,
        *,
        grammars: GrammarCompiler | None = None,
        sampling_defaults: Mapping[str, Any] = DEFAULTS,
    ) -> None:
        """Raises ConfigError for options that do not fit the model, CheckpointError for a template
        that is broken."""
        self.config = config
        self.limits = config.limits
        self.tokenizer = tokenizer
        self.tenants = tenants
        self.sampling_defaults = sampling_defaults
        self.scoring = self._scoring()
        if self.limits.chat_template:
            tokenizer.use_template(self.limits.chat_template)
        # Of what makes text and tokens: this version, the model's text files and the template.
        source = tokenizer.template.source if tokenizer.template else ""
        named = f"{metadata.version('baton-serving')} {tokenizer.fingerprint} {source}"
        self.system_fingerprint = f"fp_{hashlib.sha256(named.encode()).hexdigest()[:10]}"
        self._grammars = grammars or GrammarCompiler(Path(), 0, ())
        self.chat_formats = ChatFormats.from_tokenizer(
            tokenizer, self.limits.tool_parser, self.limits.reasoning_parser
        )
        self.prompts = PromptTokenizer(
            self.chat_formats,
            self.limits.tool_parser,
            self.limits.text_processes,
            self.limits.chat_template,
        )

    async def aclose(self) -> None:
        """Ends the processes that tokenize long texts."""
        await self.prompts.pool.close()

    async def admit(
        self,
        request: inference_pb2.GenerateRequest,
        deadline: float,
        max_context: int,
        request_id: str,
        tenant: Tenant,
        choices: PromptChoices,
        number: int = 0,
        model: str = "",
        adapter: str = "",
    ) -> TokenizedRequest:
        """Validates and tokenizes a request.

        `deadline`: `time.monotonic()`. `number`: index of the choice, which is added to the seed.
        `max_context`: the workers' limit, 0 if not known. `model`: full name of the version that
        serves it. `adapter`: identity of its LoRA adapter. The tenant is charged by `enter` only,
        but Overloaded is raised while none of its requests may enter.
        Raises InvalidRequest or DeadlineExceeded.
        """
        if charged := choices.num_charged(number):
            tenant.check(charged)
        if time.monotonic() >= deadline:
            raise DeadlineExceeded("the deadline had passed when the request arrived")
        check_fields(request)
        began = time.perf_counter()
        params = await self._params(request, choices, number)
        check_stop_strings(request.stop)
        if request.stop and not self.tokenizer.has_text:
            raise InvalidRequest("this model has no text: stop at token ids instead", "stop")
        limit = self.prompts.context_limit(max_context)
        resumed = tuple(request.resumed_token_ids)
        prompt = await self._prompt(request, params, max_context, deadline, tenant, choices)
        tokenized = time.perf_counter()
        params, output_format = await self._chat_output(request, params, prompt)
        if params.structured_output is not None:
            await self._check_grammar(request, params, resumed, deadline)
        compiled = time.perf_counter()
        check_resumed(request, params)
        limits = self.limits.max_prompt_tokens, tenant.config.max_prompt_tokens
        vocab_size = self.tokenizer.vocab_size
        most = smallest_limit(*limits)
        has_output = params.max_tokens > 0
        check_prompt(prompt, resumed, vocab_size, limit, most, has_output=has_output)
        check_prompt_logprobs(params, len(prompt))
        return TokenizedRequest(
            request_id=request_id,
            prompt=prompt,
            params=self._fit_output(request, params, prompt, limit, tenant, choices),
            stop=tuple(request.stop),
            include_stop=request.include_stop,
            show_special_tokens=request.show_special_tokens,
            cache_salt=tenant.salt(request.cache_salt),
            adapter=adapter,
            deadline=deadline,
            tenant=tenant.name,
            user=request.user,
            model=model,
            ttft_target_s=request.ttft_target_ms / 1000 or self.limits.ttft_target_s,
            resumed=resumed,
            is_further_choice=bool(number),
            workers=frozenset(request.workers),
            output_format=output_format,
            stream_interval=self._stream_interval(request),
            scoring=self.scoring if params.classification else None,
            tokenize_s=tokenized - began,
            grammar_s=compiled - tokenized if params.structured_output is not None else 0.0,
        )

    def enter(
        self,
        request: TokenizedRequest,
        tenant: Tenant,
        priority: common_pb2.Priority,
        choices: PromptChoices,
        number: int = 0,
        prefill_rate: float = 0.0,
    ) -> AdmissionLease:
        """Charges the request to its tenant and queues its prompt, until the lease's block is left.

        `prefill_rate`: tokens a second of the model's workers, 0 if not known. Further choices are
        charged for their output only. Raises Overloaded at one of the tenant's limits,
        InvalidRequest if it could never fit.
        """
        charged, reserved = choices.num_charged(number), choices.reserved
        prompt_tokens = 0 if number else len(request.prompt)
        max_tokens = request.params.max_tokens - len(request.resumed)
        lease = tenant.enter(
            prompt_tokens,
            max_tokens,
            _work_s(request, prefill_rate),
            priority,
            choices=charged,
            earlier_tokens=reserved.tokens,
            model=request.model,
            user=request.user,
        )
        reserved.entered(tenant, charged, prompt_tokens + max_tokens * charged)
        request.pending = lease.prompt
        return lease

    def preview(
        self,
        request: TokenizedRequest,
        tenant: Tenant,
        priority: common_pb2.Priority,
        prefill_rate: float = 0.0,
    ) -> TokenizedRequest:
        """The request as `enter` would leave it, without charging it."""
        queue, seconds = tenant.fair_queue(request.model), _work_s(request, prefill_rate)
        pending = queue.preview(tenant.share, seconds, priority, request.user)
        return replace(request, pending=pending)

    async def _prompt(
        self,
        request: inference_pb2.GenerateRequest,
        params: SamplingParams,
        max_context: int,
        deadline: float,
        tenant: Tenant,
        choices: PromptChoices,
    ) -> Sequence[int]:
        """The prompt's tokens, computed for the first choice and kept for the others."""
        limit = self.prompts.context_limit(max_context)
        kept = num_kept(request.truncate_prompt_tokens, limit, params.max_tokens)
        if not kept:
            num_tokens = len(request.token_ids.ids) + len(request.resumed_token_ids)
            check_length(num_tokens, limit, has_output=params.max_tokens > 0)
        if choices.prompt is None:
            left_s = deadline - time.monotonic()
            tokens = await self.prompts.tokenize(request, max_context, left_s, tenant)
            # Four bytes a token, for as long as the request waits.
            choices.prompt = array("I", tokens[-kept:])
        return choices.prompt

    async def _chat_output(
        self,
        request: inference_pb2.GenerateRequest,
        params: SamplingParams,
        prompt: Sequence[int],
    ) -> tuple[SamplingParams, OutputFormat | None]:
        """The settings with what a chat's tools and reasoning add, and its output format."""
        if not request.HasField("chat"):
            return params, None
        output_format = self.chat_formats.output_format(request.chat, prompt)
        if output_format is None:
            return params, None
        restrict = partial(self.chat_formats.restrict, params, request.chat, output_format, prompt)
        if params.structured_output is not None or has_grammar(params, request.chat):
            params = await self.prompts.run_in_thread(restrict)
        else:
            params = restrict()
        if params.structured_output is not None and output_format.text_reasoning:
            # Workers could not tell where it ends, so the answer begins at once.
            output_format = replace(output_format, text_reasoning=None)
        return params, output_format

    def _fit_output(
        self,
        request: inference_pb2.GenerateRequest,
        params: SamplingParams,
        prompt: Sequence[int],
        limit: int,
        tenant: Tenant,
        choices: PromptChoices,
    ) -> SamplingParams:
        sampling = request.sampling
        max_output = tenant.max_output(len(prompt), choices.total)
        chosen = sampling.HasField("max_tokens") and sampling.max_tokens != FILL_CONTEXT
        return fit_max_tokens(
            params,
            len(prompt),
            limit,
            max(max_output, len(request.resumed_token_ids) + 1),
            cut=choices.cut_output or not chosen,
        )

    def _stream_interval(self, request: inference_pb2.GenerateRequest) -> int:
        """1 with stop strings, as one may end with each token."""
        interval = request.stream_interval or self.limits.stream_interval
        return 1 if request.stop else min(interval, MAX_STREAM_INTERVAL)

    async def _check_grammar(
        self,
        request: inference_pb2.GenerateRequest,
        params: SamplingParams,
        resumed: tuple[int, ...],
        deadline: float,
    ) -> None:
        """Raises InvalidRequest if the grammar cannot be compiled or `resumed` does not match it.

        The error names the schema at fault.
        """
        output, given = params.structured_output, request.sampling.structured_output
        assert output is not None
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                try:
                    await self._compile(output, resumed, params.reasoning)
                except InvalidRequest as error:
                    if output == StructuredOutput.from_proto(given):
                        raise
                    if error.field == "resumed_token_ids":
                        raise
                    for i, tool in enumerate(request.chat.tools):
                        name, schema = "parameters", StructuredOutput(tool.parameters or "{}")
                        if tool.HasField("input"):
                            name, schema = "input", StructuredOutput.from_proto(tool.input)
                        try:
                            await self._compile(schema)
                        except InvalidRequest as tool_error:
                            place = f"chat.tools[{i}].{name}"
                            raise InvalidRequest(str(tool_error), place) from error
                    if request.sampling.HasField("structured_output"):
                        await self._compile(StructuredOutput.from_proto(given))
                    raise InvalidRequest(str(error), "chat.tools") from error
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while a grammar was compiled") from None

    async def _compile(
        self,
        output: StructuredOutput,
        resumed: tuple[int, ...] = (),
        reasoning: Reasoning | None = None,
    ) -> None:
        await asyncio.wrap_future(self._grammars.check(output, resumed, reasoning))

    async def _params(
        self, request: inference_pb2.GenerateRequest, choices: PromptChoices, number: int
    ) -> SamplingParams:
        """A choice's settings; large values are shared with those of the first choice."""
        given = request.sampling
        seed = given.seed + number if given.HasField("seed") else secrets.randbits(64)
        if choices.params is not None:
            top = given.prompt_logprobs if given.HasField("prompt_logprobs") else None
            return replace(choices.params, seed=seed & MAX_SEED, prompt_logprobs=top)
        params = SamplingParams.from_proto(given, seed & MAX_SEED, self.sampling_defaults)
        if request.bad_words:
            params = replace(params, bad_words=await self._bad_words(list(request.bad_words)))
        params = self._with_labels(params)
        params.validate(self.tokenizer.vocab_size)
        choices.params = params
        return params

    def _scoring(self) -> Scoring | None:
        """How the model scores prompts. Raises ConfigError if --score-tokens are no tokens."""
        if not (given := self.limits.score_tokens):
            return self.tokenizer.scoring
        if (found := self.tokenizer.scoring) and not found.token_ids:
            raise ConfigError("--score-tokens: this model has a classification head: leave it out")
        texts = given.split(",")
        if len(texts) != 2:
            raise ConfigError(f"--score-tokens are two texts, as no,yes, not {quoted(given)}")
        try:
            return Scoring.from_tokens([self.tokenizer.token_id(text) for text in reversed(texts)])
        except InvalidRequest as error:
            raise ConfigError(f"--score-tokens: {error}") from error

    def _with_labels(self, params: SamplingParams) -> SamplingParams:
        """The settings with the tokens that score, if the prompt's labels are asked for."""
        scoring = self.scoring
        if params.classification:
            if scoring is None:
                raise InvalidRequest(
                    "this model scores no texts: serve a checkpoint with a classification head, or "
                    "name a reranker's answers by the router's --score-tokens no,yes",
                    "sampling.classification",
                )
            return replace(params, label_token_ids=scoring.token_ids)
        if scoring and not scoring.token_ids and not params.embedding:
            raise InvalidRequest(
                "this model classifies texts and generates none: use /classify, /score or "
                "/v1/rerank",
                "sampling.max_tokens",
            )
        return replace(params, label_token_ids=()) if params.label_token_ids else params

    async def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        if len(words) > MAX_BAD_WORDS or any(len(word) > MAX_STOP_CHARS for word in words):
            raise InvalidRequest(
                f"at most {MAX_BAD_WORDS} texts of {MAX_STOP_CHARS} characters are accepted",
                "bad_words",
            )
        encode = self.tokenizer.bad_words
        if sum(map(len, words)) > MAX_CHARS_AT_ONCE:
            return await self.prompts.run_in_thread(encode, words)
        return encode(words)


def _work_s(request: TokenizedRequest, prefill_rate: float) -> float:
    """Prefill time of the prompt on all workers of its model."""
    tokens = len(request.prompt) + len(request.resumed)
    return tokens / (prefill_rate or _ASSUMED_RATE)
