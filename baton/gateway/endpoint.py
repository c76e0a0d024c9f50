"""Generation over HTTP: a body in, one answer or a stream of chunks out.

Until the first token an error is an HTTP status; after it, the last event of the stream.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import Receive, Scope, Send

from baton.errors import BatonError, InvalidRequest, quoted
from baton.gateway import choices, schema
from baton.gateway.errors import HttpError, failure_of
from baton.gateway.request import Body, Wish
from baton.gateway.shapes import DONE, REASONS, Choice, Head, Shape
from baton.gateway.wire import EVENTS_TYPE, NO_CACHE, ClientGone, Exchange, parse
from baton.rpc import MAX_MESSAGE_BYTES
from baton.v1 import inference_pb2
from router.frontend import Caller, GenerationService

log = logging.getLogger(__name__)

MAX_BODY_BYTES = MAX_MESSAGE_BYTES
_MIN_BODY_BYTES = 2 << 20  # taken however short the context is: several prompts may come together
_BODY_BYTES_PER_TOKEN = 16  # of the context; "151643, " has 8
_LARGE_BODY_BYTES = 64 << 10  # larger ones are parsed on a thread, off the event loop
BODY_TIMEOUT_S = 60.0
_QUOTED = {reason: json.dumps(name) for reason, name in REASONS.items()}


def max_body_bytes(max_context: int) -> int:
    """Largest body that is read; `max_context` 0 is not known."""
    most = max_context * _BODY_BYTES_PER_TOKEN or MAX_BODY_BYTES
    return min(max(most, _MIN_BODY_BYTES), MAX_BODY_BYTES)


async def body_of(
    exchange: Exchange, expected: schema.Schema, service: GenerationService
) -> dict[str, Any]:
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


def _checked(text: bytes, kind: str, expected: schema.Schema, max_context: int) -> dict[str, Any]:
    """What a body holds. JSON is read under any content-type: `curl -d` sends a form's.

    That lets web pages post here, but not with a key, which is no cookie that a browser adds.
    """
    schema.check_extent(text, max_context)
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
    schema.check_object(body, expected)
    return body


class Endpoint(ABC):
    """An ASGI application that answers POSTs of one schema; `answer` is what it does."""

    def __init__(self, service: GenerationService, expected: schema.Schema) -> None:
        self._service = service
        self._schema = expected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            caller = exchange.caller
            self._service.check_key(caller)
            body = await body_of(exchange, self._schema, self._service)
            async with exchange.while_there():
                await self.answer(body, caller, exchange)
        except ClientGone as error:
            log.debug("%s: %s", scope["path"], error)
        except Exception as error:
            if exchange.started:
                raise
            failure = failure_of(error)
            headers = [*failure.headers, *exchange.names()]
            await exchange.answer(failure.status, failure.body, headers)

    @abstractmethod
    async def answer(self, body: Body, caller: Caller, exchange: Exchange) -> None:
        """Answers a checked body."""


class Generation(Endpoint):
    """/v1/completions or /v1/chat/completions."""

    def __init__(
        self,
        service: GenerationService,
        shape: Shape,
        expected: schema.Schema,
        wish_of: Callable[[Body], Wish],
        names: Mapping[str, Sequence[str]],
    ) -> None:
        """`names` says how the service's fields may be called in this API's bodies."""
        super().__init__(service, expected)
        self._shape = shape
        self._wish_of = wish_of
        self._names = names

    async def answer(self, body: Body, caller: Caller, exchange: Exchange) -> None:
        """Generates; a client that hangs up cancels that."""
        wish = self._wish_of(body)
        try:
            run = _Run(self._service, self._shape, wish, caller, exchange)
            await (run.stream() if wish.stream else run.whole())
        except InvalidRequest as error:
            raise InvalidRequest(str(error), self._field(error.field, body)) from error

    def _field(self, name: str, body: Body) -> str:
        """What the caller calls a field that the service complains of."""
        name = name.removeprefix("sampling.")
        names = self._names.get(name, (name,))
        return next((known for known in names if known in body), names[0])


@dataclass
class _Run:
    """One request under way."""

    service: GenerationService
    shape: Shape
    wish: Wish
    caller: Caller
    exchange: Exchange

    def __post_init__(self) -> None:
        tokenizer, shape = self.service.tokenizer, self.shape
        self._choices = [
            Choice(shape.logprobs(tokenizer) if self.wish.logprobs else None)
            for _ in range(len(self.wish.requests) * self.wish.n)
        ]
        self._head = Head(shape, "", int(time.time()), self.wish.model)
        self._trace_id = ""

    async def whole(self) -> None:
        """Answers when all is done."""
        wish = self.wish

        async def keep(index: int, delta: inference_pb2.Delta) -> None:
            choice = self._choices[index]
            choice.text.append(delta.text)
            choice.token_ids.extend(delta.token_ids)
            choice.positions.extend(delta.logprobs)

        await self._generate(keep)
        echoes = [self._text(prompt) for prompt in wish.echoes]
        answer = self._head.whole(
            self._choices, wish.n, token_ids=wish.return_token_ids, echoes=echoes
        )
        await self.exchange.answer(200, answer, self._names())

    async def stream(self) -> None:
        """Answers with a chunk for each step."""
        exchange, head, last = self.exchange, "", DONE

        async def write(index: int, delta: inference_pb2.Delta) -> None:
            nonlocal head
            if not exchange.started:
                head = self._head.opening()
                await exchange.start(200, [EVENTS_TYPE, NO_CACHE, *self._names()])
            await exchange.write(self._chunk(head, index, delta))

        try:
            await self._generate(write)
            if self.wish.include_usage:
                last = self._head.usage_chunk(self._choices, self.wish.n) + DONE
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
        """Gives new output to `on_delta`, with its choice's number; keeps what else is told."""

        async def take(index: int, response: inference_pb2.GenerateResponse) -> None:
            kind, choice = response.WhichOneof("event"), self._choices[index]
            if kind == "delta":
                delta = response.delta
                if delta.finish_reason:
                    choice.reason = REASONS[delta.finish_reason]
                await on_delta(index, delta)
            elif kind == "started":
                self._begin(response.started)
            else:
                finish = response.finish
                choice.usage, choice.stop = finish.usage, finish.stop or None
                choice.reason = REASONS[finish.reason]

        await choices.run(self.service, self.wish.requests, self.wish.n, self.caller, take)

    def _begin(self, started: inference_pb2.Started) -> None:
        """The first choice to start names the request."""
        if self._head.request_id:
            return
        model = self.wish.model or self.service.models(self.caller)[0].name
        self._head = replace(self._head, request_id=started.request_id, model=model)
        self._trace_id = started.trace_id

    def _chunk(self, head: str, index: int, delta: inference_pb2.Delta) -> bytes:
        """One choice's new output."""
        wish, choice = self.wish, self._choices[index]
        text = delta.text
        if not choice.begun and wish.echoes:
            text = self._text(wish.echoes[index // wish.n]) + text
        piece = self.shape.piece(text, not choice.begun)
        choice.begun = True
        told = choice.logprobs and choice.logprobs.told(delta.logprobs)
        logprobs = json.dumps(told) if told else "null"
        reason = _QUOTED[delta.finish_reason]
        ids = f',"token_ids":{list(delta.token_ids)}' if wish.return_token_ids else ""
        usage = ',"usage":null' if wish.include_usage else ""
        return (
            f'{head}"choices":[{{"index":{index},{piece},"logprobs":{logprobs},'
            f'"finish_reason":{reason}{ids}}}]{usage}}}\n\n'
        ).encode()

    def _text(self, prompt: str | Sequence[int]) -> str:
        return prompt if isinstance(prompt, str) else self.service.tokenizer.decode(prompt)

    def _names(self) -> list[tuple[bytes, bytes]]:
        return self.exchange.names(self._head.request_id, self._trace_id)
