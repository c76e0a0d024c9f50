"""`python -m tests.fuzz --minutes 5 [--seed N]`: almost valid inputs to everything that reads any.

Parsers are called here; HTTP and every RPC go to a running cluster of simulated engines. A parser
may raise the errors it promises, within a second; a process may refuse with any status but UNKNOWN,
or INTERNAL for an exception that is not one of ours. At the end every process is the one that was
started, has logged no traceback, holds no block, has not grown, and serves. Then requests come one
at a time, large ones too, and none may keep the router's event loop from others for 50 ms of CPU
time. The exit status is 0 only if all that held; an input that broke it is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import re
import secrets
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import httpx
import psutil

from baton.client import AsyncClient
from baton.config import ApiConfig, ClusterConfig, EngineConfig
from baton.engine.checkpoint.tensor_headers import stored_tensors
from baton.engine.models.model_config import ModelConfig
from baton.errors import CheckpointError, ConfigError, InvalidRequest
from baton.gateway.batch_runner import parse_line
from baton.gateway.chat_completions import parse_chat
from baton.gateway.completions import parse_completion
from baton.gateway.messages import parse_message
from baton.gateway.responses import parse_response
from baton.gateway.tokenize import parse_tokenize
from baton.local import ports
from baton.local.child import tied
from baton.local.cluster import LocalCluster
from baton.local.commands import PROGRAM
from baton.local.otlp import OtlpReceiver
from baton.local.process import ChildProcess
from baton.local.span_store import SpanStore
from baton.net import rpc
from baton.registry.membership import ROLES, decode
from baton.text.chat_template import ChatTemplate
from baton.v1 import (
    common_pb2,
    decode_pb2,
    dispatch_pb2,
    externalscaler_pb2,
    fleet_pb2,
    handoff_pb2,
    inference_pb2,
    prefill_pb2,
    route_pb2,
    trace_pb2,
    worker_pb2,
)
from tests.cluster.oracle import all_blocks_free
from tests.fuzz import inputs
from tests.fuzz.inputs import Mutator

MAX_PARSE_S = 1.0
MAX_STALL_S = 0.05  # CPU time
CALLERS = 8
_FINE = (503, 504, 529)  # of the statuses from 500 on
_ID = re.compile(rb'"id":\s*"((resp_|conv_|file-|batch_)\w+)"')
GROWTH = 64 << 20  # bytes that a process may grow by, beside a third
SAMPLING = common_pb2.SamplingParams(max_tokens=3, temperature=0.5, seed=1, top_k=3)
SEQUENCE = common_pb2.SequenceSpec(
    handoff_id="h", token_ids=[1, 2, 3], prompt_tokens=3, sampling=SAMPLING, time_left_ms=500
)
KEDA = externalscaler_pb2.ScaledObjectRef(
    name="s", namespace="n", scalerMetadata={"role": "decode", "model": "demo"}
)
# Every RPC but Drain, which ends a worker, by the role of who serves it: a request to begin with,
# or several. Names without a package are of baton.v1.
RPCS: dict[str, dict[str, Any]] = {
    "router": {
        "InferenceService/Generate": inference_pb2.GenerateRequest(
            text="def f(", sampling=SAMPLING, stop=["x"]
        ),
        "InferenceService/Tokenize": inference_pb2.TokenizeRequest(text="abc"),
        "InferenceService/ListModels": inference_pb2.ListModelsRequest(),
        "FleetService/GetStatus": fleet_pb2.GetStatusRequest(),
        "FleetService/Explain": fleet_pb2.ExplainRequest(
            request=inference_pb2.GenerateRequest(text="def f(", sampling=SAMPLING)
        ),
        "FleetService/LoadFleetAdapter": fleet_pb2.LoadFleetAdapterRequest(name="a", directory="/"),
        "FleetService/UnloadFleetAdapter": fleet_pb2.UnloadFleetAdapterRequest(name="a", wait_ms=9),
        "RouteService/ListRoutes": route_pb2.ListRoutesRequest(),
        "RouteService/SetRoute": route_pb2.SetRouteRequest(
            route=route_pb2.ModelRoute(
                name="r", targets=[route_pb2.RouteTarget(model="demo", weight=1)]
            )
        ),
        "RouteService/DeleteRoute": route_pb2.DeleteRouteRequest(name="r"),
    },
    "worker": {
        "WorkerService/Describe": worker_pb2.DescribeRequest(),
        "WorkerService/SetRole": [worker_pb2.SetRoleRequest(role=role) for role in ROLES],
        "WorkerService/LoadAdapter": worker_pb2.LoadAdapterRequest(name="a", directory="/"),
        "WorkerService/UnloadAdapter": worker_pb2.UnloadAdapterRequest(name="a", wait_ms=9),
    },
    "planner": {
        "externalscaler.ExternalScaler/IsActive": KEDA,
        "externalscaler.ExternalScaler/StreamIsActive": KEDA,
        "externalscaler.ExternalScaler/GetMetricSpec": KEDA,
        "externalscaler.ExternalScaler/GetMetrics": externalscaler_pb2.GetMetricsRequest(
            scaledObjectRef=KEDA, metricName="baton"
        ),
    },
    "traces": {
        "TraceService/ReadTraces": trace_pb2.ReadTracesRequest(trace_id="0" * 32, wait_ms=9),
    },
    "prefill": {},
    "decode": {
        "HandoffService/Control": [
            handoff_pb2.ControlRequest(
                call_id=1,
                offer=handoff_pb2.OfferRequest(
                    incarnation="p", target_incarnation="d", transports=[common_pb2.TRANSPORT_SHM]
                ),
            ),
            handoff_pb2.ControlRequest(ready=handoff_pb2.ReadyRequest()),
            handoff_pb2.ControlRequest(commit=handoff_pb2.CommitRequest(handoff_id="h")),
            handoff_pb2.ControlRequest(abort=handoff_pb2.AbortRequest(handoff_id="h")),
        ],
    },
}

# What a router sends to a worker, a connection each.
ROUTER_MESSAGES = [
    dispatch_pb2.RouterMessage(
        reserve=[decode_pb2.ReserveRequest(sequence=SEQUENCE)],
        prefill=[
            prefill_pb2.PrefillRequest(
                sequence=SEQUENCE,
                target=prefill_pb2.HandoffTarget(incarnation="d", reservation_token="t"),
            )
        ],
        cancel=["h"],
        keep_traces=["0" * 32],
    )
]


class Fuzz:
    """One run: what was tried, by what it was sent to, and what broke a promise."""

    def __init__(self, seed: int, until: float) -> None:
        self.tried: Counter[str] = Counter()
        self.broken: list[str] = []
        self.delays_s, self.delays_cpu_s = list[float](), list[float]()  # of /health
        self.stalls_s: dict[str, list[float]] = defaultdict(list)  # of requests one at a time
        self._seeds = itertools.count(seed)
        self._until = until
        # Ids of what was stored, by what they begin with.
        self._stored: dict[bytes, deque[bytes]] = defaultdict(lambda: deque(maxlen=64))

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self._until and len(self.broken) < 20

    def mutator(self, seeds: Sequence[bytes]) -> Mutator:
        return Mutator(next(self._seeds), seeds)

    def found(self, where: str, data: bytes, what: str) -> None:
        self.broken.append(f"{where}: {what}\n    input: {data[:2000]!r}")

    def parsers(self, folder: Path) -> None:
        """Everything that reads bytes or files of others, in this thread."""
        config, weights = folder / "config.json", folder / "model.safetensors"

        def template(data: bytes) -> None:
            ChatTemplate(data.decode(errors="replace"), {"bos_token": "<s>"}, "t").render(
                [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "x"}]
            )

        def model_config(data: bytes) -> None:
            config.write_bytes(data)
            ModelConfig.load(folder)

        def checkpoint(data: bytes) -> None:
            weights.write_bytes(data)
            stored_tensors(folder)

        cases: list[tuple[Callable[[bytes], Any], Sequence[bytes], type[Exception]]] = [
            (parse_completion, inputs.COMPLETIONS, InvalidRequest),
            (parse_chat, inputs.CHATS, InvalidRequest),
            (parse_message, inputs.MESSAGES, InvalidRequest),
            (parse_response, inputs.RESPONSES, InvalidRequest),
            (parse_tokenize, [*inputs.CHATS, b'{"prompt":"x"}'], InvalidRequest),
            (parse_line, inputs.BATCHES, InvalidRequest),
            (template, inputs.TEMPLATES, Exception),
            (model_config, inputs.MODEL_CONFIGS, CheckpointError),
            (checkpoint, inputs.WEIGHTS, CheckpointError),
            (partial(decode, b"/baton/v1/c/workers/w"), inputs.RECORDS, InvalidRequest),
        ]  # fmt: skip
        named = (
            "completion",
            "chat",
            "message",
            "response",
            "tokenize",
            "batch",
            "template",
            "config.json",
            "safetensors",
            "etcd",
        )
        mutators = [self.mutator(seeds) for _, seeds, _ in cases]
        while self.goes_on:
            for name, (parse, _, expected), mutator in zip(named, cases, mutators, strict=True):
                data = mutator.next()
                began = time.thread_time()
                try:
                    parse(data)
                except expected as error:
                    if name == "template" and not isinstance(error, (ConfigError, InvalidRequest)):
                        self.found(name, data, f"{type(error).__name__}: {error}")
                except Exception as error:
                    self.found(name, data, f"{type(error).__name__}: {error}")
                if (took_s := time.thread_time() - began) > MAX_PARSE_S:
                    self.found(name, data, f"took {took_s:.1f} s")
                self.tried[name] += 1

    async def http(self, address: str) -> None:
        """Bytes to the HTTP port: it hangs up, or answers below 500, or 503, 504 or 529."""
        host, _, port = address.rpartition(":")
        mutator = self.mutator(inputs.HTTP)
        while self.goes_on:
            data = mutator.next()
            answer = b""
            try:
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(data)
                writer.write_eof()
                async with asyncio.timeout(15):
                    while part := await reader.read(1 << 16):
                        answer += part
                writer.close()
            except TimeoutError:
                self.found("http", data, f"neither an answer nor an end; so far {answer[:200]!r}")
            except OSError:
                pass  # it hung up while we were writing
            for line in answer.split(b"\r\n"):
                if line.startswith(b"HTTP/1.1 5") and not line.startswith(
                    (b"HTTP/1.1 503", b"HTTP/1.1 504", b"HTTP/1.1 529")
                ):
                    self.found("http", data, line.decode())
            self.tried["http"] += 1

    async def requests(self, address: str) -> None:
        """Well-formed requests with almost valid bodies, each answered or refused."""
        mutators = {name: self.mutator(seeds) for name, seeds in inputs.REQUESTS.items()}
        async with aiohttp.ClientSession(f"http://{address}") as session:
            while self.goes_on:
                for name, mutator in mutators.items():
                    data = mutator.next() if inputs.REQUESTS[name][0] else b""
                    await self._request(session, name, data)
                    if not self.goes_on:
                        break

    async def alone(self, address: str, pid: int) -> None:
        """Requests one at a time, large ones first: how long each keeps others from the loop."""
        large = [(name, body) for name, bodies in inputs.LARGE.items() for body in bodies]
        mutators = [(name, self.mutator(bodies)) for name, bodies in inputs.LARGE.items()]
        mutators += [(name, self.mutator(bodies)) for name, bodies in inputs.REQUESTS.items()]
        changed = ((name, mutator.next()) for name, mutator in itertools.cycle(mutators))
        timeout = aiohttp.ClientTimeout(120)
        async with aiohttp.ClientSession(f"http://{address}", timeout=timeout) as session:
            await self._request(session, "GET /health", b"")
            for at, (name, data) in enumerate(itertools.chain(large, changed)):
                if at >= len(large) and not self.goes_on:
                    break
                request = asyncio.create_task(self._request(session, name, data))
                stall_s = 0.0
                while not request.done():
                    before = loop_cpu_s(pid)
                    await self._request(session, "GET /health", b"")
                    stall_s = max(stall_s, loop_cpu_s(pid) - before)
                await request
                self.stalls_s[name].append(stall_s)
                if stall_s > MAX_STALL_S:
                    self.found(name, data, f"kept the event loop for {stall_s * 1e3:.0f} ms")

    async def _request(self, session: aiohttp.ClientSession, name: str, data: bytes) -> None:
        method, _, path = name.partition(" ")
        for kind, known in self._stored.items():
            sample, one = kind + b"0", known[self.tried[name] % len(known)]
            path, data = path.replace(sample.decode(), one.decode()), data.replace(sample, one)
        body: Any = data
        if path == "/v1/files":
            body = aiohttp.FormData({"purpose": "batch"})
            body.add_field("file", data, filename="x")
        try:
            async with session.request(method, path, data=body) as response:
                answer = await response.read()
        except TimeoutError:
            self.found(name, data, "neither an answer nor an end")
        except aiohttp.ClientError as error:
            self.found(name, data, f"{type(error).__name__}: {error}")
        else:
            if response.status >= 500 and response.status not in _FINE:
                self.found(name, data, f"{response.status}: {answer[:300]!r}")
            if found := _ID.search(answer):
                self._stored[found[2]].append(found[1])
        self.tried[name] += 1

    async def rpcs(self, address: str, methods: dict[str, Any]) -> None:
        """Requests to each method of a process: no UNKNOWN and no INTERNAL."""
        mutators = {
            method: self.mutator(
                [one.SerializeToString() for one in (seeds if isinstance(seeds, list) else [seeds])]
            )
            for method, seeds in methods.items()
        }
        async with rpc.channel(address) as channel:
            while self.goes_on:
                for method, mutator in mutators.items():
                    data = mutator.next()
                    path = method if "." in method else f"baton.v1.{method}"
                    call = channel.unary_stream(f"/{path}")(data, timeout=0.5)
                    try:
                        async for answer in call:
                            if method == "HandoffService/Control":
                                failure = handoff_pb2.ControlResponse.FromString(answer).failure
                                if failure.text.startswith("unexpected"):
                                    self.found(method, data, failure.text)
                    except grpc.aio.AioRpcError as error:
                        code = error.code()
                        text = error.details() or ""
                        if code.name == "UNKNOWN" or text.startswith("unexpected"):
                            self.found(method, data, f"{code.name}: {text}")
                    self.tried[method.partition("/")[0]] += 1

    async def router_messages(self, address: str) -> None:
        """Bytes to a worker on a stream, which answers and goes on, or ends with a status."""
        mutator = self.mutator([m.SerializeToString() for m in ROUTER_MESSAGES])
        async with rpc.channel(address) as channel:
            while self.goes_on:
                data = mutator.next()
                call = channel.stream_stream("/baton.v1.DispatchService/Connect")(timeout=15)
                try:
                    await call.write(data)
                    await call.read()
                    await call.done_writing()
                    while await call.read() is not grpc.aio.EOF:
                        pass
                except grpc.RpcError as error:
                    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                        self.found("router messages", data, "neither an answer nor an end")
                    elif error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                        self.found("router messages", data, f"{error.code()}: {error.details()}")
                self.tried["router messages"] += 1

    async def health(self, address: str, pid: int) -> None:
        """How long a router takes to answer while all this goes on, and its CPU time meanwhile."""
        async with httpx.AsyncClient(timeout=30) as client:
            while self.goes_on:
                began, before = time.monotonic(), loop_cpu_s(pid)
                status = (await client.get(f"http://{address}/health")).status_code
                if status != 200:
                    self.found("GET /health", b"", f"status {status} beside all this")
                self.delays_s.append(time.monotonic() - began)
                self.delays_cpu_s.append(loop_cpu_s(pid) - before)
                await asyncio.sleep(0.05)


def loop_cpu_s(pid: int) -> float:
    """CPU time of a process's first thread, in which its event loop runs."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


async def run(seed: int, seconds: float) -> Fuzz:
    """A quarter of the time for parsers, the rest for a cluster."""
    fuzz = Fuzz(seed, time.monotonic() + seconds / 4)
    with tempfile.TemporaryDirectory(prefix="baton-fuzz-") as folder:
        fuzz.parsers(Path(folder))
    print(f"parsers: {dict(fuzz.tried)}, {len(fuzz.broken)} broken promises", flush=True)
    engine = EngineConfig(simulate="1e9,0", kv_blocks=512)
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-fuzz-"))
        api = ApiConfig(batch_dir=Path(folder), response_dir=Path(folder))
        config = ClusterConfig(
            engine=engine, port=0, http_port=ports.free(), restart=False, api=api
        )
        started = LocalCluster(config, say=lambda text: None)
        receiver = await stack.enter_async_context(OtlpReceiver(SpanStore()))
        cluster = await stack.enter_async_context(started)
        at = f"127.0.0.1:{ports.free()}"
        argv = [*PROGRAM, "planner", "--target", cluster.targets, "--etcd", cluster.etcd_address]
        planner = ChildProcess("planner", "planner", tied([*argv, "--port", at.partition(":")[2]]))
        await planner.start()
        stack.push_async_callback(planner.stop, 5.0)
        children = {**cluster.processes, "planner": planner}
        for child in children.values():
            child.log = deque(child.log)  # every line is looked at in the end
        client = await stack.enter_async_context(AsyncClient(cluster.address))
        await client.generate([1, 2, 3] * 20, max_tokens=4)
        processes = {name: psutil.Process(child.pid) for name, child in children.items()}
        records = {record.pid: record for record in cluster.membership.records.values()}
        fuzz._until = time.monotonic() + min(5.0, seconds / 20)
        sizes: dict[str, int] = {}
        for _ in range(2):  # once to warm up
            sizes = sizes or {}
            async with asyncio.TaskGroup() as group:
                group.create_task(fuzz.health(cluster.http_addresses[0], processes["router"].pid))
                for _ in range(CALLERS):
                    group.create_task(fuzz.http(cluster.http_addresses[0]))
                    group.create_task(fuzz.requests(cluster.http_addresses[0]))
                for address, role in (
                    (cluster.address, "router"), (at, "planner"), (receiver.address, "traces"),
                ):  # fmt: skip
                    group.create_task(fuzz.rpcs(address, RPCS[role]))
                for name, process in processes.items():
                    if record := records.get(process.pid):
                        role = name.partition("-")[0]
                        methods = {**RPCS["worker"], **RPCS[role]}
                        group.create_task(fuzz.rpcs(record.address, methods))
                        group.create_task(fuzz.router_messages(record.address))
            if not sizes:
                sizes = {name: p.memory_info().rss for name, p in processes.items()}
                fuzz._until = time.monotonic() + seconds * 0.65
        fuzz._until = time.monotonic() + seconds / 10
        await fuzz.alone(cluster.http_addresses[0], processes["router"].pid)
        for name, process in processes.items():
            child = children[name]
            if not child.running or child.pid != process.pid:
                fuzz.broken.append(f"{name} has ended: {child.log_tail()}")
            elif (now := process.memory_info().rss) > sizes[name] * 4 / 3 + GROWTH:
                fuzz.broken.append(f"{name} grew from {sizes[name] >> 20} to {now >> 20} MiB")
            lines = list(child.log)
            for number, (before, line) in enumerate(itertools.pairwise(lines)):
                # gRPC's own: a caller's deadline passed while its status was sent.
                if line.startswith("Traceback") and "ExecuteBatchError" not in before:
                    text = "\n".join(lines[number : number + 60])
                    fuzz.broken.append(f"{name} wrote a traceback:\n{text}")
                    break
        await client.generate([1, 2, 3] * 20, max_tokens=4)
        await all_blocks_free(client)
    for what, times in (("time", fuzz.delays_s), ("CPU time", fuzz.delays_cpu_s)):
        p99, longest = (sorted(times)[int((len(times) - 1) * q)] * 1e3 for q in (0.99, 1))
        print(f"/health beside it, {what}: p99 {p99:.0f} ms, longest {longest:.0f} ms")
    stalls = sorted((max(times), name) for name, times in fuzz.stalls_s.items())[-5:]
    longest = ", ".join(f"{name} {stall_s * 1e3:.0f} ms" for stall_s, name in reversed(stalls))
    print(f"longest turns of its event loop, in CPU time: {longest}")
    return fuzz


def main() -> int:
    """Runs it; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="(default: 5)")
    parser.add_argument("--seed", type=int, default=None, help="(default: a new one)")
    args = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if args.seed is None else args.seed
    logging.disable(logging.WARNING)  # what the parsers here say of what they refuse
    fuzz = asyncio.run(run(seed, args.minutes * 60))
    print(f"seed {seed}: {fuzz.tried.total():,} inputs: {dict(fuzz.tried)}")
    for one in fuzz.broken:
        print(f"BROKEN {one}")
    return bool(fuzz.broken)


if __name__ == "__main__":
    sys.exit(main())
