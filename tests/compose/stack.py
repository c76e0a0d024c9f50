"""The stack of compose/ under a name and on ports of its own, driven as a person would drive it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from baton.local import ports

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


def composer() -> list[str]:
    """The compose command here; empty when there is none."""
    if shutil.which("docker") and not run(["docker", "compose", "version"], check=False).returncode:
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else []


def why_not() -> str:
    """Why the stack cannot be brought up here; empty when it can."""
    if not shutil.which("docker"):
        return "there is no docker command"
    if run(["docker", "info"], check=False).returncode:
        return "no Docker engine answers (DOCKER_HOST names another)"
    return "" if composer() else "there is neither `docker compose` nor docker-compose"


def run(
    argv: list[str], *, check: bool = True, timeout_s: float = 120.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A command and what it said; AssertionError with that when it fails."""
    done = subprocess.run(
        argv,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert not check or done.returncode == 0, f"{argv}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done


class Stack:
    """One project of compose. Nothing of it is left after `down`."""

    def __init__(self) -> None:
        self.project = f"baton-test-{os.getpid()}"
        names = ("ROUTER_1_PORT", "ROUTER_2_PORT", "ROUTER_1_HTTP_PORT", "ROUTER_2_HTTP_PORT")
        found = ports.consecutive("127.0.0.1", 0, len(names) + 1)
        self.ports = dict(zip((*names, "PROMETHEUS_PORT"), found, strict=True))
        self._environment = {
            **{name: str(port) for name, port in self.ports.items()},
            "COMPOSE_PROJECT_NAME": self.project,
            "TEST_FOLDER": str(HERE),
        }
        self._command = [*composer(), *(part for file in FILES for part in ("--file", str(file)))]

    def compose(self, *arguments: str, timeout_s: float = 300.0) -> str:
        """Runs `docker compose ARGUMENTS`; its output."""
        argv = [*self._command, *arguments]
        return run(argv, timeout_s=timeout_s, **self._environment).stdout

    def build(self) -> None:
        """Makes the image, unless BATON_IMAGE names one that is there."""
        if not os.environ.get("BATON_IMAGE"):
            self.compose("build", "prefill", timeout_s=BUILD_S)

    def up(self, *services: str, **scale: int) -> None:
        """Starts services; `decode=2` says how many of one."""
        scales = [f"--scale={name}={number}" for name, number in scale.items()]
        self.compose("up", "--detach", "--no-build", *scales, *services)

    def down(self) -> None:
        """Removes containers, networks and volumes."""
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "40")

    def target(self, router: int) -> str:
        """The gRPC address of router 1 or 2 from outside."""
        return f"127.0.0.1:{self.ports[f'ROUTER_{router}_PORT']}"

    def url(self, router: int) -> str:
        """The HTTP address of router 1 or 2 from outside."""
        return f"http://127.0.0.1:{self.ports[f'ROUTER_{router}_HTTP_PORT']}"

    def containers(self) -> list[dict[str, Any]]:
        """What the engine knows of each container of ours, the ended ones included."""
        label = f"label=com.docker.compose.project={self.project}"
        ids = run(["docker", "ps", "--all", "--quiet", "--filter", label]).stdout.split()
        if not ids:
            return []
        known: list[dict[str, Any]] = json.loads(run(["docker", "inspect", *ids]).stdout)
        return known

    def of(self, *services: str) -> list[dict[str, Any]]:
        """Those of these services."""
        key = "com.docker.compose.service"
        return [one for one in self.containers() if one["Config"]["Labels"][key] in services]
