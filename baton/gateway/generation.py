"""Endpoints: a body in, one answer or a stream of chunks out.

Until the first token an error is an HTTP status; after it, the last event of the stream. All
choices of a request run at once, each a request of its own to the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from baton.errors import BatonError, Cancelled, InvalidRequest
from baton.gateway import api
from baton.gateway.headers import correlated, id_headers
from baton.gateway.output import ChoiceOutput, usage_of
from baton.gateway.parsed_request import ParsedRequest
from baton.gateway.prompt_logprobs import PromptOutput
from baton.net.http_errors import Failure, Header, failure_of
from baton.net.http_server import HttpExchange
from baton.v1 import inference_pb2
from router.admission.admission import PromptChoices
from router.admission.tenants import ReservedChoices
from router.admission.validation import MAX_PROMPT_LOGPROBS
from router.generation_service import Caller, GenerationService
from router.output.sink import Piece, Sink, UnreadLimit

log = logging.getLogger(__name__)
_ROUTE_HEADER = b"x-baton-route"  # its presence asks for `usage.baton`
_MANY_LOGPROBS = 4096  # of prompts; more are written on a thread
_LOGPROB_BYTES = 64  # of a log-probability in a chunk, with its token, about
KEEP_ALIVE_S = 10.0  # a stream without output for so long gets a comment: proxies cut idle ones
_DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
)
_FUNCTION = re.compile(r"(tools\[\d+\]|tool_calls\[\d+\])\.")  # as fields of both are called here


async def generate(
    kind: Callable[..., Generation],
    service: GenerationService,
    parsed: ParsedRequest,
    caller: Caller,
    exchange: HttpExchange,
) -> None:
    """Answers a request to generate; a client that hangs up cancels it."""
    caller = correlated(exchange, caller, parsed.options.request_id)
    await kind(service, parsed, caller, exchange).run()


@dataclass
class Generation(ABC):
    """One request under way. What it answers with is its endpoint's."""

    service: GenerationService
    parsed: ParsedRequest
    caller: Caller
    exchange: HttpExchange

    def __post_init__(self) -> None:
        self.unread = UnreadLimit()
        self._sent = False  # anything since the last look of `_keep_alive`
        self.created = int(time.time())
        self.model = self.parsed.options.model or self.service.admission.model
        self.started = inference_pb2.Started()  # of the first choice to start

    @property
    @abstractmethod
    def sinks(self) -> Sequence[Sink]:
        """Take the output of each choice; they call `on_start`, and `send` for a stream."""

    @abstractmethod
    async def answer(self) -> bytes:
        """The whole answer, of all that the sinks have taken."""

    @abstractmethod
    def last_event(self, failure: Failure | None) -> bytes:
        """What a stream ends with, by itself or with a failure."""

    @abstractmethod
    def forget(self) -> None:
        """Drops the sinks, which refer to it: it would stay until a garbage collection."""

    async def run(self) -> None:
        """Answers it. Raises InvalidRequest naming the body's field."""
        try:
            await (self._stream() if self.parsed.options.stream else self._whole())
        except InvalidRequest as error:
            name = error.field.removeprefix("sampling.").removeprefix("chat.")
            name = _FUNCTION.sub(r"\1.function.", name)
            raise error.renamed(self.parsed.fields.get(name, name)) from error
        finally:
            self.forget()

    async def _whole(self) -> None:
        """Answers when all is done."""
        await run_choices(self.service, self.parsed, self.caller, self.sinks)
        self.exchange.answer(200, await self.answer())

    async def _stream(self) -> None:
        """Answers with events as the output comes."""
        self._keep_alive()
        try:
            await run_choices(self.service, self.parsed, self.caller, self.sinks)
            last = self.last_event(None)
        except Exception as error:
            if not self.exchange.started:
                raise
            if isinstance(error, BatonError):
                log.warning("request %s failed in its stream: %s", self.started.request_id, error)
            last = self.last_event(failure_of(error))
        finally:
            self._keeping_alive.cancel()
        if not self.exchange.started:  # no token made an event: the first may be reasoning's end
            self.exchange.start(200, _STREAM_HEADERS)
        self.exchange.end(last)

    def _keep_alive(self) -> None:
        """Sends comments while there is no output. From the first one on, errors are events."""
        if self.started.request_id and not self._sent:
            with contextlib.suppress(Cancelled):  # it reads nothing: that ends with its output
                self.send(b": waiting\n\n")
        self._sent = False
        loop = asyncio.get_running_loop()
        self._keeping_alive = loop.call_later(KEEP_ALIVE_S, self._keep_alive)

    def on_start(self, started: inference_pb2.Started) -> None:
        """A choice was admitted."""
        if not self.started.request_id:
            self.started = started
            ids = id_headers(self.exchange, started.request_id, started.trace_id)
            self.exchange.answer_headers = {**self.exchange.answer_headers, **ids}

    def send(self, event: bytes) -> None:
        """Raises Cancelled where the client leaves too much unread."""
        self._sent = True
        if not self.exchange.started:
            self.exchange.start(200, _STREAM_HEADERS)
        self.unread.add(self.exchange.unread_bytes, len(event))
        self.exchange.write(event)

    def usage_of(self, ends: Sequence[inference_pb2.Finish]) -> api.CompletionUsage:
        """Tokens of all choices, which ended so."""
        return usage_of(ends, self.parsed.n, with_routes=_ROUTE_HEADER in self.exchange.headers)


@dataclass
class CompletionGeneration(Generation):
    """A completion's or a chat's."""

    kind: type[ChoiceOutput]

    def __post_init__(self) -> None:
        super().__post_init__()
        parsed, options = self.parsed, self.parsed.options
        told = options.stream_options or api.StreamOptions()
        self._no_usage: dict[str, Any] = {"usage": None} if told.include_usage else {}
        self._with_usage = bool(told.continuous_usage_stats)
        self._prompt_tokens = [0] * parsed.num_prompts
        self._prompt_logprobs = 0  # that have come
        prompts = [self._prompt(index) for index in range(parsed.num_prompts)]
        self._outputs = [
            self.kind(
                index,
                self.service.tokenizer,
                with_logprobs=parsed.logprobs is not None,
                with_token_ids=bool(options.return_token_ids),
                with_reasoning=getattr(options, "include_reasoning", None) is not False,
                with_usage=self._with_usage,
                as_token_ids=bool(options.return_tokens_as_token_ids),
                of_prompt=prompts[index // parsed.n],
                stop_token_ids=options.stop_token_ids or (),
                on_prompt=self._on_prompt,
                start=partial(self._on_start, index // parsed.n),
                event=self._event,
                send=self.send if options.stream else None,
            )
            for index in range(parsed.num_prompts * parsed.n)
        ]

    @property
    def sinks(self) -> Sequence[ChoiceOutput]:
        return self._outputs

    async def answer(self) -> bytes:
        if self._prompt_logprobs > _MANY_LOGPROBS:
            return await self.service.admission.prompts.run_in_thread(self._all)
        return self._all()

    def _all(self) -> bytes:
        outputs, parsed = self._outputs, self.parsed
        if parsed.kept < parsed.n:
            outputs = best_of(outputs, parsed.n, parsed.kept)
        choices = [output.whole() for output in outputs]
        members = self.kind.answer_members(outputs)
        return self._answer(choices=choices, usage=self._usage(), **members)

    def last_event(self, failure: Failure | None) -> bytes:
        if failure is not None:
            return b"data: " + failure.body + b"\n\n" + _DONE
        if self._no_usage:
            return self._chunk(choices=[], usage=self._usage()) + _DONE
        return _DONE

    def forget(self) -> None:
        self._outputs.clear()

    def _on_prompt(self, count: int) -> None:
        """Raises InvalidRequest for more than are told."""
        self._prompt_logprobs += count
        if self._prompt_logprobs > MAX_PROMPT_LOGPROBS:
            what = f"the log-probabilities of all prompts are more than {MAX_PROMPT_LOGPROBS}"
            raise InvalidRequest(f"{what}: send fewer prompts at a time", "prompt_logprobs")
        if self.parsed.options.stream:
            self.unread.allow(count * _LOGPROB_BYTES)

    def _on_start(self, prompt: int, started: inference_pb2.Started) -> None:
        self._prompt_tokens[prompt] = started.prompt_tokens
        self.on_start(started)

    def _event(self, choice: Any) -> bytes:
        if not self._with_usage:
            return self._chunk(choices=[choice], **self._no_usage)
        prompt = self._prompt_tokens[choice.index // self.parsed.n]
        output = self._outputs[choice.index].num_tokens
        return self._chunk(
            choices=[choice], usage=api.CompletionUsage(prompt, output, prompt + output)
        )

    def _chunk(self, **members: Any) -> bytes:
        return b"data: " + self._answer(object=self.kind.chunk_object, **members) + b"\n\n"

    def _answer(self, **members: Any) -> bytes:
        return msgspec.json.encode(
            self.kind.answer(
                id=self.kind.id_prefix + self.started.request_id,
                created=self.created,
                model=self.model,
                **members,
            )
        )

    def _usage(self) -> api.CompletionUsage:
        return self.usage_of([output.end for output in self._outputs])

    def _prompt(self, index: int) -> PromptOutput:
        parsed, echo = self.parsed, ""
        if parsed.echoes:
            prompt: str | Sequence[int] = parsed.echoes[index]
            echo = prompt if isinstance(prompt, str) else self.service.tokenizer.decode(prompt)
            self.unread.allow(parsed.n * len(msgspec.json.encode(echo)))
        return PromptOutput(
            echo, parsed.logprobs if parsed.echoes else None, parsed.options.prompt_logprobs
        )


def best_of(outputs: Sequence[ChoiceOutput], n: int, kept: int) -> list[ChoiceOutput]:
    """Of the `n` outputs of each prompt the likeliest ones, renumbered; of equals the first."""
    best = list[ChoiceOutput]()
    for first in range(0, len(outputs), n):
        ranked = sorted(outputs[first : first + n], key=lambda one: -one.cumulative_logprob)
        best += ranked[:kept]
    for index, output in enumerate(best):
        output.index = index
    return best


async def run_choices(
    service: GenerationService, parsed: ParsedRequest, caller: Caller, sinks: Sequence[Sink]
) -> None:
    """Gives n choices of each prompt to their sinks; cancelling it cancels all of them.

    They enter one after another: the first is charged as a request to the tenant, and a hundred
    choices of a long prompt must not hold the event loop. Choices of one prompt begin when the
    first of them has its first token: by then its prompt is cached, so that it is computed once.
    If one fails, all end: the others that have not entered do not.
    """
    num_prompts, n = parsed.num_prompts, parsed.n
    total = num_prompts * n
    cut = not parsed.max_tokens_given
    if total == 1:
        await service.generate(parsed.request(0), caller, sinks[0], PromptChoices(cut_output=cut))
        return
    loop = asyncio.get_running_loop()
    left_s = (
        service.admission.limits.default_timeout_s
        if caller.time_left_s is None
        else caller.time_left_s
    )
    deadline = loop.time() + left_s  # one for all, also for those that begin later
    computed = [asyncio.Event() for _ in range(num_prompts)]
    reserved = ReservedChoices()
    shared = [
        PromptChoices(total, first=i == 0, cut_output=cut, reserved=reserved)
        for i in range(num_prompts)
    ]
    entrance = asyncio.Semaphore()

    async def one(choice: int) -> None:
        index, number = divmod(choice, n)
        prompt = computed[index]
        if number:
            await prompt.wait()
        await entrance.acquire()
        await asyncio.sleep(0)  # one enters in a turn of the loop, so that others have theirs
        request = parsed.request(index, number)
        shared[index].params = shared[0].params
        sink = _Choice(sinks[choice], entrance.release, prompt.set)
        left = replace(caller, time_left_s=deadline - loop.time())
        await service.generate(request, left, sink, shared[index], number)
        prompt.set()

    try:
        async with asyncio.TaskGroup() as group:
            for choice in range(total):
                group.create_task(one(choice))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    finally:
        reserved.release()


class _Choice:
    """A sink before another that lets the next choices in."""

    def __init__(
        self, sink: Sink, leave: Callable[[], None], on_output: Callable[[], None]
    ) -> None:
        self._sink = sink
        self._leave = leave
        self._on_output = on_output
        self.finish = sink.finish
        self.prompt = sink.prompt

    def start(self, started: inference_pb2.Started) -> None:
        self._leave()
        self._sink.start(started)

    def put(self, piece: Piece) -> None:
        self._on_output()
        self._sink.put(piece)
