"""`baton up`: runs a local cluster until ctrl-C, reports events, draws traces of requests.

SIGHUP restarts its processes one after the other.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from contextlib import AsyncExitStack
from functools import partial

from baton.config import ClusterConfig
from baton.local import supervisor, trace_tree
from baton.local.cluster import LocalCluster
from baton.local.otlp import OtlpReceiver
from baton.local.span_store import SpanStore
from baton.local.supervisor import echo, say
from baton.local.trace_tree import entry_of
from router.admission.tenants import Tenants
from router.grpc_service import authorize

_QUIET_S = 1.0  # exporters flush several times a second: afterwards a trace is complete
_MIN_KEPT = 256  # traces, for drawing: requests may run concurrently
_SPANS_PER_TRACE = 24  # on average, at about 1 KiB a span


async def run(config: ClusterConfig) -> int:
    """Runs the cluster until SIGINT or SIGTERM; see `supervisor.run`."""

    async def start(stack: AsyncExitStack) -> LocalCluster:
        here = await _with_receiver(config, stack)
        cluster = await stack.enter_async_context(LocalCluster(here, say=say, on_line=echo))
        say(_ready_text(cluster, keeps_traces=here is not config))
        return cluster

    status = await supervisor.run(start)
    say("stopped")
    return status


async def _with_receiver(config: ClusterConfig, stack: AsyncExitStack) -> ClusterConfig:
    """`config` with an OTLP receiver of this process, for `baton trace` and `--trace`."""
    if not (config.trace or config.keep_traces):
        return config
    kept = max(config.keep_traces, _MIN_KEPT if config.trace else 0)
    # Traces may be read with the routers' keys.
    store = SpanStore(kept, kept * _SPANS_PER_TRACE)
    if config.trace:
        drawing = asyncio.create_task(_draw_finished(store))
        stack.callback(drawing.cancel)
    tenants = Tenants(config.limits.tenants_file, api_keys=config.limits.api_keys)
    reloading = asyncio.create_task(tenants.follow())
    stack.callback(reloading.cancel)
    receiver = OtlpReceiver(store, authorize=partial(authorize, tenants))
    await stack.enter_async_context(receiver)
    otlp = ",".join(filter(None, (receiver.address, config.otlp)))  # the first is `baton trace`'s
    return dataclasses.replace(config, otlp=otlp)


async def _draw_finished(store: SpanStore) -> None:
    """Draws each request's trace once, when it is complete."""
    drawn: set[str] = set()
    while True:
        await asyncio.sleep(_QUIET_S / 4)
        quiet = time.monotonic() - _QUIET_S
        traces = {spans[0].trace_id: spans for spans in store.traces()}
        drawn &= traces.keys()
        for trace_id, spans in traces.items():
            is_new = trace_id not in drawn and store.arrived_at(trace_id) < quiet
            if is_new and entry_of(spans):
                drawn.add(trace_id)
                say("\n" + trace_tree.render(spans, trace_tree.width()))


def _ready_text(cluster: LocalCluster, keeps_traces: bool) -> str:
    """The cluster's addresses, with commands to try."""
    target = "" if cluster.targets == "127.0.0.1:7700" else f" --target {cluster.targets}"
    scheme, curl = "http", "curl"
    if cluster.certs:
        ca = cluster.certs / "ca.pem"
        target, scheme, curl = f"{target} --tls-ca {ca}", "https", f"curl --cacert {ca}"
    commands = ["generate 'class Stack:'", "status", "top", *(["trace"] if keeps_traces else [])]
    limits = cluster.config.limits
    has_keys = bool(limits.api_keys or limits.tenants_file)
    where = "In another terminal" + (", with your key in KEY and BATON_API_KEY" if has_keys else "")
    lines = [
        f"ready: {cluster.targets}, etcd {cluster.etcd_address}. {where}:",
        *(f"  baton {command}{target}" for command in commands),
    ]
    if cluster.http_addresses:
        page = f"{scheme}://{cluster.http_addresses[0]}/"
        url = f"{page}v1"
        body = '{"prompt": "class Stack:", "max_tokens": 32}'
        key = ' -H "authorization: Bearer $KEY"' if has_keys else ""
        any_key = "your api_key" if has_keys else "any api_key"
        chat = "a chat in the browser"
        if cluster.config.sources[0].path == "demo":
            chat = "a page in the browser (the demo model continues Python; it does not chat)"
        lines += [
            f"  {curl} {url}/completions{key} -H 'content-type: application/json' -d '{body}'",
            f"{chat}: {page}; OpenAI's clients: base_url={url}, {any_key}",
        ]
    if cluster.metrics:
        served = ", ".join(f"{name} {address}" for name, address in cluster.metrics.items())
        lines.append(f"metrics at {scheme}://HOST:PORT/metrics of {served}")
    if not (limits.access_log and cluster.config.log_level in ("debug", "info")):
        lines.append("requests are not logged: --access-log 1 --log-level info gives each a line")
    return "\n".join([*lines, "ctrl-C stops it"])
