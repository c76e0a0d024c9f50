"""What a chaos run trusts: the judge finds every violation, and faults do what they say."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from baton import errors
from baton.client import Completion, TokenLogprobs, Usage
from baton.local import ports
from baton.local.cluster import LocalCluster
from tests.chaos import checks, faults, load
from tests.chaos.faults import KINDS, ROUTER_SILENCE_S, SILENCE_S, TARGETS, Outage, Outages, plan
from tests.chaos.judge import violation
from tests.chaos.load import ChaosRequest, Outcome, Run
from tests.processes import left_behind, own_shared_memory
from tests.proxy import Proxy, owner

TOKENS = tuple(range(100, 140))
TEXT = "".join(chr(97 + i % 26) for i in range(40))
LOGPROBS = tuple(TokenLogprobs(token, -0.5, ()) for token in TOKENS)
OTHER = TokenLogprobs(TOKENS[4], -0.6, ())
RUN = Run(
    (1, 2, 3), {"temperature": 0.0}, Completion(TEXT, TOKENS, "length", logprobs=LOGPROBS),
    lambda ids: "".join(TEXT[one - 100] for one in ids),
)  # fmt: skip
PLAIN, STOPPED = ChaosRequest(RUN, 5, logprobs=True), ChaosRequest(RUN, 40, stop="klm")
NEITHER, ROUTER, WORKERS, BOTH = (False, False), (True, False), (False, True), (True, True)


def ended(tokens: int | tuple[int, ...], end: str, lasted_s: float = 1.0, **more: Any) -> Outcome:
    ids = TOKENS[:tokens] if isinstance(tokens, int) else tokens
    return Outcome(10.0, ended_s=10.0 + lasted_s, token_ids=list(ids), end=end, **more)


def whole(request: ChaosRequest, **other: Any) -> Outcome:
    """A request's right end, but for what is given otherwise."""
    count = request.tokens_of(RUN.whole)
    fields: dict[str, Any] = {
        "text": TEXT[:count], "token_ids": TOKENS[:count], "finish_reason": "length",
        "logprobs": LOGPROBS[:count] if request.logprobs else (), "usage": Usage(3, count),
    }  # fmt: skip
    if request.stop:
        text = TEXT[: TEXT.index(request.stop)]
        fields |= {"text": text, "finish_reason": "stop", "stop": request.stop}
    completion = Completion(**{**fields, **other})
    outcome = ended(completion.token_ids, load.COMPLETE, completion=completion)
    outcome.times = [10.1, 10.9]
    return outcome


def failed(
    error: errors.BatonError, tokens: int = 0, lasted_s: float = 1.0, end: str = load.FAILED
) -> Outcome:
    return ended(tokens, end, lasted_s, error=error)


def paused(outcome: Outcome, *times: float, lag_s: float = 0.0) -> Outcome:
    """The same with its tokens at these times; it ends with the last one."""
    outcome.times, outcome.ended_s, outcome.lag_s = list(times), times[-1], lag_s
    return outcome


def but(outcome: Outcome, **other: Any) -> Outcome:
    """The same, whose completion does not agree with what was delivered."""
    assert outcome.completion is not None
    outcome.completion = replace(outcome.completion, **other)
    return outcome


HASTY = ChaosRequest(RUN, 40, timeout_s=0.5)
HASTY_HTTP = ChaosRequest(RUN, 40, timeout_s=0.5, http=True)
OUTCOMES = [  # what is wrong with it, or "" where nothing is
    (PLAIN, whole(PLAIN), NEITHER, ""),
    (STOPPED, whole(STOPPED), NEITHER, ""),
    (PLAIN, ended(4, load.CANCELLED), NEITHER, ""),
    (PLAIN, whole(PLAIN, token_ids=(100, 101, 7, 103, 104)), BOTH, "other tokens"),
    (PLAIN, whole(PLAIN, token_ids=TOKENS[:4]), BOTH, "4"),
    (PLAIN, whole(PLAIN, finish_reason="stop"), BOTH, "stop"),
    (PLAIN, whole(PLAIN, text="abxde"), BOTH, "other text in the end"),
    (PLAIN, whole(PLAIN, text=""), BOTH, "other text in the end"),
    (PLAIN, whole(PLAIN, text="ab"), BOTH, "other text in the end"),
    (PLAIN, but(whole(PLAIN), token_ids=(1, 2, 3, 4, 5)), BOTH, "((1, 2, 3, 4, 5)"),
    (PLAIN, whole(PLAIN, token_ids=TOKENS[:6]), BOTH, "6 tokens"),
    (PLAIN, ended(2, load.COMPLETE), BOTH, "NoneType after"),
    (PLAIN, ended(2, load.FAILED), BOTH, "NoneType after"),
    (STOPPED, whole(STOPPED, usage=Usage(3, 40)), BOTH, "13, 40, 3"),
    (STOPPED, whole(STOPPED, token_ids=TOKENS[:14]), BOTH, "14 tokens"),
    (STOPPED, failed(errors.Unavailable("none"), 14), BOTH, "14 tokens"),
    # Pauses: before the first token, between two, and before the end.
    (PLAIN, paused(whole(PLAIN), 14.9, 19.8), NEITHER, ""),
    (PLAIN, paused(whole(PLAIN), 20.0, 30.0, lag_s=1.1), NEITHER, ""),
    (PLAIN, paused(whole(PLAIN), 20.0, 30.0, lag_s=0.9), BOTH, "10.0 s from 0.0 s"),
    (PLAIN, paused(whole(PLAIN), 10.1, 250.0), BOTH, "239.9 s from 0.1 s"),
    (PLAIN, paused(ended(4, load.CANCELLED), 10.1, 15.2), BOTH, "5.1 s from 0.1 s"),
    (PLAIN, ended(4, load.CANCELLED, 360.0), NEITHER, "360.0 s from 0.0 s"),
    (PLAIN, whole(PLAIN, usage=Usage(4, 6)), BOTH, "6, 4"),
    (PLAIN, whole(PLAIN, logprobs=LOGPROBS[:4]), BOTH, "4 of 5"),
    (PLAIN, whole(PLAIN, logprobs=(*LOGPROBS[:4], OTHER)), BOTH, "at token 4"),
    (STOPPED, whole(STOPPED, text=TEXT, finish_reason="length", stop=""), NEITHER, "stop"),
    (PLAIN, ended((100, 9), load.FAILED, error=errors.Unavailable("gone")), BOTH, "other tokens"),
    (PLAIN, ended(0, load.NO_END, 99.0), BOTH, "did not end"),
    # Without a router, or without a worker, some errors are right.
    (PLAIN, failed(errors.Unavailable("none")), ROUTER, ""),
    (PLAIN, failed(errors.Unavailable("none"), 2), WORKERS, ""),
    (PLAIN, failed(errors.Unavailable("none")), NEITHER, "Unavailable"),
    (PLAIN, failed(errors.Cancelled("its server was stopped")), ROUTER, ""),
    (PLAIN, failed(errors.Cancelled("its server was stopped")), NEITHER, "Cancelled"),
    (PLAIN, failed(errors.InternalError("a bug")), BOTH, "InternalError"),
    (HASTY, failed(errors.DeadlineExceeded("late"), 3, 0.6), NEITHER, ""),
    (HASTY, failed(errors.DeadlineExceeded("late"), 3, 11.0), NEITHER, "after 11.0 s and 3 tokens"),
    (HASTY, failed(errors.DeadlineExceeded("late"), 3, 11.0), ROUTER, "after 11.0 s and 3 tokens"),
    (HASTY_HTTP, failed(errors.DeadlineExceeded("late"), 3, 11.0), ROUTER, ""),
    (HASTY_HTTP, failed(errors.DeadlineExceeded("late"), 3, 11.0), WORKERS, "after 11.0 s"),
    (PLAIN, failed(errors.DeadlineExceeded("late")), ROUTER, "DeadlineExceeded"),
    # A refusal comes before any token, with advice when to come again.
    (PLAIN, failed(errors.Overloaded("full", 0.5)), WORKERS, ""),
    (PLAIN, failed(errors.Overloaded("full", 0.5)), NEITHER, "Overloaded"),
    (HASTY, failed(errors.Overloaded("too late", 0.5)), NEITHER, ""),
    (PLAIN, failed(errors.Overloaded("full")), ROUTER, "Overloaded"),
    (PLAIN, failed(errors.Overloaded("full", 0.5), tokens=1), BOTH, "1 tokens"),
    # A stream over HTTP is cut, or not reached, only by its own router's death.
    (PLAIN, failed(errors.Unavailable("x"), end=load.CUT), ROUTER, ""),
    (PLAIN, failed(errors.Unavailable("x"), end=load.CUT), WORKERS, "x"),
    (PLAIN, failed(errors.Unavailable("x"), end=load.UNREACHED), ROUTER, ""),
    (PLAIN, failed(errors.Unavailable("x"), end=load.UNREACHED), WORKERS, "x"),
    (PLAIN, failed(errors.Unavailable("x", 1.0), end=load.REFUSED), ROUTER, ""),
    (PLAIN, failed(errors.Unavailable("x", 1.0), end=load.REFUSED), NEITHER, "x"),
    (PLAIN, failed(errors.Unavailable("x"), end=load.REFUSED), BOTH, "x"),
    (PLAIN, failed(errors.Unavailable("x"), end=load.ERROR_EVENT), WORKERS, ""),
    (PLAIN, failed(errors.Unavailable("x"), end=load.ERROR_EVENT), NEITHER, "x"),
]


@pytest.mark.parametrize(("request_", "outcome", "down", "wrong"), OUTCOMES)
def test_every_violation_is_found_and_nothing_else(
    request_: ChaosRequest, outcome: Outcome, down: tuple[bool, bool], wrong: str
) -> None:
    found = violation(request_, outcome, *down)
    assert wrong in found
    assert bool(found) == bool(wrong)


PROCESSES = {
    f"{role}-{number}": role for role in ("router", "prefill", "decode") for number in (0, 1)
}


def test_a_seed_decides_faults_of_every_kind() -> None:
    planned = list(plan(1, 2000.0, PROCESSES))
    short = list(plan(1, 50.0, PROCESSES))
    assert short == planned[: len(short)] != list(plan(2, 50.0, PROCESSES))[: len(short)]
    assert {fault.kind for fault in planned} == set(KINDS)
    pairs = [PROCESSES[fault.target] == "router" for fault in planned if fault.kind == "pair"]
    assert pairs == [True, False] * (len(pairs) // 2), "a router and a worker"
    for fault in planned:
        assert fault.target in TARGETS.get(fault.kind, PROCESSES)
        if fault.other:  # only a decode worker is called by prefill workers
            role = PROCESSES[fault.other]
            assert role == "router" or (PROCESSES[fault.target], role) == ("decode", "prefill")


def test_outages_of_a_role_of_one_router_and_of_memory() -> None:
    outages = Outages(PROCESSES, [
        Outage("decode-0", "kill", 10.0, 20.0),
        Outage("decode-1", "stop", 25.0, 30.0),
        Outage("prefill-0", "kill", 12.0),  # not over yet
        Outage("router-0", "kill", 50.0, 60.0),
        Outage("router-1", "drain", 58.0, 70.0),
    ])  # fmt: skip
    assert not outages.role_down("decode", 0.0, 100.0), "not at one moment"
    outages.all += [Outage("decode-1", "hole", 19.0, 21.0), Outage("prefill-1", "kill", 13.0)]
    for role, from_s, until_s, down in (
        ("decode", 0.0, 100.0, True), ("decode", 19.5, 19.6, True), ("decode", 0.0, 18.0, False),
        ("decode", 20.5, 100.0, False), ("prefill", 500.0, 600.0, True),
        ("router", 55.0, 59.0, True), ("router", 50.0, 57.0, False),
    ):  # fmt: skip
        assert outages.role_down(role, from_s, until_s) is down, (role, from_s)
    assert outages.any_down(("router-1",), 65.0, 66.0)
    assert not outages.any_down(("router-1",), 65.0, 66.0, ("kill",))
    assert not outages.any_down(("router-1",), 71.0, 72.0)
    outages.all.append(Outage("decode-1", "role", 75.0, 80.0))
    assert not outages.any_down(("decode-1",), 76.0, 77.0), "it serves on"
    assert outages.memory_lost(9.0, 11.0)
    assert not outages.memory_lost(14.0, 40.0), "only a kill's beginning counts"


def test_what_a_pause_may_take_depends_on_what_was_hit() -> None:
    outages = Outages(PROCESSES, [
        Outage("decode-0", "hole", 10.0, 14.0), Outage("router-0", "freeze", 20.0, 50.0),
        Outage("delay", "kv", 60.0, 63.0), Outage("decode-0", "role", 60.0, 63.0),
        Outage("decode-0", "kill", 70.0), Outage("decode-1", "kill", 71.0),
    ])  # fmt: skip
    for from_s, until_s, router, seconds in (
        (0.0, 9.0, "", 0.0), (0.0, 15.0, "", SILENCE_S), (13.5, 15.0, "", 0.5),
        (15.0, 55.0, "", ROUTER_SILENCE_S), (15.0, 55.0, "router-0", 30.0),
        (59.0, 62.0, "", 2.0), (65.0, 70.8, "", 0.8), (65.0, 75.0, "", math.inf),
    ):  # fmt: skip
        found = outages.excused_s(("decode", "router"), router, from_s, until_s)
        assert found == pytest.approx(seconds), from_s


async def test_a_fault_counts_only_if_it_hits_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "RECOVERED_S", 0.0)
    async with Proxy(ports.free(), lambda port: "router-0") as proxy:
        cluster, proxies = cast("LocalCluster", None), {"decode-0": proxy}
        injector = faults.Injector(cluster, proxies, Path(), {}, print, Outages(PROCESSES), ())
        cut = faults.Fault(0.0, "cut", "decode-0", other="router-0")
        await injector.run([cut])
        assert (injector.done, injector.missed) == ({}, {"cut": 1})
        proxy.hold()
        _, writer = await asyncio.open_connection(*proxy.address.split(":"))
        while not proxy.of():  # noqa: ASYNC110 - it sends no event
            await asyncio.sleep(0)
        await injector.run([replace(cut, other="router-1")])
        await injector.run([cut])
        writer.close()
    assert (injector.done, injector.missed) == ({"cut": 1}, {"cut": 2})


def test_processes_and_files_that_are_left_are_found(tmp_path: Path) -> None:
    shared_memory = own_shared_memory()
    (tmp_path / "baton-etcd-1").touch()
    shell = ["sh", "-c", "sleep 100 >&2 & echo $!"]
    orphan = int(subprocess.check_output(shell, env={**os.environ, "TMPDIR": str(tmp_path)}))
    try:
        process, file = left_behind(tmp_path, shared_memory)
        assert f"process {orphan} still runs: ['sleep', '100']" in process
        assert "baton-etcd-1" in file
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_what_a_process_or_its_successor_holds_more_is_found() -> None:
    before = {"tasks": {"a": 1}, "threads": {}, "files": {"d": 10}, "memory": {"MiB": 90}}
    few = {"tasks": {"a": 13}, "threads": {}, "files": {"d": 26}, "memory": {"MiB": 346}}
    assert checks.leaks({"router-0": before}, {"router-0": few}) == []
    for kind, count in (("tasks", 14), ("threads", 7), ("files", 27), ("memory", 347)):
        (found,) = checks.leaks({"router-0": before}, {"router-0": {**few, kind: {"x": count}}})
        assert f"router-0 holds more {kind}" in found


def test_links_of_living_workers_count_in_their_direction() -> None:
    living = {"prefill-0-a", "prefill-1-a", "decode-0-b"}
    sent = {
        ("prefill-0-a", "decode-0-b"): 1,
        ("decode-0-b", "prefill-0-a"): 1,  # while they had each other's role
        ("prefill-1-a", "decode-0-b"): 0,
        ("prefill-1-a", "decode-0-a"): 1,  # a process that was replaced
    }
    pairs = [{"prefill": p, "decode": d, "sent_bytes": n} for (p, d), n in sent.items()]
    both = {("prefill-0", "decode-0"), ("decode-0", "prefill-0")}
    assert checks.used_links(pairs, living) == both


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["ipv4", "mapped"])
def test_the_process_at_the_other_end_of_a_connection_is_known(family: int) -> None:
    """gRPC connects to addresses of IPv4 with sockets of IPv6."""
    host = "127.0.0.1" if family == socket.AF_INET else "::ffff:127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(family) as client:
        client.connect((host, server.getsockname()[1]))
        accepted, (_, port) = server.accept()
        with accepted:
            assert owner(port, {"parent": os.getppid(), "this": os.getpid()}) == "this"
            assert owner(port, {"parent": os.getppid()}) == "unknown"
