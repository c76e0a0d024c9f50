"""Long texts are tokenized by processes: as at once, fair, bounded, and none of them stays."""

import asyncio
import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from baton.config import DEMO_MODEL
from baton.errors import ContextOverflow, InternalError, InvalidRequest, Overloaded
from baton.text import load_tokenizer
from baton.v1 import inference_pb2
from router.admission import tokenizer_pool
from router.admission.chat import ChatFormats
from router.admission.tokenizer_pool import Text, TokenizerPool
from router.request import TenantShare
from tests.processes import PYTHON, run
from tests.waiting import eventually

from .small_tokenizers import TEMPLATE, byte_tokenizer

NESTED = "{% set ns = namespace(a=[1], b=[1]) %}" + (
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}" * 60
)
# One comparison of minutes, which no bound of the template's interpreter sees.
ENDLESS = (
    "{% if messages[0].content == 'go' %}" + NESTED + "{{ ns.a == ns.b }}{% endif %}" + TEMPLATE
)


def chat(*contents, role="user"):
    messages = [inference_pb2.ChatMessage(role=role, content=content) for content in contents]
    return inference_pb2.Chat(messages=messages)


def text_of(*contents, **fields):
    return Text("chat", chat(*contents).SerializeToString(), **fields)


def running(pids):
    """Which of these processes there are."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.fixture
async def pool_of(tmp_path):
    """Makes pools of the small tokenizer; afterwards none of their processes is left."""
    made, started = [], tokenizer_pool._Process.__init__
    pids = []

    def start(self, command):
        started(self, command)
        pids.append(self._process.pid)

    def make(template=TEMPLATE, processes=1, fingerprint="", path=tmp_path):
        tokenizer = byte_tokenizer(tmp_path, template=template) if path == tmp_path else None
        arguments = (str(path), fingerprint or tokenizer.fingerprint, "auto")
        made.append(TokenizerPool(arguments, processes))
        made[-1].pids = pids
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_pool._Process, "__init__", start)
        yield make
    for pool in made:
        await pool.close()
    assert not running(pids)


async def test_ids_are_those_of_this_process_and_a_process_is_used_again(pool_of):
    tokenizer = load_tokenizer(DEMO_MODEL)
    pool = pool_of(path=DEMO_MODEL.resolve(), fingerprint=tokenizer.fingerprint, processes=2)
    formats = ChatFormats.from_tokenizer(tokenizer)
    turns, flow = ["def f(x):\n    return x\n" * 300, "é" * 50, "\n"], TenantShare("a")
    for end in (1, 2, 3, 3):
        expected = formats.encode(chat(*turns[:end]), 0)
        assert [*await pool.encode(text_of(*turns[:end]), flow)] == expected
    plain = Text("text", "é x".encode() * 5000, add_special_tokens=True)
    assert [*await pool.encode(plain, flow)] == tokenizer.encode("é x" * 5000)
    assert len(pool.pids) == 1
    with pytest.raises(ContextOverflow, match="the context holds 100") as caught:
        await pool.encode(text_of("x y" * 40_000, max_tokens=100), flow)
    assert (caught.value.field, caught.value.max_context) == ("chat", 100)
    with pytest.raises(InvalidRequest, match="middle of a text") as caught:
        await pool.encode(Text("text", b"a", b"b"), flow)
    assert caught.value.field == "suffix"
    await asyncio.gather(*(pool.encode(text_of(*turns), flow) for _ in range(8)))
    assert len(pool.pids) == 2, "as many as it may have"


async def test_what_takes_too_long_is_refused_with_its_process_and_others_go_on(
    pool_of, monkeypatch
):
    monkeypatch.setattr(tokenizer_pool, "_MIN_CPU_S", 1)
    pool, flow = pool_of(ENDLESS), TenantShare("a")
    first = asyncio.create_task(pool.encode(text_of("go"), flow))
    second = asyncio.create_task(pool.encode(text_of("hi"), flow))
    with pytest.raises(InvalidRequest, match=r"over 1 s of CPU time.*shorten it") as caught:
        await first
    assert caught.value.field == "chat"
    assert len(await second) == len("user:hi\nassistant:")
    assert len(pool.pids) == 2


async def test_a_process_that_ends_is_replaced_and_a_model_that_changed_is_named(pool_of, tmp_path):
    pool, flow = pool_of(ENDLESS), TenantShare("a")
    await pool.encode(text_of("hi"), flow)
    os.kill(pool.pids[-1], signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, pool.pids[-1], os.WEXITED | os.WNOWAIT)
    await pool.encode(text_of("hi"), flow)
    assert len(pool.pids) == 2
    spent_s = psutil.Process(pool.pids[-1]).cpu_times().user
    task = asyncio.create_task(pool.encode(text_of("go"), flow))

    async def busy_s():
        return psutil.Process(pool.pids[-1]).cpu_times().user - spent_s

    await eventually(busy_s, lambda seconds: seconds > 0.1, "it does not run")
    os.kill(pool.pids[-1], signal.SIGKILL)
    with pytest.raises(InternalError, match="SIGKILL"):
        await task
    changed = pool_of(fingerprint="another")
    with pytest.raises(InternalError, match="has changed since the router was started"):
        await changed.encode(text_of("hi"), flow)


async def test_a_tenant_of_many_texts_delays_no_other_and_too_many_are_refused(
    pool_of, monkeypatch
):
    monkeypatch.setattr(tokenizer_pool, "MAX_WAITING", 20)
    pool, done = pool_of(), []

    async def encode(tenant, number):
        try:
            await pool.encode(text_of("x" * 20_000), TenantShare(tenant))
            done.append((tenant, number))
        except Overloaded as error:
            assert error.retry_after_s
            done.append((tenant, "refused"))

    async with asyncio.TaskGroup() as group:
        for number in range(25):
            group.create_task(encode("many", number))
        await asyncio.sleep(0)  # one runs, 20 wait, four are refused
        assert done == [("many", "refused")] * 4
        few = [group.create_task(encode("few", number)) for number in range(2)]
        await asyncio.wait(few)
        assert done.count(("many", "refused")) == 6, "one for each of the other tenant's"
        assert len([one for one in done if one[0] == "many" and one[1] != "refused"]) <= 4
    assert len(done) == 27 and not pool._waiting and not pool._running


async def test_who_leaves_while_it_waits_costs_nothing_and_a_process_is_kept(pool_of):
    pool, flow = pool_of(), TenantShare("a")
    tasks = [asyncio.create_task(pool.encode(text_of("x" * 20_000), flow)) for _ in range(3)]
    await asyncio.sleep(0)
    for task in tasks[:2]:  # one that runs, and one that waits
        task.cancel()
    assert len(await tasks[2]) > 20_000
    assert len(pool.pids) == 1 and all(task.cancelled() for task in tasks[:2])


async def test_closing_cancels_what_runs_and_waits(pool_of):
    pool, flow = pool_of(ENDLESS), TenantShare("a")
    tasks = [asyncio.create_task(pool.encode(text_of("go"), flow)) for _ in range(2)]
    await asyncio.sleep(0.2)
    await pool.close()
    assert [type(end) for end in await asyncio.gather(*tasks, return_exceptions=True)] == [
        asyncio.CancelledError
    ] * 2


def test_a_router_that_is_killed_leaves_none(tmp_path):
    tokenizer = byte_tokenizer(tmp_path)
    arguments = json.dumps([str(tmp_path), tokenizer.fingerprint, "auto"])
    program = f"""if True:
        import asyncio, os
        from router.request import TenantShare
        from router.admission.tokenizer_pool import Text, TokenizerPool

        async def main():
            pool = TokenizerPool({arguments}, 1)
            await pool.encode(Text("text", b"x" * 9000), TenantShare("a"))
            print(pool._idle[0]._process.pid, flush=True)
            os.kill(os.getpid(), 9)

        asyncio.run(main())
    """
    killed = run([*PYTHON, program])
    assert killed.status == -signal.SIGKILL
    ended = False
    while not ended:  # until the suite's own time-out
        try:
            ended = "(zombie)" in Path(f"/proc/{int(killed.out)}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            ended = True
