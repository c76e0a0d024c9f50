"""What a chaos run trusts: the judge finds every violation, and faults do what they say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton import errors
from baton.client import Completion, TokenLogprobs, Usage
from baton.local import ports
from tests.chaos import load
from tests.chaos.checks import SLACK, leaks
from tests.chaos.faults import KINDS, KV_FAULTS, Fault, Injector, Outage, Outages, plan
from tests.chaos.judge import violation
from tests.chaos.kv_faults import Control, FaultyTransport
from tests.chaos.load import ChaosRequest, Outcome, Run
from tests.contract.kvtransfer_parts import TRANSPORTS, Pair, slots
from tests.proxy import Proxy, owner

TOKENS = tuple(range(100, 140))
TEXT = "".join(chr(97 + i % 26) for i in range(40))
LOGPROBS = tuple(TokenLogprobs(token, -0.5, ()) for token in TOKENS)
OTHER = TokenLogprobs(TOKENS[4], -0.6, ())
RUN = Run((1, 2, 3), {"temperature": 0.0}, Completion(TEXT, TOKENS, "length", logprobs=LOGPROBS))
PLAIN, STOPPED = ChaosRequest(RUN, 5, logprobs=True), ChaosRequest(RUN, 40, stop="klm")
NEITHER, ROUTER, ROLE, BOTH = (False, False), (True, False), (False, True), (True, True)


def ended(tokens: int | tuple[int, ...], end: str, lasted_s: float = 1.0, **more: Any) -> Outcome:
    ids = TOKENS[:tokens] if isinstance(tokens, int) else tokens
    return Outcome(10.0, ended_s=10.0 + lasted_s, token_ids=list(ids), end=end, **more)


def whole(request: ChaosRequest, **other: Any) -> Outcome:
    """A request's right end, but for what is given otherwise."""
    count = request.max_tokens
    fields: dict[str, Any] = {
        "text": TEXT[:count], "token_ids": TOKENS[:count], "finish_reason": "length",
        "logprobs": LOGPROBS[:count] if request.logprobs else (), "usage": Usage(3, count),
    }  # fmt: skip
    if request.stop:
        text = TEXT[: TEXT.index(request.stop)]
        fields |= {"text": text, "finish_reason": "stop", "stop": request.stop}
    completion = Completion(**{**fields, **other})
    return ended(completion.token_ids, load.COMPLETE, completion=completion)


def failed(
    error: errors.BatonError, tokens: int = 0, lasted_s: float = 1.0, end: str = load.FAILED
) -> Outcome:
    return ended(tokens, end, lasted_s, error=error)


HASTY = ChaosRequest(RUN, 40, timeout_s=0.5)
OUTCOMES = [  # what is wrong with it, or "" where nothing is
    (ChaosRequest(RUN, 40), whole(ChaosRequest(RUN, 40)), NEITHER, ""),
    (PLAIN, whole(PLAIN), NEITHER, ""),
    (STOPPED, whole(STOPPED), NEITHER, ""),
    (PLAIN, ended(4, load.CANCELLED), NEITHER, ""),
    (PLAIN, whole(PLAIN, token_ids=(100, 101, 7, 103, 104)), BOTH, "other tokens"),
    (PLAIN, whole(PLAIN, token_ids=TOKENS[:4]), BOTH, "4"),
    (PLAIN, whole(PLAIN, token_ids=TOKENS[:6]), BOTH, "6"),
    (PLAIN, whole(PLAIN, finish_reason="stop"), BOTH, "stop"),
    (PLAIN, whole(PLAIN, text="abxde"), BOTH, "other text"),
    (PLAIN, whole(PLAIN, usage=Usage(3, 6)), BOTH, "6"),
    (PLAIN, whole(PLAIN, usage=Usage(4, 5)), BOTH, "4"),
    (PLAIN, whole(PLAIN, logprobs=LOGPROBS[:4]), BOTH, "4 of 5"),
    (PLAIN, whole(PLAIN, logprobs=(*LOGPROBS[:4], OTHER)), BOTH, "at token 4"),
    (STOPPED, whole(STOPPED, text=TEXT, finish_reason="length", stop=""), NEITHER, "stop"),
    (PLAIN, ended((100, 9), load.CANCELLED), NEITHER, "other tokens"),
    (PLAIN, ended((100, 9), load.FAILED, error=errors.Unavailable("gone")), BOTH, "other tokens"),
    (PLAIN, ended(0, load.NO_END, 99.0), BOTH, "did not end"),
    # A router or a whole role that is down excuses some errors.
    (PLAIN, failed(errors.Unavailable("none")), ROUTER, ""),
    (PLAIN, failed(errors.Unavailable("none"), 2), ROLE, ""),
    (PLAIN, failed(errors.Unavailable("none")), NEITHER, "Unavailable"),
    (PLAIN, failed(errors.Cancelled("its server was stopped")), ROUTER, ""),
    (PLAIN, failed(errors.Cancelled("its server was stopped")), NEITHER, "Cancelled"),
    (PLAIN, failed(errors.InternalError("a bug")), BOTH, "InternalError"),
    (PLAIN, failed(errors.TransferFailed("lost")), BOTH, "TransferFailed"),
    (HASTY, failed(errors.DeadlineExceeded("late"), 3, 0.6), NEITHER, ""),
    (HASTY, failed(errors.DeadlineExceeded("late"), 3, 11.0), NEITHER, "after 11.0 s and 3 tokens"),
    (PLAIN, failed(errors.DeadlineExceeded("late")), ROUTER, "DeadlineExceeded"),
    # A refusal comes before any token, with advice when to come again.
    (PLAIN, failed(errors.Overloaded("full", 0.5)), NEITHER, ""),
    (PLAIN, failed(errors.Overloaded("full")), ROUTER, "Overloaded"),
    (PLAIN, failed(errors.Overloaded("full", 0.5), tokens=1), NEITHER, "1 tokens"),
    # A stream over HTTP is cut, or not reached, only by its own router's death.
    (PLAIN, failed(errors.Unavailable("x"), end=load.CUT), ROUTER, ""),
    (PLAIN, failed(errors.Unavailable("x"), end=load.CUT), ROLE, "x"),
    (PLAIN, failed(errors.Unavailable("x"), end=load.UNREACHED), ROUTER, ""),
    (PLAIN, failed(errors.Unavailable("x"), end=load.UNREACHED), ROLE, "x"),
    (PLAIN, failed(errors.Unavailable("x", 1.0), end=load.REFUSED), NEITHER, ""),
    (PLAIN, failed(errors.Unavailable("x"), end=load.REFUSED), BOTH, "x"),
    (PLAIN, failed(errors.Unavailable("x"), end=load.ERROR_EVENT), ROLE, ""),
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
    faults = list(plan(1, 2000.0, PROCESSES))
    short = list(plan(1, 50.0, PROCESSES))
    assert short == faults[: len(short)] != list(plan(2, 50.0, PROCESSES))[: len(short)]
    assert {fault.kind for fault in faults} == set(KINDS)
    for fault in faults:
        assert fault.target in {"kv": KV_FAULTS, "etcd": ("etcd",)}.get(fault.kind, PROCESSES)
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
    assert outages.memory_lost(9.0, 11.0)
    assert not outages.memory_lost(14.0, 40.0), "only a kill's beginning counts"


async def test_the_last_of_a_role_is_spared_unless_it_is_meant() -> None:
    processes = {name: SimpleNamespace(name=name, role=role) for name, role in PROCESSES.items()}
    killed: list[str] = []
    cluster: Any = SimpleNamespace(
        processes=processes, kill=lambda name, signum: killed.append(name)
    )
    injector = Injector(cluster, {}, Path(), {}, lambda line: None)
    injector.outages.all.append(Outage("decode-0", "kill", 0.0))
    await injector.run([
        Fault(0.0, "stop", "decode-1"),
        Fault(0.0, "stop", "prefill-1"),
        Fault(0.01, "stop", "prefill-0"),
        Fault(0.02, "stop", "decode-1", may_hit_last=True),
    ])  # fmt: skip
    assert set(killed) == {"prefill-1", "decode-1"}
    assert (injector.done["stop"], injector.skipped) == (2, 2)


def test_leaks_are_what_grew_beyond_the_slack_in_processes_that_lived() -> None:
    def held(extra: int) -> dict[str, dict[str, int]]:
        return {"tasks": {"a": 3}, "threads": {"main": 1}, "files": {"socket": 10 + extra}}

    slack = SLACK["files"]
    assert leaks({1: held(0)}, {1: held(slack)}) == leaks({1: held(0)}, {2: held(1000)}) == []
    (found,) = leaks({1: held(0)}, {1: held(slack + 1)})
    assert "socket" in found


async def test_the_proxy_cuts_holds_and_slows_one_caller_alone() -> None:
    names: dict[int, str] = {}  # by local port

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)

    async def dial(caller: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        names[mine := ports.free()] = caller
        port = int(proxy.address.rpartition(":")[2])
        assert owner(mine, {"me": os.getpid()}) == "unknown"
        streams = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.1", mine))
        assert owner(mine, {"gone": 2**22 + 1, "me": os.getpid()}) == "me"
        return streams

    async def echoed(caller: str, size: int = 4, timeout_s: float = 5.0) -> None:
        reader, writer = streams[caller]
        writer.write(b"x" * size)
        async with asyncio.timeout(timeout_s):
            assert await reader.readexactly(size) == b"x" * size

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server, Proxy(server.sockets[0].getsockname()[1], names.__getitem__) as proxy:
        streams = {caller: await dial(caller) for caller in ("one", "other")}
        for caller in streams:
            await echoed(caller, 100_000)
        proxy.cut("one")
        with pytest.raises(ConnectionResetError):
            await streams["one"][0].readexactly(1)
        proxy.hold("one")
        streams["one"] = await dial("one")  # a new connection is held, too
        with pytest.raises(TimeoutError):
            await echoed("one", timeout_s=0.1)
        await echoed("other")
        proxy.release("one")
        assert await streams["one"][0].readexactly(4) == b"xxxx"
        proxy.slow(200_000.0, "one")
        began = time.monotonic()
        await echoed("one", 60_000)
        assert time.monotonic() - began > 0.2
        for _, writer in streams.values():
            writer.transport.abort()


@pytest.mark.parametrize("name", ["shm", "gloo"])
def test_faults_of_kv_transfers(tmp_path: Path, name: str) -> None:
    """Nothing without a control file; else bytes or the link are broken, and the sender's stay."""
    control = tmp_path / "kv.json"
    local, remote = slots(12, 3, 4, 5), slots(12, 9, 2, 7)
    pair = Pair(FaultyTransport(TRANSPORTS[name](), Control(control)))
    try:
        before = pair.source.tensor.clone()
        sent, arrived = pair.move(local, remote)
        assert (sent.value, sent.num_bytes) == (arrived.value, arrived.num_bytes)
        assert torch.equal(pair.target.tensor[9], pair.source.tensor[3])
        for fault in ("corrupt", "lose"):
            control.write_text(json.dumps({"fault": fault, "every": 2}))
            spared = []
            for _ in range(2):
                sent, arrived = pair.move(local, remote)
                assert pair.source.digest(local).value == sent.value
                spared.append(sent.value == arrived.value)
            assert spared == [True, False]
        control.write_text(json.dumps({"fault": "fail"}))
        with pytest.raises(errors.TransferFailed):
            pair.move(local, remote)
        assert torch.equal(pair.source.tensor, before), "the sender's blocks are as they were"
        assert control.with_suffix(".done").read_text() == "corrupt\nlose\nfail\n"
    finally:
        pair.close()
