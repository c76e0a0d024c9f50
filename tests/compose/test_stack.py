"""The stack of compose/ under Docker: requests from outside, scaling, faults, metrics, shutdown.

The tests follow one another on one stack and each restores it. `make compose-test` runs them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from baton import Client
from baton.local import ports

pytestmark = pytest.mark.timeout(1800)

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "compose"
FILES = (
    FOLDER / "compose.yaml",
    FOLDER / "compose.observability.yaml",
    HERE / "compose.test.yaml",
)
BUILD_S = 1500.0
SERVING = ("etcd", "collector", "router-1", "router-2", "prefill", "decode")
OURS = ("router-1", "router-2", "prefill", "decode")
ROUTERS = ("ROUTER_1_PORT", "ROUTER_2_PORT", "ROUTER_1_HTTP_PORT", "ROUTER_2_HTTP_PORT")
PORTS = (*ROUTERS, "PROMETHEUS_PORT")
PATIENCE_S = 120.0
PROMPT = "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n" * 8
T = TypeVar("T")


def composer() -> list[str]:
    """The compose command; skips where there is none, or no container engine."""
    if not os.environ.get("BATON_COMPOSE_TEST"):
        pytest.skip("builds images and takes minutes: `make compose-test` runs it")
    if not shutil.which("docker"):
        pytest.skip("there is no docker command")
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        pytest.skip("no Docker engine answers (DOCKER_HOST names another)")
    has = ["docker", "compose", "version"]
    if not subprocess.run(has, capture_output=True, check=False).returncode:
        return ["docker", "compose"]
    if not shutil.which("docker-compose"):
        pytest.skip("there is neither `docker compose` nor docker-compose")
    return ["docker-compose"]


def run(argv: list[str], *, timeout_s: float = 120.0, **environment: str) -> str:
    """A command's output; AssertionError with what it said when it fails."""
    done = subprocess.run(
        argv, env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{argv}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


class Stack:
    """One project of compose."""

    def __init__(self) -> None:
        self._command = [*composer(), *(part for file in FILES for part in ("--file", str(file)))]
        self.project = f"baton-test-{os.getpid()}"
        self.addresses = {
            name: f"127.0.0.1:{port}"
            for name, port in zip(PORTS, ports.consecutive("127.0.0.1", 0, len(PORTS)), strict=True)
        }
        self._environment = {
            **{name: address.partition(":")[2] for name, address in self.addresses.items()},
            "COMPOSE_PROJECT_NAME": self.project,
            "TEST_FOLDER": str(HERE),
        }

    def compose(self, *arguments: str, timeout_s: float = 300.0) -> str:
        """Runs `docker compose ARGUMENTS`; its output."""
        return run([*self._command, *arguments], timeout_s=timeout_s, **self._environment)

    def up(self, *services: str, **scale: int) -> None:
        """Starts services; `decode=2` says how many of one."""
        scales = [f"--scale={name}={number}" for name, number in scale.items()]
        self.compose("up", "--detach", "--no-build", *scales, *services)

    def client(self, router: int = 1) -> Client:
        """The SDK, of router 1 or 2."""
        return Client(self.addresses[f"ROUTER_{router}_PORT"])

    def containers(self, *services: str) -> list[dict[str, Any]]:
        """What the engine knows of these services' containers, the ended ones included."""
        label = f"label=com.docker.compose.project={self.project}"
        ids = run(["docker", "ps", "--all", "--quiet", "--filter", label]).split()
        known: list[dict[str, Any]] = json.loads(run(["docker", "inspect", *ids])) if ids else []
        key = "com.docker.compose.service"
        return [one for one in known if one["Config"]["Labels"][key] in services]


def eventually(look: Callable[[], T], good: Callable[[T], bool], complaint: str) -> T:
    """Looks until what is seen is good; containers send no event here."""
    end = time.monotonic() + PATIENCE_S
    while not good(seen := look()):
        assert time.monotonic() < end, f"{complaint}: {seen}"
        time.sleep(0.5)
    return seen


def fetched(url: str, body: object = None, **params: str) -> Any:
    """The JSON at a URL."""
    method = "POST" if body else "GET"
    response = httpx.request(method, url, json=body, params=params, timeout=60.0)
    return response.raise_for_status().json()


def ready(stack: Stack) -> dict[str, list[dict[str, Any]]]:
    """The READY workers of each role as the first router sees them."""
    with stack.client() as client:
        workers = client.status(timeout=10)["workers"]
    good = [worker for worker in workers if worker["state"] == "READY"]
    return {role: [w for w in good if w["role"] == role] for role in ("prefill", "decode")}


def scale(stack: Stack, decode: int) -> None:
    """Starts what is stopped; returns when so many decode workers serve."""
    stack.up(*OURS, decode=decode)
    eventually(
        lambda: {role: len(workers) for role, workers in ready(stack).items()},
        lambda seen: seen == {"prefill": 1, "decode": decode},
        f"not {decode} decode workers",
    )


@pytest.fixture(scope="module")
def serving() -> Iterator[Stack]:
    """A prefill and a decode worker, two routers, etcd, an OTLP endpoint, Prometheus; healthy."""
    stack = Stack()

    def unhealthy() -> list[str]:
        found = stack.containers("etcd", *OURS)
        assert len(found) == 5
        return [c["Name"] for c in found if c["State"]["Health"]["Status"] != "healthy"]

    try:
        if not os.environ.get("BATON_IMAGE"):
            stack.compose("build", "prefill", timeout_s=BUILD_S)
        stack.up(*SERVING, prefill=1, decode=1)
        eventually(unhealthy, lambda names: not names, "not healthy")
        yield stack
    except BaseException:
        print(stack.compose("logs", "--tail=30", *OURS))
        raise
    finally:
        stack.compose("down", "--volumes", "--remove-orphans", "--timeout", "40")
    assert not stack.containers(*SERVING, "prometheus")


@pytest.fixture
def two_decoders(serving: Stack) -> Iterator[Stack]:
    """With a second decode worker; stopped containers are started again afterwards."""
    scale(serving, 2)
    yield serving
    for container in serving.containers("decode"):
        if container["State"]["Paused"]:
            run(["docker", "unpause", container["Id"]])
    scale(serving, 2)


def test_requests_from_outside_are_answered_by_both_routers(serving: Stack) -> None:
    with serving.client() as client:
        ours = client.generate(PROMPT, max_tokens=24, temperature=0.0)
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    theirs = fetched(f"http://{serving.addresses['ROUTER_2_HTTP_PORT']}/v1/completions", body)
    assert len(ours.token_ids) == theirs["usage"]["completion_tokens"] > 0
    assert ours.text == theirs["choices"][0]["text"]
    assert ours.route.prefill and ours.route.transport == "gloo"


def test_containers_run_without_privileges(serving: Stack) -> None:
    found = serving.containers(*OURS)
    assert len(found) == 4
    for container in found:
        config, host = container["Config"], container["HostConfig"]
        assert config["User"] == "10001:10001"
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and not host["Privileged"]
        _, *processes = run(["docker", "top", container["Id"], "-eo", "pid,uid"]).splitlines()
        assert {process.split()[1] for process in processes} == {"10001"}


def test_a_worker_that_is_scaled_away_drains(two_decoders: Stack) -> None:
    scale(two_decoders, 1)
    with two_decoders.client(2) as client:
        assert client.generate(PROMPT, max_tokens=8).finish_reason


def test_spans_of_every_process_arrive_as_one_trace(serving: Stack) -> None:
    with serving.client() as client:
        # Not what a cache holds, or no prefill worker would be asked.
        trace = client.generate(f"{time.time()}" * 20, max_tokens=4).trace_id
    assert trace

    def services() -> set[str]:
        log = serving.compose("logs", "--no-color", "collector")
        return set(re.findall(rf"span (\S+) {trace} ", log))

    wanted = {"baton-router", "baton-prefill", "baton-decode"}
    eventually(services, lambda seen: wanted <= seen, "spans are missing")


@pytest.fixture(scope="module")
def prometheus(serving: Stack) -> str:
    """Prometheus' URL."""
    serving.up("prometheus")
    return f"http://{serving.addresses['PROMETHEUS_PORT']}/api/v1"


def asked(prometheus: str, query: str) -> list[dict[str, Any]]:
    """The answer to a query now; raises HTTPError when Prometheus cannot parse it."""
    found: list[dict[str, Any]] = fetched(f"{prometheus}/query", query=query)["data"]["result"]
    return found


def test_prometheus_finds_every_container(serving: Stack, prometheus: str) -> None:
    with serving.client() as client:
        client.generate(PROMPT, max_tokens=8)

    def up() -> dict[str, float]:
        try:
            found = asked(prometheus, "sum by (job) (up)")
        except httpx.HTTPError as error:  # it is still starting
            return {str(error): 0.0}
        return {one["metric"]["job"]: float(one["value"][1]) for one in found}

    def all_up(seen: dict[str, float]) -> bool:
        jobs = {"router": 2, "prefill": 1, "etcd": 1}
        return jobs.items() <= seen.items() and seen.get("decode", 0) >= 1

    eventually(up, all_up, "not scraped")
    first = "sum(gen_ai_server_time_to_first_token_seconds_count)"
    eventually(
        lambda: asked(prometheus, first),
        lambda seen: bool(seen) and float(seen[0]["value"][1]) > 0,
        "no request was counted",
    )


def test_everything_stops_with_exit_status_0(serving: Stack) -> None:
    """Last: it stops the stack."""
    running = [one["Id"] for one in serving.containers(*OURS) if one["State"]["Running"]]
    assert len(running) >= 4
    serving.compose("stop", "--timeout", "40", *OURS)
    ended = [one for one in serving.containers(*OURS) if one["Id"] in running]
    assert {one["State"]["ExitCode"] for one in ended} == {0}
