"""Generation over HTTP: runs a request's choices, answers whole or in events (`sse.py`).

Before the first token an error is an HTTP status; after it, the last event of the stream. Each
choice is one request to the generation service.
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
from msgspec import UNSET

from baton.errors import BatonError, Cancelled, InvalidRequest, without_frames
from baton.gateway import answers, openai, sse
from baton.gateway.endpoint import Call
from baton.gateway.errors import failure_at
from baton.gateway.headers import session_of
from baton.gateway.output import ChoiceOutput, PromptOutput, usage_of
from baton.gateway.parsed_request import ParsedRequest
from baton.net.http_errors import Failure
from baton.v1 import inference_pb2
from router.admission.admission import PromptChoices
from router.admission.tenants import ReservedChoices
from router.admission.validation import MAX_PROMPT_LOGPROBS
from router.generation_service import Caller, GenerationService
from router.models import Target
from router.output.sink import Piece, Sink, UnreadLimit

log = logging.getLogger(__name__)
_ROUTE_HEADER = b"x-baton-route"  # its presence asks for `usage.baton`
DROPPED_HEADER = b"x-baton-dropped-tools"
_MAX_DROPPED_SHOWN = 16
_MANY_LOGPROBS = 4096  # of prompts; more are encoded in a thread
_MAX_AT_ONCE = 256  # choices of a request
_LOGPROB_BYTES = 64  # approximate size of a log-probability in a chunk


async def generate(kind: Callable[..., Generation], parsed: ParsedRequest, call: Call) -> None:
    """Answers a request; a client that disconnects cancels it."""
    await kind(parsed, call.with_request_id(parsed.options.request_id)).run()


@dataclass
class Generation(ABC):
    """One request. Subclasses write the answer of their endpoint."""

    parsed: ParsedRequest
    call: Call

    def __post_init__(self) -> None:
        self.service, self.caller = self.call.service, self.call.caller
        self.exchange = self.call.exchange
        self.unread = UnreadLimit()
        self._sent = False  # whether an event was sent since the last `_keep_alive`
        self.created = int(time.time())
        base = self.parsed.base
        base.session = base.session or session_of(self.exchange)
        self.target = self.service.resolve(base.model, base.session, self.caller)
        self.admission = self.target.version.admission
        self.model = base.model or self.target.version.name
        self.started = inference_pb2.Started()  # of the first choice that started
        if dropped := ", ".join(self.parsed.options.dropped_tools[:_MAX_DROPPED_SHOWN]):
            what = f"tools that are no functions: {dropped}"
            if self.service.limits.unknown_tools == "refuse":
                raise InvalidRequest(f"{what}: leave them out", "tools")
            if base.chat.tool_choice == inference_pb2.TOOL_CHOICE_REQUIRED and not base.chat.tools:
                raise InvalidRequest(f"required calls need a function, not {what}", "tool_choice")

    @property
    @abstractmethod
    def sinks(self) -> Sequence[Sink]:
        """One for each choice; they call `on_start`, and `send` in a stream."""

    @abstractmethod
    async def answer(self) -> bytes:
        """Encodes the answer from the output in the sinks."""

    @abstractmethod
    def last_event(self, failure: Failure | None) -> bytes:
        """Encodes the end of a stream, after success or a failure."""

    def waiting(self) -> bytes:
        """Encodes what an idle stream is kept open with."""
        return sse.WAITING

    @abstractmethod
    def release(self) -> None:
        """Drops the sinks, whose references to this object would keep it alive."""

    async def run(self) -> None:
        """Runs and answers the request. Raises InvalidRequest naming the body's field."""
        try:
            await (self._stream() if self.parsed.options.stream else self._whole())
        except InvalidRequest as error:
            raise self.parsed.renamed(error) from error
        finally:
            self.release()

    async def _run_choices(self) -> None:
        self.exchange.is_counted = True
        await run_choices(self.service, self.parsed, self.caller, self.sinks, self.target)

    async def _whole(self) -> None:
        """Answers when all choices have finished."""
        await self._run_choices()
        self.exchange.answer(200, await self.answer())

    async def _stream(self) -> None:
        """Answers with events as the output comes."""
        self._keep_alive()
        try:
            await self._run_choices()
            last = self.last_event(None)
        except Exception as error:
            if not self.exchange.started:
                raise
            if isinstance(error, BatonError):
                log.warning("request %s failed in its stream: %s", self.started.request_id, error)
            last = self.last_event(failure_at(self.exchange, error))
        finally:
            self._keeping_alive.cancel()
        if (
            not self.exchange.started
        ):  # no token caused an event, as when the only one ends reasoning
            self.exchange.start(200, sse.HEADERS)
        self.exchange.end(last)

    def _keep_alive(self) -> None:
        """Sends something while there is no output. After the first time, errors are events."""
        if self.started.request_id and not self._sent:
            with contextlib.suppress(Cancelled):  # the next output reports that nothing is read
                self.send(self.waiting())
        self._sent = False
        loop = asyncio.get_running_loop()
        self._keeping_alive = loop.call_later(sse.KEEP_ALIVE_S, self._keep_alive)

    def on_start(self, started: inference_pb2.Started) -> None:
        """Called when a choice is admitted."""
        if not self.started.request_id:
            self.started = started
            ids = self.call.started_headers(started) | self.call.limit_headers()
            if dropped := self.parsed.options.dropped_tools:
                types = [re.sub(r"[^\w.-]", "?", one) for one in dropped[:_MAX_DROPPED_SHOWN]]
                ids[DROPPED_HEADER] = ", ".join(types).encode("ascii", "replace")
                text = "request %s: tools that are no functions were dropped: %s"
                log.info(text, started.request_id, ", ".join(types))
            self.exchange.answer_headers |= ids

    def send(self, event: bytes) -> None:
        """Sends an event of the stream. Raises Cancelled if too much is unread."""
        self._sent = True
        if not self.exchange.started:
            self.exchange.start(200, sse.HEADERS)
        self.unread.add(self.exchange.unread_bytes, len(event))
        self.exchange.write(event)

    def usage_of(self, ends: Sequence[inference_pb2.Finish]) -> answers.CompletionUsage:
        """The usage of all choices, from their `Finish` messages."""
        return usage_of(ends, self.parsed.n, with_routes=_ROUTE_HEADER in self.exchange.headers)


@dataclass
class CompletionGeneration(Generation):
    """A completion or a chat."""

    kind: type[ChoiceOutput]

    def __post_init__(self) -> None:
        super().__post_init__()
        parsed, options = self.parsed, self.parsed.options
        stream_options = options.stream_options or openai.StreamOptions()
        self._no_usage: dict[str, Any] = {"usage": None} if stream_options.include_usage else {}
        self._with_usage = bool(stream_options.continuous_usage_stats)
        self._prompt_tokens = [0] * parsed.num_prompts
        self._prompt_logprobs = 0  # received so far
        prompts = [self._prompt(index) for index in range(parsed.num_prompts)]
        self._outputs = [
            self.kind(
                index,
                self.admission.tokenizer,
                with_logprobs=parsed.logprobs is not None,
                with_token_ids=bool(options.return_token_ids),
                with_reasoning=getattr(options, "include_reasoning", None) is not False,
                with_usage=self._with_usage,
                as_token_ids=bool(options.return_tokens_as_token_ids),
                prompt_output=prompts[index // parsed.n],
                stop_token_ids=options.stop_token_ids or (),
                custom_tools=options.custom_tools,
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
            return await self.admission.prompts.run_in_thread(self._all)
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
            return sse.data(failure.body) + sse.DONE
        if self._no_usage:
            return self._chunk(choices=[], usage=self._usage()) + sse.DONE
        return sse.DONE

    def release(self) -> None:
        self._outputs.clear()

    def _on_prompt(self, count: int) -> None:
        """Counts received log-probabilities. Raises InvalidRequest if there are too many."""
        self._prompt_logprobs += count
        if self._prompt_logprobs > MAX_PROMPT_LOGPROBS:
            what = f"the prompts have more than {MAX_PROMPT_LOGPROBS} log-probabilities in all"
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
            choices=[choice], usage=answers.CompletionUsage(prompt, output, prompt + output)
        )

    def _chunk(self, **members: Any) -> bytes:
        return sse.data(self._answer(object=self.kind.chunk_object, **members))

    def _answer(self, **members: Any) -> bytes:
        return msgspec.json.encode(
            self.kind.answer(
                id=self.kind.id_prefix + self.started.request_id,
                created=self.created,
                model=self.model,
                system_fingerprint=self.admission.system_fingerprint,
                service_tier=self.parsed.options.service_tier or UNSET,
                **members,
            )
        )

    def _usage(self) -> answers.CompletionUsage:
        return self.usage_of([output.end for output in self._outputs])

    def _prompt(self, index: int) -> PromptOutput:
        parsed, echo = self.parsed, ""
        if parsed.echoes:
            prompt: str | Sequence[int] = parsed.echoes[index]
            echo = prompt if isinstance(prompt, str) else self.admission.tokenizer.decode(prompt)
            self.unread.allow(parsed.n * len(msgspec.json.encode(echo)))
        return PromptOutput(
            echo, parsed.logprobs if parsed.echoes else None, parsed.options.prompt_logprobs
        )


def best_of(outputs: Sequence[ChoiceOutput], n: int, kept: int) -> list[ChoiceOutput]:
    """The `kept` likeliest of each prompt's `n` outputs, renumbered; the first of equals."""
    best = list[ChoiceOutput]()
    for first in range(0, len(outputs), n):
        ranked = sorted(outputs[first : first + n], key=lambda one: -one.cumulative_logprob)
        best += ranked[:kept]
    for index, output in enumerate(best):
        output.index = index
    return best


async def run_choices(
    service: GenerationService,
    parsed: ParsedRequest,
    caller: Caller,
    sinks: Sequence[Sink],
    target: Target,
) -> None:
    """Runs n choices of each prompt, `_MAX_AT_ONCE` at a time; cancelling it cancels all of them.

    Choices are admitted one after the other, because the first is charged as the tenant's request,
    and because a hundred choices of a long prompt must not block the event loop. A prompt's other
    choices start once the first has its first token: the prompt is cached then, and is computed
    once. If a choice fails, all end. All have one trace and one arrival.
    """
    if (total := parsed.num_prompts * parsed.n) > 1:
        with service.group(caller, total) as grouped:
            await _run_several(service, parsed, grouped, sinks, target)
        return
    choices = PromptChoices(cut_output=not parsed.max_tokens_given)
    await service.generate(parsed.request(0), caller, sinks[0], choices, target=target)


async def _run_several(
    service: GenerationService,
    parsed: ParsedRequest,
    caller: Caller,
    sinks: Sequence[Sink],
    target: Target,
) -> None:
    """Runs the choices of a group; see `run_choices`."""
    num_prompts, n = parsed.num_prompts, parsed.n
    total = num_prompts * n
    cut = not parsed.max_tokens_given
    # Shared by all choices, including those that start later.
    caller = replace(caller, deadline=service.deadline_of(caller))
    reserved = ReservedChoices()
    shared = [
        PromptChoices(total, n, first=i == 0, cut_output=cut, reserved=reserved)
        for i in range(num_prompts)
    ]
    ready, computed = asyncio.Queue[int](), set[int]()  # choices that may start; prompts
    for first in range(0, total, n):
        ready.put_nowait(first)
    entrance, running = asyncio.Semaphore(), asyncio.Semaphore(_MAX_AT_ONCE)

    def on_computed(index: int) -> None:
        if index not in computed:
            computed.add(index)
            for choice in range(index * n + 1, (index + 1) * n):
                ready.put_nowait(choice)

    async def one(choice: int) -> None:
        index, number = divmod(choice, n)
        request = parsed.request(index, number)
        shared[index].params = shared[0].params
        sink = _ChoiceSink(sinks[choice], entrance.release, partial(on_computed, index))
        own_id = "" if choice else caller.own_id
        try:
            one_caller = replace(caller, own_id=own_id)
            await service.generate(request, one_caller, sink, shared[index], number, target)
        except asyncio.CancelledError as end:
            without_frames(end)
            raise
        on_computed(index)
        running.release()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(total):  # tasks are made one by one: to cancel a thousand takes long
                choice = await ready.get()
                await running.acquire()
                await entrance.acquire()
                await asyncio.sleep(0)  # one admission per iteration of the event loop
                group.create_task(one(choice))
    except ExceptionGroup as failed:
        error = failed.exceptions[0]
        without_frames(failed)
    else:
        return
    finally:
        reserved.release()
    raise error  # not above, where each of the two would keep the other


class _ChoiceSink:
    """Forwards to a sink, and lets further choices start."""

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
