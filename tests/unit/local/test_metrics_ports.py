"""Where the processes of a local cluster serve their metrics."""

from __future__ import annotations

import pytest

from baton.config import ClusterConfig
from baton.local import ports
from baton.local.cluster import LocalCluster


def test_they_follow_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "check_free", lambda *args: None)
    cluster = LocalCluster(ClusterConfig(metrics_port=9400))
    given = [cluster._metrics_port(name, "127.0.0.1") for name in ("router", "prefill-0")]
    assert given == [9400, 9401]
    assert cluster.metrics == {"router": "127.0.0.1:9400", "prefill-0": "127.0.0.1:9401"}


def test_free_ones_and_none() -> None:
    cluster = LocalCluster(ClusterConfig(metrics_port=0))
    port = cluster._metrics_port("router", "127.0.0.1")
    assert port and cluster.metrics == {"router": f"127.0.0.1:{port}"}
    silent = LocalCluster(ClusterConfig())
    assert silent._metrics_port("router", "127.0.0.1") is None and silent.metrics == {}
