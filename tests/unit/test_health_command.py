"""`baton health` against a real server: its exit status is what a container's health check sees."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.cli import main

Status = health_pb2.HealthCheckResponse


@pytest.fixture
def serving() -> Iterator[Callable[[int], str]]:
    """serving(status) -> the address of a server that says so."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()

    def say(status: int) -> str:
        servicer.set("", status)
        return f"127.0.0.1:{port}"

    yield say
    server.stop(None).wait()


def test_0_when_it_takes_work(
    serving: Callable[[int], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["health", "--target", serving(Status.SERVING)]) == 0
    assert capsys.readouterr().out == "SERVING\n"


def test_1_and_why_when_it_does_not(
    serving: Callable[[int], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["health", "--target", serving(Status.NOT_SERVING)]) == 1
    assert "NOT_SERVING" in capsys.readouterr().err


def test_1_when_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:  # bound and not listening: nobody else can take the port
        taken.bind(("127.0.0.1", 0))
        assert main(["health", "--target", f"127.0.0.1:{taken.getsockname()[1]}"]) == 1
    assert "failed to connect" in capsys.readouterr().err


def test_1_when_it_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        assert main(["health", "--target", target, "--timeout", "0.3"]) == 1
    assert capsys.readouterr().err.startswith("baton: error:")
