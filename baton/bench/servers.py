"""Clients of the servers under load: Baton routers over gRPC, OpenAI-compatible ones over HTTP.

Requests are sent once, without retries and without the SDK.
"""

from __future__ import annotations

import abc
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import grpc
from aiohttp.http_exceptions import LineTooLong

from baton import config
from baton.bench.request import Demand, Outcome, RequestOptions, text_of
from baton.errors import ConfigError, DeadlineExceeded, RetryableError, Unavailable
from baton.net import rpc, tls
from baton.v1 import inference_pb2, inference_pb2_grpc

_GENERATE = "/baton.v1.InferenceService/Generate"
_MODELS_TIMEOUT_S = 10.0
_KEEP_ALIVE_S = 600.0
_MESSAGE_CHARS = 300  # most of an error message


class Server(abc.ABC):
    """A server under load. Must be constructed in a running event loop."""

    protocol: str  # "grpc" or "openai"

    def __init__(self, url: str, options: RequestOptions) -> None:
        self.url, self._options = url, options
        self.model = options.model  # set by `connect` if empty

    @abc.abstractmethod
    async def connect(self) -> None:
        """Connects and finds the model. Raises BatonError if the server does not answer."""

    @abc.abstractmethod
    def body(self, demand: Demand) -> bytes:
        """The serialised request, built before it is due."""

    @abc.abstractmethod
    async def send(self, body: bytes, outcome: Outcome, began: float) -> None:
        """Sends a request and records the outcome, also of errors; raises only CancelledError.

        `began`: start of its times, as time.monotonic().
        """

    @abc.abstractmethod
    async def close(self) -> None: ...


@asynccontextmanager
async def connected(url: str, options: RequestOptions) -> AsyncIterator[Server]:
    """Connects to a server, by the form of its URL. Raises BatonError."""
    server: Server
    if url.startswith(("http://", "https://")):
        server = HttpServer(url, options)
    elif "://" not in url or url.startswith("grpc://"):
        address = url.removeprefix("grpc://")
        config.split_address(address, "--target")
        server = GrpcServer(address, options)
    else:
        raise ConfigError(f"{url} is no server: give HOST:PORT, grpc://HOST:PORT or an http URL")
    try:
        await server.connect()
        yield server
    finally:
        await server.close()


class GrpcServer(Server):
    """A Baton router."""

    protocol = "grpc"

    def __init__(self, address: str, options: RequestOptions) -> None:
        super().__init__(f"grpc://{address}", options)
        self._channel = rpc.channel(address)
        self._metadata = rpc.bearer(options.api_key)
        self._generate: Any = self._channel.unary_stream(
            _GENERATE,
            request_serializer=None,  # bodies are bytes
            response_deserializer=inference_pb2.GenerateResponse.FromString,
        )

    async def connect(self) -> None:
        list_models = inference_pb2_grpc.InferenceServiceStub(self._channel).ListModels
        request = inference_pb2.ListModelsRequest()
        try:
            with rpc.translated():
                answer = await list_models(
                    request, timeout=_MODELS_TIMEOUT_S, metadata=self._metadata
                )
        except (Unavailable, DeadlineExceeded) as error:
            raise Unavailable(
                f"no Baton router answers at {self.url} (`baton up` starts one): {error}"
            ) from error
        self.model = self.model or answer.models[0].name

    def body(self, demand: Demand) -> bytes:
        options = self._options
        request = inference_pb2.GenerateRequest(
            model=options.model, ttft_target_ms=options.ttft_target_ms
        )
        ids = demand.prompt(options.ids)
        if options.prompt_form == "ids":
            request.token_ids.ids.extend(ids)
        elif options.prompt_form == "text":
            request.text = text_of(ids)
        else:
            request.chat.messages.add(role="user", content=text_of(ids))
        request.sampling.max_tokens = demand.new_tokens
        request.sampling.ignore_eos = not options.stop_at_eos
        return request.SerializeToString()

    async def send(self, body: bytes, outcome: Outcome, began: float) -> None:
        call = self._generate(body, timeout=self._options.timeout_s, metadata=self._metadata)
        try:
            while (response := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                if response.HasField("delta"):
                    if tokens := len(response.delta.token_ids):
                        outcome.add_tokens(tokens, time.monotonic() - began)
                elif response.HasField("finish"):
                    usage, outcome.finish = response.finish.usage, response.finish
                    outcome.prompt_tokens = usage.prompt_tokens
                    outcome.output_tokens = usage.completion_tokens
                    outcome.cached_tokens = usage.cached_tokens
            if outcome.finish is None:
                outcome.fail("INCOMPLETE", "the stream ended without its last message")
        except grpc.RpcError as error:
            outcome.fail(error.code().name, error.details() or "")
            if isinstance(translated := rpc.error_of(error), RetryableError):
                outcome.retry_after_s = translated.retry_after_s
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close(None)


class HttpServer(Server):
    """An OpenAI-compatible server."""

    protocol = "openai"

    def __init__(self, url: str, options: RequestOptions) -> None:
        super().__init__(url.rstrip("/"), options)
        base = self.url if self.url.endswith("/v1") else f"{self.url}/v1"
        path = "chat/completions" if options.prompt_form == "chat" else "completions"
        self._models, self._completions = f"{base}/models", f"{base}/{path}"
        self._timeout = aiohttp.ClientTimeout(total=options.timeout_s)
        called = tls.current()
        self._name = called.server_name or None  # in the certificate; None: the host
        key = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        kept: Any = (
            {"keepalive_timeout": _KEEP_ALIVE_S} if options.keep_alive else {"force_close": True}
        )
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_start.append(_note_connection)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=called.client_context(), **kept),
            headers={"Content-Type": "application/json", **key},
            trace_configs=[trace],
            auto_decompress=False,
            skip_auto_headers=("Accept-Encoding",),
        )

    async def connect(self) -> None:
        try:
            timeout = aiohttp.ClientTimeout(total=_MODELS_TIMEOUT_S)
            async with self._session.get(
                self._models, timeout=timeout, server_hostname=self._name
            ) as response:
                text = await response.text(errors="replace")
                response.raise_for_status()
            self.model = self.model or json.loads(text)["data"][0]["id"]
        except aiohttp.ClientConnectorCertificateError as error:
            raise Unavailable(
                f"{self._models}: name its certificate's authority with --tls-ca, and its name, if "
                f"that is not its host, with --tls-name ({error.certificate_error})"
            ) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unavailable(f"{self._models} does not answer: {error or 'too slow'}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise Unavailable(
                f"{self._models} lists no model: {text[:_MESSAGE_CHARS]!r}"
            ) from error

    def body(self, demand: Demand) -> bytes:
        options = self._options
        ids = demand.prompt(options.ids)
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": demand.new_tokens,
            "temperature": 0,
            "stream": options.stream,
        }
        if options.stream:
            body["stream_options"] = {"include_usage": True}
        if not options.stop_at_eos:
            body["ignore_eos"] = True
        if options.prompt_form == "chat":
            body["messages"] = [{"role": "user", "content": text_of(ids)}]
        else:
            body["prompt"] = ids if options.prompt_form == "ids" else text_of(ids)
        return json.dumps(body, separators=(",", ":")).encode()

    async def send(self, body: bytes, outcome: Outcome, began: float) -> None:
        try:
            async with self._session.post(
                self._completions,
                data=body,
                timeout=self._timeout,
                trace_request_ctx=outcome,
                server_hostname=self._name,
            ) as response:
                if response.status != 200:
                    text = (await response.text(errors="replace"))[:_MESSAGE_CHARS]
                    outcome.fail(f"HTTP_{response.status}", _error_message(text))
                elif self._options.stream:
                    await _read_stream(response, outcome, began)
                else:
                    _record_event(await response.read(), outcome, time.monotonic() - began)
        except TimeoutError:
            outcome.fail("TIMEOUT", f"not finished within {self._options.timeout_s:g} s")
        except aiohttp.ClientConnectorError as error:
            outcome.fail("UNREACHABLE", str(error))
        except aiohttp.ClientError as error:
            outcome.fail("BROKEN", str(error) or type(error).__name__)
        except (ValueError, LineTooLong) as error:  # a line too long for an event
            outcome.fail("GARBLED", str(error))

    async def close(self) -> None:
        await self._session.close()


async def _read_stream(response: aiohttp.ClientResponse, outcome: Outcome, began: float) -> None:
    """Reads server-sent events to their end; an event's time is that of its last line.

    Source: WHATWG HTML Living Standard, section 9.2; completions use only `data` fields.
    """
    is_done, data = False, list[bytes]()
    async for line in response.content:
        if line.startswith(b"data:"):
            data.append(line[5:].rstrip(b"\r\n").removeprefix(b" "))
        elif data and not line.strip(b"\r\n"):
            event, data = b"\n".join(data), []
            if event == b"[DONE]":
                is_done = True
            else:
                _record_event(event, outcome, time.monotonic() - began)
    if outcome.ok and not is_done:
        outcome.fail("INCOMPLETE", "the stream ended without [DONE]")
    outcome.output_tokens = outcome.output_tokens or sum(outcome.token_counts)


def _record_event(data: bytes, outcome: Outcome, now_s: float) -> None:
    try:
        event = json.loads(data)
        if error := event.get("error"):
            outcome.fail("STREAM_ERROR", str(error.get("message", error))[:_MESSAGE_CHARS])
        for choice in event.get("choices") or ():
            if _has_output(choice):
                outcome.add_tokens(1, now_s)
        if usage := event.get("usage"):
            outcome.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            outcome.output_tokens = int(usage.get("completion_tokens") or 0)
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            outcome.cached_tokens = None if cached is None else int(cached)
    except (ValueError, AttributeError, TypeError) as error:
        outcome.fail("GARBLED", f"{error}: {data[:_MESSAGE_CHARS]!r}")


def _has_output(choice: dict[str, Any]) -> bool:
    """Whether a chunk has text; a role or an empty string is no token."""
    delta = choice.get("delta") or choice.get("message") or {}
    names = ("content", "reasoning_content", "reasoning")
    return bool(choice.get("text")) or any(map(delta.get, names))


def _error_message(text: str) -> str:
    """The message of an error in OpenAI's format; else the text."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return text


async def _note_connection(session: Any, context: SimpleNamespace, params: Any) -> None:
    """Records in an outcome that its request opened a connection."""
    if isinstance(outcome := context.trace_request_ctx, Outcome):
        outcome.opened_connection = True
