"""Asks any server with OpenAI's completions or chat API, streamed, on keep-alive connections."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import aiohttp

from baton.bench.demand import Demand, text_of
from baton.bench.outcome import Outcome
from baton.bench.server import Asking
from baton.bench.sse import EventReader
from baton.errors import Unavailable

_ANSWER_S = 10.0  # to name its models
_KEEP_ALIVE_S = 600.0
_TOLD = 300  # characters of an error that are kept


class HttpServer:
    """An OpenAI-compatible server. Must be made where an event loop runs."""

    protocol = "openai"

    def __init__(self, url: str, asking: Asking) -> None:
        self.url = url.rstrip("/")
        base = self.url if self.url.endswith("/v1") else f"{self.url}/v1"
        path = "chat/completions" if asking.prompt_form == "chat" else "completions"
        self._models, self._completions = f"{base}/models", f"{base}/{path}"
        self._asking, self._model = asking, asking.model
        self._timeout = aiohttp.ClientTimeout(total=asking.timeout_s)
        key = {"Authorization": f"Bearer {asking.api_key}"} if asking.api_key else {}
        self._session = aiohttp.ClientSession(
            connector=_connector(asking.keep_alive),
            headers={"Content-Type": "application/json", **key},
            trace_configs=[_connection_trace()],
            auto_decompress=False,
            skip_auto_headers=("Accept-Encoding",),
        )

    async def connect(self) -> str:
        """See `Server`."""
        try:
            timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
            async with self._session.get(self._models, timeout=timeout) as response:
                text = await response.text()
                response.raise_for_status()
            self._model = self._model or json.loads(text)["data"][0]["id"]
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unavailable(f"{self._models} does not answer: {error or 'too slow'}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise Unavailable(f"{self._models} names no model: {text[:_TOLD]!r}") from error
        return self._model

    def body(self, demand: Demand) -> bytes:
        """See `Server`."""
        ids = demand.prompt(self._asking.ids)
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": demand.new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._asking.ignore_eos:
            body["ignore_eos"] = True
        if self._asking.prompt_form == "chat":
            body["messages"] = [{"role": "user", "content": text_of(ids)}]
        else:
            body["prompt"] = ids if self._asking.prompt_form == "ids" else text_of(ids)
        return json.dumps(body, separators=(",", ":")).encode()

    async def send(self, body: bytes, outcome: Outcome) -> None:
        """See `Server`."""
        began = time.monotonic()
        try:
            async with self._session.post(
                self._completions, data=body, timeout=self._timeout, trace_request_ctx=outcome
            ) as response:
                if response.status != 200:
                    told = (await response.text(errors="replace"))[:_TOLD]
                    outcome.failed(f"HTTP_{response.status}", _message(told))
                    return
                await _read(response, outcome, began)
        except TimeoutError:
            outcome.failed("TIMEOUT", f"not finished within {self._asking.timeout_s:g} s")
        except aiohttp.ClientConnectorError as error:
            outcome.failed("UNREACHABLE", str(error))
        except aiohttp.ClientError as error:
            outcome.failed("BROKEN", str(error) or type(error).__name__)
        finally:
            outcome.ended_s = time.monotonic() - began

    async def close(self) -> None:
        """See `Server`."""
        await self._session.close()


def _connector(keep_alive: bool) -> aiohttp.TCPConnector:
    if not keep_alive:
        return aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)


async def _read(response: aiohttp.ClientResponse, outcome: Outcome, began: float) -> None:
    """Reads a stream to its end; each event has the time at which its last bytes were read."""
    events, is_done = EventReader(), False
    while chunk := await response.content.readany():
        now_s = time.monotonic() - began
        for data in events.feed(chunk):
            if data == b"[DONE]":
                is_done = True
            else:
                _note(data, outcome, now_s)
    if outcome.ok and not is_done:
        outcome.failed("INCOMPLETE", "the stream ended without [DONE]")
    outcome.output_tokens = outcome.output_tokens or outcome.received_tokens


def _note(data: bytes, outcome: Outcome, now_s: float) -> None:
    try:
        event = json.loads(data)
        if error := event.get("error"):
            outcome.failed("STREAM_ERROR", str(error.get("message", error))[:_TOLD])
        for choice in event.get("choices") or ():
            if _has_output(choice):
                outcome.got(1, now_s)
        if usage := event.get("usage"):
            _note_usage(usage, outcome)
    except (ValueError, AttributeError, TypeError) as error:
        outcome.failed("GARBLED", f"{error}: {data[:_TOLD]!r}")


def _has_output(choice: dict[str, Any]) -> bool:
    """Whether a chunk brings text; a role alone, or an empty string, is no token."""
    delta = choice.get("delta") or {}
    texts = (choice.get("text"), delta.get("content"), delta.get("reasoning_content"))
    return any(texts) or bool(delta.get("reasoning"))


def _note_usage(usage: dict[str, Any], outcome: Outcome) -> None:
    outcome.prompt_tokens = int(usage.get("prompt_tokens") or 0)
    outcome.output_tokens = int(usage.get("completion_tokens") or 0)
    details = usage.get("prompt_tokens_details") or {}
    if details.get("cached_tokens") is not None:
        outcome.cached_tokens = int(details["cached_tokens"])


def _message(text: str) -> str:
    """The message in an error of OpenAI's shape; else the text as it is."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return text


def _connection_trace() -> aiohttp.TraceConfig:
    """Notes in an outcome that its request had to open a connection."""

    async def opened(session: Any, context: SimpleNamespace, params: Any) -> None:
        if isinstance(outcome := context.trace_request_ctx, Outcome):
            outcome.opened_connection = True

    config = aiohttp.TraceConfig()
    config.on_connection_create_start.append(opened)
    return config
