"""A rendered container as a process on this machine: its arguments, environment, mounts and probes.

Every pod has a loopback address of its own, so that ports are those of the chart. Mount points are
folders below one of the test's, the names of services are addresses of their pods.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.helm.chart import NAMESPACE, Object
from tests.waiting import eventually

ENTRYPOINT = ("/bin/sh", str(Path(__file__).parents[2] / "compose/service.sh"))
_VARIABLE = re.compile(r"\$\((\w+)\)")
_NUMBERS = (f"{os.getpid() // 250 % 200 + 20}.{os.getpid() % 250}.{n}" for n in itertools.count(1))
_SHARED = ("/dev/shm",)  # mounted as it is


def templates(created: list[Object]) -> dict[str, Object]:
    """{name: pod template} of all that starts pods; the hosts of a group as NAME and NAME/rank."""
    found = {}
    for one in created:
        name, spec = one["metadata"]["name"], one.get("spec", {})
        if one["kind"] in ("Deployment", "StatefulSet"):
            found[name] = spec["template"]
        elif one["kind"] == "LeaderWorkerSet":
            found[name] = spec["leaderWorkerTemplate"]["leaderTemplate"]
            found[f"{name}/rank"] = spec["leaderWorkerTemplate"]["workerTemplate"]
    return found


class Pod:
    """One pod of a template."""

    def __init__(
        self,
        name: str,
        template: Object,
        folder: Path,
        address: str,
        secrets: dict[str, dict[str, bytes]] | None = None,
        injected: dict[str, str] | None = None,
    ) -> None:
        """`secrets` are what its volumes mount; `injected` is what a controller adds."""
        self.name, self.address, self._folder = name, address, folder / name.replace("/", "-")
        self.spec = template["spec"]
        (self.container,) = self.spec["containers"]
        self._labels = template["metadata"]["labels"]
        self._secrets, self._injected = secrets or {}, injected or {}
        self.process: subprocess.Popen[bytes] | None = None
        self.log = self._folder / "log"
        volumes = {one["name"]: one for one in self.spec.get("volumes", ())}
        for mount in self.container["volumeMounts"]:
            mounted = self._folder / mount["name"]
            mounted.mkdir(parents=True)
            secret = volumes.get(mount["name"], {}).get("secret", {}).get("secretName", "")
            for file, content in self._secrets.get(secret, {}).items():
                (mounted / file).write_bytes(content)

    def environment(self, hosts: dict[str, str]) -> dict[str, str]:
        """As a kubelet makes it; `hosts` are the addresses of services."""
        fields = {
            "status.podIP": self.address,
            "metadata.name": self.name.replace("/", "-"),
            "spec.nodeName": "node-1",
            "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']": "0",
        }
        known = dict(self._injected)
        for one in self.container.get("env", ()):
            value = one.get("value")
            if field := one.get("valueFrom", {}).get("fieldRef"):
                value = fields[field["fieldPath"]]
            elif key := one.get("valueFrom", {}).get("secretKeyRef"):
                value = self._secrets.get(key["name"], {}).get(key["key"], b"").decode()
            known[one["name"]] = _expanded(value, known)
        return {name: self._here(value, hosts) for name, value in known.items()}

    def argv(self, hosts: dict[str, str]) -> list[str]:
        """Its command, with the image's entry point where the template names none."""
        known = self.environment(hosts)
        command = self.container.get("command")
        parts = (*(command or ()), *self.container.get("args", ()))
        mapped = [self._here(_expanded(part, known), hosts) for part in parts]
        return mapped if command else [*ENTRYPOINT, *mapped]

    def _here(self, value: str, hosts: dict[str, str]) -> str:
        mounts = {one["mountPath"]: one["name"] for one in self.container["volumeMounts"]}
        paths = "|".join(re.escape(path) for path in mounts if path not in _SHARED)
        if paths:
            place = lambda found: str(self._folder / mounts[found[0]])  # noqa: E731
            value = re.sub(rf"(?<![\w/])({paths})(?=/|$)", place, value)
        for host, address in hosts.items():
            value = re.sub(rf"\b{re.escape(host)}(\.{NAMESPACE})?(?=:\d)", address, value)
        return value.replace("0.0.0.0", self.address)

    def start(self, hosts: dict[str, str], path: Path) -> None:
        """Starts the process; `path` is the folder of its programs."""
        environment = {
            "PATH": f"{path}:/usr/bin:/bin",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "HOSTNAME": self.name.replace("/", "-"),
            "TMPDIR": str(self._folder / "tmp"),
            "OMP_NUM_THREADS": "1",
            **self.environment(hosts),
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.argv(hosts), env=environment, stdout=log, stderr=log, cwd=self._folder
            )

    def port(self, name: str) -> int:
        """The number of a named port."""
        return next(one["containerPort"] for one in self.container["ports"] if one["name"] == name)

    async def probe(self, kind: str) -> bool:
        """Whether a probe succeeds now, asked as a kubelet asks: plain HTTP, no certificate."""
        probe = self.container[kind]
        get = probe["httpGet"]
        url = f"http://{self.address}:{self.port(get['port'])}{get['path']}"
        assert self.process is not None
        assert self.process.poll() is None, f"{self.name} ended: {self.log.read_text()}"
        # Without `verify` no certificates are loaded, 30 ms for each of many clients.
        settings = {"verify": False, "trust_env": False, "timeout": probe["timeoutSeconds"]}
        async with httpx.AsyncClient(**settings) as client:
            try:
                return 200 <= (await client.get(url)).status_code < 400
            except httpx.HTTPError:
                return False

    async def probed(self, *kinds: str) -> None:
        """Returns when its probes of these kinds have succeeded, if it has them."""
        for kind in kinds:
            if kind in self.container:
                await eventually(
                    lambda kind=kind: self.probe(kind), bool, f"{self.name}: {kind} fails"
                )

    async def stop(self) -> int:
        """SIGTERM, as at the end of a pod; the exit status within the grace period."""
        assert self.process is not None
        self.process.terminate()
        return await asyncio.to_thread(
            self.process.wait, self.spec["terminationGracePeriodSeconds"]
        )

    def kill(self) -> None:
        """Ends the process, if it has been started."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def _expanded(value: str, known: dict[str, str]) -> str:
    """$(NAME) as a kubelet replaces it: what is not known stays."""
    return _VARIABLE.sub(lambda match: known.get(match[1], match[0]), value)


def loopback_addresses() -> Iterator[str]:
    """Addresses of this machine that no other test uses."""
    for _ in range(250):
        yield f"127.{next(_NUMBERS)}"
