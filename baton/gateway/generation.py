"""Endpoints: a checked body in, one answer or a stream of chunks out.

Until the first token an error is an HTTP status; after it, the last event of the stream. All
choices of a request run at once, each a request of its own to the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send

from baton.errors import BatonError, InvalidRequest, quoted
from baton.gateway import json_schema
from baton.gateway.http_exchange import (
    EVENTS_TYPE,
    NO_CACHE,
    ClientGone,
    HttpError,
    HttpExchange,
    failure_of,
    parse,
)
from baton.gateway.request import Body, ParsedRequest
from baton.gateway.response_format import DONE, REASONS, Choice, ResponseFormat, ResponseHead
from baton.rpc import MAX_MESSAGE_BYTES
from baton.v1 import inference_pb2
from router.admission.admission import Choices
from router.frontend import Caller, GenerationService

log = logging.getLogger(__name__)

MAX_BODY_BYTES = MAX_MESSAGE_BYTES
_MIN_BODY_BYTES = 2 << 20  # taken however short the context is: several prompts may come together
_BODY_BYTES_PER_TOKEN = 16  # of the context; "151643, " has 8
_LARGE_BODY_BYTES = 64 << 10  # larger ones are parsed on a thread, off the event loop
BODY_TIMEOUT_S = 60.0
_QUOTED = {reason: json.dumps(name) for reason, name in REASONS.items()}

# Takes the choice's number and its next response.
SendResponse = Callable[[int, inference_pb2.GenerateResponse], Awaitable[None]]


def max_body_bytes(max_context: int) -> int:
    """Largest body that is read; `max_context` 0 is not known."""
    most = max_context * _BODY_BYTES_PER_TOKEN or MAX_BODY_BYTES
    return min(max(most, _MIN_BODY_BYTES), MAX_BODY_BYTES)


async def _body_of(
    exchange: HttpExchange, expected: json_schema.Schema, service: GenerationService
) -> Body:
    """The request's body, checked. Raises InvalidRequest or HttpError."""
    max_bytes = max_body_bytes(service.max_context)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            text = await exchange.body(max_bytes, MAX_BODY_BYTES)
    except TimeoutError:
        raise HttpError(408, f"the body took more than {BODY_TIMEOUT_S:.0f} s to come") from None
    if text is None:
        close = ((b"connection", b"close"),)  # what is left of it is not read
        raise HttpError(413, f"the body is over {max_bytes} bytes", close)
    kind = exchange.header(b"content-type").decode("latin-1")
    if len(text) <= _LARGE_BODY_BYTES:
        return _checked(text, kind, expected, service.max_context)
    return await service.in_thread(_checked, text, kind, expected, service.max_context)


def _checked(text: bytes, kind: str, expected: json_schema.Schema, max_context: int) -> Body:
    """What a body holds. JSON is read under any content-type: `curl -d` sends a form's.

    That lets web pages post here, but not with a key, which is no cookie that a browser adds.
    """
    json_schema.check_size(text, max_context)
    try:
        body = parse(text)
    except InvalidRequest as error:
        if "json" in kind.lower():
            raise
        raise InvalidRequest(
            f"{error} (its content-type is {quoted(kind)}: send application/json)"
        ) from error
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    json_schema.check_object(body, expected)
    return body


class Endpoint(ABC):
    """An ASGI application that answers POSTs of one schema; `answer` is what it does."""

    def __init__(self, service: GenerationService, expected: json_schema.Schema) -> None:
        self._service = service
        self._schema = expected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(scope, receive, send)
        try:
            caller = exchange.caller
            self._service.check_key(caller)
            body = await _body_of(exchange, self._schema, self._service)
            async with exchange.while_connected():
                await self.answer(body, caller, exchange)
        except ClientGone as error:
            log.debug("%s: %s", scope["path"], error)
        except Exception as error:
            if exchange.started:
                raise
            failure = failure_of(error)
            headers = [*failure.headers, *exchange.id_headers()]
            await exchange.answer(failure.status, failure.body, headers)

    @abstractmethod
    async def answer(self, body: Body, caller: Caller, exchange: HttpExchange) -> None:
        """Answers a checked body."""


class GenerationEndpoint(Endpoint):
    """/v1/completions or /v1/chat/completions."""

    def __init__(
        self,
        service: GenerationService,
        response_format: ResponseFormat,
        expected: json_schema.Schema,
        parse_body: Callable[[Body], ParsedRequest],
        names: Mapping[str, Sequence[str]],
    ) -> None:
        """`names` says how the router's fields may be called in this API's bodies."""
        super().__init__(service, expected)
        self._format = response_format
        self._parse_body = parse_body
        self._names = names

    async def answer(self, body: Body, caller: Caller, exchange: HttpExchange) -> None:
        """Generates; a client that hangs up cancels that."""
        parsed = self._parse_body(body)
        try:
            run = _Generation(self._service, self._format, parsed, caller, exchange)
            await (run.stream() if parsed.stream else run.whole())
        except InvalidRequest as error:
            name = error.field.removeprefix("sampling.")
            names = self._names.get(name, (name,))
            field = next((known for known in names if known in body), names[0])
            raise InvalidRequest(str(error), field) from error


@dataclass
class _Generation:
    """One request under way."""

    service: GenerationService
    format: ResponseFormat
    parsed: ParsedRequest
    caller: Caller
    exchange: HttpExchange

    def __post_init__(self) -> None:
        parsed, tokenizer = self.parsed, self.service.tokenizer
        self._choices = [
            Choice(self.format.logprobs(tokenizer) if parsed.logprobs else None)
            for _ in range(len(parsed.requests) * parsed.n)
        ]
        self._head = ResponseHead(self.format, "", int(time.time()), parsed.model)
        self._trace_id = ""

    async def whole(self) -> None:
        """Answers when all is done."""
        parsed = self.parsed

        async def keep(index: int, delta: inference_pb2.Delta) -> None:
            choice = self._choices[index]
            choice.text.append(delta.text)
            choice.token_ids.extend(delta.token_ids)
            choice.positions.extend(delta.logprobs)

        await self._generate(keep)
        echoes = [self._text(prompt) for prompt in parsed.echoes]
        answer = self._head.whole(
            self._choices, parsed.n, token_ids=parsed.return_token_ids, echoes=echoes
        )
        await self.exchange.answer(200, answer, self._id_headers())

    async def stream(self) -> None:
        """Answers with a chunk for each step."""
        exchange, head, last = self.exchange, "", DONE

        async def write(index: int, delta: inference_pb2.Delta) -> None:
            nonlocal head
            if not exchange.started:
                head = self._head.opening()
                await exchange.start(200, [EVENTS_TYPE, NO_CACHE, *self._id_headers()])
            await exchange.write(self._chunk(head, index, delta))

        try:
            await self._generate(write)
            if self.parsed.include_usage:
                last = self._head.usage_chunk(self._choices, self.parsed.n) + DONE
        except Exception as error:
            if not exchange.started or isinstance(error, ClientGone):
                raise
            if isinstance(error, BatonError):
                log.warning("request %s failed in its stream: %s", self._head.request_id, error)
            last = b"data: " + failure_of(error).body + b"\n\n" + DONE
        await exchange.end(last)

    async def _generate(
        self, on_delta: Callable[[int, inference_pb2.Delta], Awaitable[None]]
    ) -> None:
        """Gives new output to `on_delta`, with its choice's number; keeps what else comes."""

        async def take(index: int, response: inference_pb2.GenerateResponse) -> None:
            kind, choice = response.WhichOneof("event"), self._choices[index]
            if kind == "delta":
                delta = response.delta
                if delta.finish_reason:
                    choice.reason = REASONS[delta.finish_reason]
                await on_delta(index, delta)
            elif kind == "started":
                self._start(response.started)
            else:
                finish = response.finish
                choice.usage, choice.stop = finish.usage, finish.stop or None
                choice.reason = REASONS[finish.reason]

        await run_choices(self.service, self.parsed, self.caller, take)

    def _start(self, started: inference_pb2.Started) -> None:
        """The first choice to start names the request."""
        if self._head.request_id:
            return
        model = self.parsed.model or self.service.models(self.caller)[0].name
        self._head = replace(self._head, request_id=started.request_id, model=model)
        self._trace_id = started.trace_id

    def _chunk(self, head: str, index: int, delta: inference_pb2.Delta) -> bytes:
        """One choice's new output."""
        parsed, choice = self.parsed, self._choices[index]
        text = delta.text
        if not choice.begun and parsed.echoes:
            text = self._text(parsed.echoes[index // parsed.n]) + text
        piece = self.format.piece(text, not choice.begun)
        choice.begun = True
        entries: Any = choice.logprobs and choice.logprobs.entries(delta.logprobs)
        logprobs = json.dumps(entries) if entries else "null"
        reason = _QUOTED[delta.finish_reason]
        ids = f',"token_ids":{list(delta.token_ids)}' if parsed.return_token_ids else ""
        usage = ',"usage":null' if parsed.include_usage else ""
        return (
            f'{head}"choices":[{{"index":{index},{piece},"logprobs":{logprobs},'
            f'"finish_reason":{reason}{ids}}}]{usage}}}\n\n'
        ).encode()

    def _text(self, prompt: str | Sequence[int]) -> str:
        return prompt if isinstance(prompt, str) else self.service.tokenizer.decode(prompt)

    def _id_headers(self) -> list[tuple[bytes, bytes]]:
        return self.exchange.id_headers(self._head.request_id, self._trace_id)


async def run_choices(
    service: GenerationService, parsed: ParsedRequest, caller: Caller, send: SendResponse
) -> None:
    """Sends the output of n choices of each prompt as it comes; cancelling it cancels all of them.

    They enter one after another: the first is charged as a request to the tenant, and a hundred
    choices of a long prompt must not hold the event loop. Choices of one prompt begin when the
    first of them has its first token: by then its prompt is cached, so that it is computed once.
    If one fails, all end.
    """
    requests, n = parsed.requests, parsed.n
    total = len(requests) * n
    cut = not parsed.max_tokens_given
    if total == 1:
        await service.generate(requests[0], caller, partial(send, 0), Choices(cut_output=cut))
        return
    loop = asyncio.get_running_loop()
    left_s = service.default_timeout_s if caller.time_left_s is None else caller.time_left_s
    deadline = loop.time() + left_s  # one for all, also for those that begin later
    computed = [asyncio.Event() for _ in requests]
    shared = [Choices(total, first=i == 0, cut_output=cut) for i in range(len(requests))]
    entrance = asyncio.Lock()

    async def one(choice: int) -> None:
        index, number = divmod(choice, n)
        prompt = computed[index]
        if number:
            await prompt.wait()
        async with contextlib.AsyncExitStack() as entering:
            await entering.enter_async_context(entrance)

            async def send_on(response: inference_pb2.GenerateResponse) -> None:
                await entering.aclose()
                if response.HasField("delta"):
                    prompt.set()
                await send(choice, response)

            left = replace(caller, time_left_s=deadline - loop.time())
            await service.generate(requests[index], left, send_on, shared[index], number)
            prompt.set()

    try:
        async with asyncio.TaskGroup() as group:
            for choice in range(total):
                group.create_task(one(choice))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
