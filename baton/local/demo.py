"""`baton demo`: starts a cluster, completes a prompt, shows its route and trace, and stops."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from functools import partial

from baton.client import AsyncClient, Completion
from baton.config import ClusterConfig
from baton.errors import DeadlineExceeded
from baton.local import trace_tree
from baton.local.cluster import LocalCluster
from baton.local.otlp import OtlpReceiver
from baton.local.span_store import Span, SpanStore, is_complete
from baton.local.supervisor import INTERRUPTED, cancel_on_signals, echo, say
from baton.telemetry import tracing

_TOKENS = 64
_PROMPT = '''\
"""A cache of values."""

import threading
import time


class Cache:
    """Keep the values that were used last."""

    def __init__(self, maxsize=128):
        self.maxsize = maxsize
        self._cache = {}
        self._lock = threading.Lock()

    def get(self, key, default=None):
        """Return the value for key, or default."""
        with self._lock:
'''
_SERVICES = ("baton-client", "baton-router", "baton-prefill", "baton-decode")
_REQUEST_S = 60.0
_TRACE_S = 10.0


async def run() -> int:
    """Runs the demo; returns 0 if every step worked, else raises BatonError with the cause."""
    cancel_on_signals()
    began = time.monotonic()
    try:
        async with OtlpReceiver(SpanStore()) as receiver:
            spans = await _show(receiver)
    except asyncio.CancelledError:
        say("interrupted: everything is stopped")
        return INTERRUPTED
    whole = is_complete(spans, _SERVICES)
    say(f"\nstopped; the whole demo took {time.monotonic() - began:.1f} s. Next: baton up")
    return 0 if whole else 1


async def _show(receiver: OtlpReceiver) -> Sequence[Span]:
    """Starts the cluster, runs the completion and stops; returns the spans of its trace."""
    _step(1, "Starting etcd, a router, one prefill and one decode worker of the demo model.")
    began = time.monotonic()

    def detail(text: str) -> None:
        say(f"  {time.monotonic() - began:5.1f} s  {text}")

    config = ClusterConfig(port=0, otlp=receiver.address, restart=False)
    async with LocalCluster(config, say=detail, on_line=echo) as cluster:
        _step(2, f"Completing {len(_PROMPT.splitlines())} lines of Python, {_TOKENS} tokens:")
        print(_PROMPT, end="", flush=True)
        own = tracing.setup("baton-client", receiver.address)
        with own.tracer.start_as_current_span("generate") as span:
            async with (
                AsyncClient(cluster.address) as client,
                client.stream(
                    _PROMPT, max_tokens=_TOKENS, temperature=0, timeout=_REQUEST_S
                ) as stream,
            ):
                async for delta in stream:
                    print(_bright(delta.text), end="", flush=True)
        print()
        await asyncio.to_thread(own.close)
        _step(3, "The route it took:")
        say(_route_text(stream.completion))
        _step(4, "Its trace, as client, router, prefill and decode recorded it:")
        complete = partial(is_complete, services=_SERVICES)
        trace_id = tracing.trace_id_of(span)
        try:
            await receiver.store.wait_for(trace_id, complete, _TRACE_S)
        except DeadlineExceeded as error:
            say(f"warning: {error}")
        spans = receiver.store.trace(trace_id)
        say(trace_tree.render(spans))
        _step(5, "Stopping the router, the workers and etcd.")
    return spans


def _route_text(completion: Completion) -> str:
    route, timing, usage = completion.route, completion.timing, completion.usage
    moved = trace_tree.bytes_text(timing.transfer_bytes)
    lines = [
        f"prefill by {route.prefill}, decode by {route.decode}",
        f"KV cache moved over {route.transport}: {moved} in {timing.transfer_ms:.1f} ms",
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} from a cache), "
        f"{usage.completion_tokens} generated, finish reason: {completion.finish_reason}",
        f"first token after {timing.ttft_ms:.0f} ms, then one each {timing.tpot_ms:.1f} ms, "
        f"{timing.e2e_ms:.0f} ms in all",
    ]
    return "\n".join(f"  {line}" for line in lines)


def _step(number: int, text: str) -> None:
    say(f"\n[{number}/5] {text}")


def _bright(text: str) -> str:
    """Highlights the model's output on a terminal."""
    return f"\x1b[1;32m{text}\x1b[0m" if text and sys.stdout.isatty() else text
