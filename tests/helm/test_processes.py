"""The rendered pods as processes, probed as a kubelet does, from nothing to a first token."""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton import AsyncClient
from baton.local import certs
from baton.local.etcd_process import etcd_binary
from tests.helm.chart import install
from tests.helm.pod import Pod, loopback_addresses, templates
from tests.helm.test_chart import DEVELOPMENT, SECRETS
from tests.waiting import WAIT_S

SMALL = {"options": {"threads": 1, "kv-cache": "32MiB"}}
TWO_HOSTS = {"hosts": 2, "options": {"tp": 2, "tp-backend": "gloo", **SMALL["options"]}}


def programs(folder: Path) -> Path:
    """A folder with what the image has on its PATH."""
    folder.mkdir()
    (folder / "etcd").symlink_to(etcd_binary())
    baton = folder / "baton"
    baton.write_text(f'#!/bin/sh\nexec {sys.executable} -m baton "$@"\n')
    baton.chmod(0o755)
    return folder


def secrets(folder: Path, hosts: list[str]) -> dict[str, dict[str, bytes]]:
    """Secrets of type kubernetes.io/tls with the certificates that `baton certs` writes."""
    certs.write(folder, hosts)
    return {
        secret: {
            "ca.crt": (folder / "ca.pem").read_bytes(),
            "tls.crt": (folder / f"{role}.pem").read_bytes(),
            "tls.key": (folder / f"{role}-key.pem").read_bytes(),
        }
        for role, secret in SECRETS.items()
    }


@asynccontextmanager
async def release(tmp_path: Path, **values: Any) -> AsyncIterator[dict[str, Pod]]:
    """A pod of each template, {component or rank: pod}; all are ready."""
    created = templates(await asyncio.to_thread(install, **DEVELOPMENT, **values))
    places = dict(zip(created, loopback_addresses(), strict=False))
    known = secrets(tmp_path / "certs", list(places.values()))
    path = programs(tmp_path / "bin")
    hosts = {name: place for name, place in places.items() if "/" not in name}
    hosts |= {f"{name}s": place for name, place in hosts.items() if name.endswith("-router")}
    pods = {}
    for name, template in created.items():
        host = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1" if "/" in name else "0"}
        component = name.removeprefix("chat-baton-")
        pods[component] = Pod(component, template, tmp_path, places[name], known, host)
    try:
        for pod in sorted(pods.values(), key=lambda pod: pod.name != "etcd"):
            pod.start(hosts, path)
            if pod.name == "etcd":
                await pod.probed("readinessProbe")
        async with asyncio.TaskGroup() as group:  # the first that ends is told
            for pod in pods.values():
                group.create_task(pod.probed("startupProbe", "livenessProbe", "readinessProbe"))
        yield pods
    finally:
        for pod in pods.values():
            pod.kill()


@pytest.mark.parametrize("tls", [False, True], ids=["insecure, decode on two hosts", "TLS"])
async def test_from_nothing_to_a_first_token(tmp_path: Path, tls: bool) -> None:
    """On two hosts, the leader's and the other host's template of a LeaderWorkerSet are one
    worker."""
    values = {
        "router": {"replicas": 1},
        "workers": {} if tls else {"decode": TWO_HOSTS},
        "workerDefaults": SMALL,
        "planner": {"enabled": True},
        "tls": {"enabled": tls, "secrets": SECRETS},
    }
    async with release(tmp_path, **values) as pods:
        router = pods["router"].address
        ca = tmp_path / "certs/ca.pem" if tls else None
        context = ssl.create_default_context(cafile=ca) if ca else None
        scheme = "https" if tls else "http"
        async with httpx.AsyncClient(
            verify=context or True, trust_env=False, timeout=WAIT_S
        ) as http:
            body = {
                "model": "demo",
                "prompt": "class Stack:" * 20,
                "max_tokens": 8,
                "temperature": 0,
            }
            url = f"{scheme}://{router}:{pods['router'].port('http')}/v1/completions"
            answer = (await http.post(url, json=body)).raise_for_status().json()
        async with AsyncClient(f"{router}:{pods['router'].port('grpc')}", ca_file=ca) as client:
            completion = await client.generate(body["prompt"], max_tokens=8, temperature=0.0)
        assert answer["choices"][0]["text"] == completion.text
        assert completion.route.decode

        serving = [name for name in pods if name not in ("etcd", "decode/rank")]
        scraped = {name: await scrape(pods[name], tmp_path, tls) for name in serving}
        assert "baton_requests_ended_total" in scraped["router"]
        assert "baton_kv_blocks" in scraped["prefill"] and "baton_kv_blocks" in scraped["decode"]
        assert "baton_planner" in scraped["planner"]
        assert ("decode/rank" in pods) is not tls
        for name in ("planner", "router", "prefill", "decode", "decode/rank"):
            if name in pods:
                assert await pods[name].stop() == 0, pods[name].log.read_text()


async def scrape(pod: Pod, tmp_path: Path, tls: bool) -> str:
    """A pod's metrics as a PodMonitor asks for them: with TLS by the name that it expects."""
    context, extensions = None, {}
    if tls:
        context = ssl.create_default_context(cafile=tmp_path / "certs/ca.pem")
        pair = (tmp_path / "certs/admin.pem", tmp_path / "certs/admin-key.pem")
        context.load_cert_chain(*pair)
        role = {"router": "router", "planner": "admin"}.get(pod.name, "worker")
        extensions = {"sni_hostname": f"{role}.baton"}
    url = f"http{'s' if tls else ''}://{pod.address}:{pod.port('metrics')}/metrics"
    async with httpx.AsyncClient(verify=context or True, trust_env=False, timeout=WAIT_S) as http:
        return (await http.get(url, extensions=extensions)).raise_for_status().text
