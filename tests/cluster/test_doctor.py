"""`baton doctor` beside a cluster that runs: what it says of a pair is what the pair does."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from baton.cli import doctor as doctor_command
from baton.local import ports
from tests.cluster.command import baton
from tests.cluster.conftest import ClusterFactory


async def doctor(address: str) -> dict[str, Any]:
    """The object of `doctor --json`."""
    done = await baton("doctor", "--json", "--target", address)
    assert (done.status, done.err) == (0, "")
    told: dict[str, Any] = json.loads(done.out)
    return told


@pytest.mark.parametrize(("asked", "taken"), [("auto", "shm"), ("gloo", "gloo")])
async def test_a_pair_does_what_the_doctor_says(
    cluster_factory: ClusterFactory, asked: str, taken: str
) -> None:
    settings = {} if asked == "auto" else {"transport": asked}
    cluster = await cluster_factory(**settings)
    before = await doctor(cluster.address)
    (pair,) = before["pairs"]
    assert pair["transport"] == taken and pair["problems"] == []
    generated = await baton(
        "generate", "x = [" * 40, "--target", cluster.address, "--max-tokens", "2", "--json"
    )
    assert json.loads(generated.out)["route"]["transport"] == taken
    after = await doctor(cluster.address)
    assert after["pairs"] == [{**pair, "in_use": taken}]
    assert bool(pair["not_possible"]) == (taken == "gloo")
    (all_well,) = after["cluster"]
    assert all_well["level"] == "ok"


async def test_workers_tell_of_their_hardware(cluster_factory: ClusterFactory) -> None:
    """On a CPU: torch's version and no GPU, for people as a table."""
    cluster = await cluster_factory()
    told = await doctor(f"127.0.0.1:{ports.free()},{cluster.address}")  # nobody is at the first
    assert told["router"]["answers"] and told["router"]["state"] == "SERVING"
    assert [worker["role"] for worker in told["workers"]] == ["prefill", "decode"]
    for worker in told["workers"]:
        assert worker["device"] == "cpu" and worker["gpu"] is None
        assert worker["versions"]["torch"] == torch.__version__
        assert worker["transports"] == ["shm", "gloo"]
    shown = doctor_command.render(told)  # as it is printed without --json
    assert "this machine" in shown and told["workers"][0]["incarnation"] in shown
    assert "every worker is READY" in shown
