"""Installs the Helm chart into an API server that only records what it is sent.

`helm_sdkpy` is Helm as a library; it renders charts only while it installs them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[2] / "deploy/helm/baton"
RELEASE, NAMESPACE = "chat", "serving"
# {group and version: {plural: kind}}
KINDS = {
    "v1": {"configmaps": "ConfigMap", "services": "Service", "secrets": "Secret"},
    "apps/v1": {"deployments": "Deployment", "statefulsets": "StatefulSet"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "leaderworkerset.x-k8s.io/v1": {"leaderworkersets": "LeaderWorkerSet"},
    "keda.sh/v1alpha1": {
        "scaledobjects": "ScaledObject",
        "triggerauthentications": "TriggerAuthentication",
    },
    "cert-manager.io/v1": {"certificates": "Certificate"},
    "monitoring.coreos.com/v1": {
        "podmonitors": "PodMonitor",
        "prometheusrules": "PrometheusRule",
    },
}

Object = dict[str, Any]


class ApiServer(BaseHTTPRequestHandler):
    """What Helm asks of an API server: kinds, and objects, of which there are none at first."""

    created: list[Object]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].removeprefix("/").removeprefix("apis").strip("/")
        groups = [name for name in KINDS if "/" in name]
        if path == "version":
            self.answer({"major": "1", "minor": "33", "gitVersion": "v1.33.0"})
        elif path == "api":
            self.answer({"kind": "APIVersions", "versions": ["v1"]})
        elif not path:
            versions = [{"groupVersion": name, "version": name.split("/")[1]} for name in groups]
            named = [
                {
                    "name": one["groupVersion"].split("/")[0],
                    "versions": [one],
                    "preferredVersion": one,
                }
                for one in versions
            ]
            self.answer({"kind": "APIGroupList", "apiVersion": "v1", "groups": named})
        elif kinds := KINDS.get(path.removeprefix("api/")):
            resources = [
                {
                    "name": plural,
                    "singularName": "",
                    "namespaced": True,
                    "kind": kind,
                    "verbs": ["create"],
                }
                for plural, kind in kinds.items()
            ]
            group = path.removeprefix("api/")
            self.answer({"kind": "APIResourceList", "groupVersion": group, "resources": resources})
        else:
            self.answer({"kind": "Status", "status": "Failure", "reason": "NotFound"}, 404)

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        kind = self.headers["Content-Type"]
        if kind == "application/json":
            self.created.append(json.loads(content))
        self.send(content, 201, kind)  # else it is Helm's own record of the release, in protobuf

    do_PUT = do_POST

    def answer(self, body: Object, status: int = 200) -> None:
        self.send(json.dumps(body).encode(), status, "application/json")

    def send(self, content: bytes, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Takes Helm's calls at once: one that finds the queue full is made again after a second."""

    request_queue_size = 128


@contextlib.contextmanager
def api_server() -> Iterator[tuple[str, list[Object]]]:
    """A kubeconfig, and the list of what is created."""
    created: list[Object] = []
    handler = type("Handler", (ApiServer,), {"created": created})
    server = Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield (
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "test", "cluster": {"server": address}}],
                    "users": [{"name": "test", "user": {}}],
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
                    "current-context": "test",
                }
            ),
            created,
        )
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def merge(under: Any, over: Any) -> Any:
    """As Helm merges values: mappings by key, everything else replaced."""
    if not (isinstance(under, dict) and isinstance(over, dict)):
        return over
    return {**under, **{key: merge(under.get(key), value) for key, value in over.items()}}


def install(*profiles: str, **values: Any) -> list[Object]:
    """The objects of a release; see `installed`."""
    return installed(*profiles, **values)[0]


def installed(*profiles: str, release: str = RELEASE, **values: Any) -> tuple[list[Object], str]:
    """The objects and the notes of a release with these value files and values.

    Raises helm_sdkpy's InstallError with what Helm says.
    """
    helm_sdkpy = pytest.importorskip("helm_sdkpy", reason="needs helm-sdkpy: `make setup`")
    merged: Any = {}
    for profile in profiles:
        merged = merge(merged, yaml.safe_load((CHART / "profiles" / f"{profile}.yaml").read_text()))
    with api_server() as (kubeconfig, created):
        with helm_sdkpy.Configuration(NAMESPACE, kubeconfig) as configuration:
            action = helm_sdkpy.Install(configuration)
            run = action.run(release, str(CHART), merge(merged, values), wait=False)
            notes = asyncio.run(run)["info"]["notes"]
        return created, notes
