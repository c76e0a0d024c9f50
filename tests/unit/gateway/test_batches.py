"""Files and batches: what is uploaded is run line by line, whatever happens on the way."""

import asyncio
import codecs
import contextlib
import errno
import io
import json
import os
import sqlite3
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

from baton.config import ApiConfig, RouterConfig
from baton.errors import ConfigError, InvalidRequest, Overloaded, Unauthenticated, Unavailable
from baton.gateway import batch_process, batch_runner, batch_store, batches
from baton.gateway.routes import frontend
from baton.net import http_server
from baton.v1 import common_pb2
from tests.unit.router.scripted_workers import seen
from tests.waiting import WAIT_S, eventually

from .conftest import PROMPT, tenants_of

BODY = {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True}
URL = "/v1/completions"
FINISHED = ("completed", "failed", "cancelled", "expired")
IDS = [f"r{number}" for number in range(8)]


def line(number, body=BODY, url=URL):
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}


def jsonl(lines):
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


RUN_RUNNER = batch_process.run_runner


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    """Runners are tasks of the test, without waits; their settings."""
    found = []

    async def run_runner(settings, lock, on_report):
        found.append(settings)
        await batch_runner.BatchRunner(settings, on_report).run()

    monkeypatch.setattr(batch_process, "run_runner", run_runner)
    for module, name in ((batch_runner, "_SCAN_S"), (batch_runner, "_RETRY_S"),
                         (batch_runner, "_MAX_RETRY_S"), (batch_process, "_LOCK_S")):  # fmt: skip
        monkeypatch.setattr(module, name, 0.02)
    return found


@pytest.fixture
def api(tmp_path):
    config = ApiConfig(batch_dir=tmp_path / "batches", batch_concurrency=4)
    batch_store.prepare(config.batch_dir)
    return config


@pytest.fixture
async def gateway(gateway_of, api):
    return await gateway_of(api=api)


async def upload(gateway, content, headers=None, name="in.jsonl", purpose="batch"):
    content = content if isinstance(content, bytes) else jsonl(content)
    form = {"data": {"purpose": purpose}, "files": {"file": (name, content)}}
    return await gateway.client.post("/v1/files", headers=headers, **form)


async def create(gateway, lines, headers=None, **more):
    file = (await upload(gateway, lines, headers)).json()
    body = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h", **more}
    return (await gateway.post("/v1/batches", body, headers)).json()


def select(gateway, statement):
    """Rows of the database, which a statement may change."""
    path = gateway.api.batch_dir / "batches.sqlite3"
    with contextlib.closing(sqlite3.connect(path, timeout=WAIT_S)) as db, db:
        return db.execute(statement).fetchall()


async def get(gateway, batch, headers=None):
    return (await gateway.client.get(f"/v1/batches/{batch['id']}", headers=headers)).json()


async def until(gateway, batch, good, headers=None):
    return await eventually(lambda: get(gateway, batch, headers), good, "it goes on")


async def finished(gateway, batch, headers=None):
    return await until(gateway, batch, lambda seen: seen["status"] in FINISHED, headers)


async def completed(gateway, batch, number):
    return await until(gateway, batch, lambda seen: seen["request_counts"]["completed"] == number)


async def content(gateway, file_id):
    if file_id is None:
        return []
    page = await gateway.client.get(f"/v1/files/{file_id}/content")
    assert page.status_code == 200
    return [json.loads(each) for each in page.text.splitlines()]


def ids(lines):
    return sorted(each["custom_id"] for each in lines)


async def results(gateway, batch):
    return [await content(gateway, batch[f"{kind}_file_id"]) for kind in ("output", "error")]


async def test_each_line_is_answered_as_a_request_of_its_own(gateway):
    seen, wrong = gateway.watch(), {**BODY, "max_tokens": -1}
    urgent = {**BODY, "priority": "high", "stream": True, "ttft_target_ms": 1, "model": "tiny"}
    batch = await create(gateway, [line(0), line(1, wrong), line(2, urgent)], metadata={"a": "b"})
    assert (batch["status"], batch["metadata"]) == ("validating", {"a": "b"})
    batch = await finished(gateway, batch)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    answered, refused = await results(gateway, batch)
    assert {each["custom_id"] for each in answered} == {"r0", "r2"}
    for each in answered:
        assert (each["error"], each["response"]["status_code"]) == (None, 200)
        body = each["response"]["body"]
        assert body["choices"][0]["text"] == "abcde"
        assert body["id"] == f"cmpl-{each['response']['request_id']}"
    (bad,) = refused
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("r1", 400)
    assert bad["response"]["request_id"]
    assert bad["response"]["body"]["error"]["param"] == "max_tokens"
    assert [request.priority for request, _ in seen] == [common_pb2.PRIORITY_LOW] * 2
    await eventually(
        lambda: asyncio.sleep(0, gateway.service.batch_lines),
        {"completed": 2, "failed": 1}.__eq__, "counts",
    )  # fmt: skip
    await eventually(
        lambda: asyncio.sleep(0, gateway.service.batches), {"completed": 1}.__eq__, "counts"
    )


async def test_files_may_have_byte_order_marks(gateway):
    first, last = (codecs.BOM_UTF8 + jsonl([line(number)]) for number in range(2))
    text = first + jsonl([line(2)]) + last.rstrip() + b"\r\n" + codecs.BOM_UTF8
    batch = await finished(gateway, await create(gateway, text))
    assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 3)
    answered, _ = await results(gateway, batch)
    assert ids(answered) == ["r0", "r1", "r2"]


async def test_lines_ask_for_embeddings(gateway):
    seen = gateway.watch()
    url, body = "/v1/embeddings", {"input": [3, 4]}
    batch = await create(gateway, [line(0, body, url)], endpoint=url)
    ((answered,), _) = await results(gateway, await finished(gateway, batch))
    assert answered["response"]["request_id"]
    assert answered["response"]["body"]["data"][0]["embedding"] == [0, 3, 4]
    assert [request.priority for request, _ in seen] == [common_pb2.PRIORITY_LOW]


async def test_a_router_that_begins_runs_only_what_has_no_result(gateway_of, api):
    """The first one is stopped while lines run."""
    first = await gateway_of(api=api)
    held = []
    first.decode.runs = [first.decode.run_to_end] * 3 + [lambda *run: held.append(run)] * 20
    batch = await create(first, [line(number) for number in range(8)])
    await completed(first, batch, 3)
    before = select(first, "SELECT * FROM chunks")
    second = await gateway_of(api=api)  # which waits for the lock
    prompts = second.watch()
    await asyncio.sleep(0.1)
    assert (await get(second, batch))["status"] == "in_progress" and not prompts
    await first._stack.aclose()
    await first.idle()
    batch = await finished(second, batch)
    assert batch["request_counts"] == {"total": 8, "completed": 8, "failed": 0}
    answered, _ = await results(second, batch)
    assert [each["custom_id"] for each in answered] == IDS  # in the order of the input
    assert set(before) < set(select(second, "SELECT * FROM chunks")) and len(prompts) == 5


@pytest.mark.parametrize(
    "errors",
    [
        [Overloaded("full", 0.01), Unavailable("none"), Unauthenticated("not now")] * 3,
        [Unavailable("no worker is ready")] * 2 * batch_runner._MAX_FAILURES,
    ],
    ids=["without room", "before anything has begun"],
)
async def test_a_line_that_is_refused_waits_and_is_not_given_up(gateway, errors):
    left, generate = list(errors), gateway.service.generate

    async def refused(*args, **more):
        if left:
            raise left.pop()
        await generate(*args, **more)

    gateway.service.generate = refused
    batch = await finished(gateway, await create(gateway, [line(0), line(1)]))
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0} and not left


async def test_a_line_that_fails_again_and_again_is_given_up(gateway, monkeypatch):
    """As one may that ends every worker it comes to."""
    monkeypatch.setattr(batch_runner, "_MAX_FAILURES", 2)

    async def fails(*args):
        gateway.decode.requests.clear()
        raise Unavailable("the worker died")

    (prefill,) = gateway.cluster.prefills
    prefill.tell(blocks_free=100)  # it would serve, too
    prefill.reserves, gateway.decode.reserves = [fails] * 100, [fails] * 100
    batch = await finished(gateway, await create(gateway, [line(0)]))
    assert batch["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
    _, (failed,) = await results(gateway, batch)
    assert failed["response"]["status_code"] == 503
    assert failed["response"]["request_id"]


@pytest.mark.parametrize("end", ["cancelled", "expired"])
async def test_a_batch_that_ends_early_gives_every_line_a_result(gateway, end):
    gateway.decode.runs = [gateway.decode.run_to_end] * 2 + [lambda *run: None] * 20
    batch = await create(gateway, [line(number) for number in range(8)])
    await completed(gateway, batch, 2)
    path = f"/v1/batches/{batch['id']}"
    if end == "cancelled":
        assert (await gateway.client.post(f"{path}/cancel")).json()["status"] == "cancelling"
    else:
        select(gateway, "UPDATE batches SET body = json_set(body, '$.expires_at', 1)")
    batch = await finished(gateway, batch)
    assert (batch["status"], bool(batch[f"{end}_at"])) == (end, True)
    assert batch["request_counts"] == {"total": 8, "completed": 2, "failed": 6}
    answered, missing = await results(gateway, batch)
    assert ids(answered + missing) == IDS
    assert {(each["response"], each["error"]["code"]) for each in missing} == {
        (None, f"batch_{end}")
    }
    assert (await gateway.client.post(f"{path}/cancel")).status_code == 409
    await gateway.idle()  # nothing of it runs on


async def test_a_batch_that_waits_for_another_can_be_cancelled(gateway):
    gateway.decode.runs = [lambda *run: None] * 20
    first, second = [await create(gateway, [line(0)]) for _ in range(2)]
    await until(gateway, first, lambda seen: seen["status"] == "in_progress")
    await gateway.client.post(f"/v1/batches/{second['id']}/cancel")
    second = await finished(gateway, second)
    assert (second["status"], second["output_file_id"]) == ("cancelled", None)
    listed = (await gateway.client.get("/v1/batches")).json()
    assert [each["status"] for each in listed["data"]] == ["cancelled", "in_progress"]
    in_use = await gateway.client.delete(f"/v1/files/{first['input_file_id']}")
    assert (in_use.status_code, first["id"] in in_use.text) == (409, True)
    await gateway.client.post(f"/v1/batches/{first['id']}/cancel")
    assert (await finished(gateway, first))["status"] == "cancelled"
    assert not select(gateway, "SELECT id FROM files WHERE id LIKE '%-output'")


async def test_a_batch_with_a_wrong_line_fails_and_names_it(gateway, settings, monkeypatch):
    settings[0].max_line_bytes = 2500
    monkeypatch.setattr(batch_runner, "MAX_LINES", 5)
    for text, number, message in (
        (jsonl([line(0), line(0)]), 2, "an earlier line has this custom_id"),
        (jsonl([line(0), line(1, url="/v1/chat/completions")]), 2, "the batch is for /v1/comp"),
        (jsonl([line(0, body=[1])]), 1, "body: expected `object`, got `array`"),
        (jsonl([{**line(0), "method": "GET"}]), 1, "method: invalid enum value 'GET'"),
        (jsonl([{**line(0), "custom_id": 5}]), 1, "custom_id: expected `str`, got `int`"),
        (jsonl([{"custom_id": "a"}]), 1, "method is missing"),
        (b"[]", 1, "the line must be a JSON object"),
        (b"\n\n" + jsonl([line(0)])[:-3], 3, "truncated"),
        (jsonl([line(0, body={"prompt": "\ud83d"})]), 1, r"\ud83d is half of a surrogate pair"),
        (jsonl([line(0)])[:-3].partition(b"{\"prompt")[0] + b"[" * 2000, 1, "nested too deeply"),
        (b'{"custom_id":"a","method":"POST","url":"' + URL.encode() + b'","body":{"\xff":1}}', 1,
         "utf-8"),
        (jsonl([line(0)]) + b" " * 3000 + jsonl([line(1)]), 2, "at most 2500 bytes"),
        (jsonl(line(number) for number in range(6)), 6, "at most 5 lines"),
        (b"\n \n", None, "no requests"),
    ):  # fmt: skip
        batch = await finished(gateway, await create(gateway, text))
        assert (batch["status"], batch["output_file_id"]) == ("failed", None), message
        first = batch["errors"]["data"][0]
        code = "invalid_line" if number else "empty_file"
        assert (first["line"], first["code"]) == (number, code), message
        assert message in first["message"], first
    assert not gateway.decode.requests


async def test_a_batch_that_cannot_be_is_refused(gateway):
    file = (await upload(gateway, [line(0)])).json()
    good = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
    for body, status, field in (
        ({"endpoint": "/tokenize"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"metadata": {"a": "b" * 513}}, 400, "metadata"),
        ({"input_file_id": "file-" + "0" * 24}, 404, None),
        ({"input_file_id": "../../etc/passwd"}, 404, None),
        ({"input_file_id": None}, 400, "input_file_id"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 3600}},
            400,
            "output_expires_after",
        ),
    ):
        answer = await gateway.post("/v1/batches", {**good, **body})
        found = (answer.json()["error"]["param"] or "").removesuffix("[...]") or None
        assert (answer.status_code, found) == (status, field), body
    assert (await gateway.client.get("/v1/batches")).json()["data"] == []


async def test_files_can_be_listed_read_and_deleted(gateway, caplog):
    caplog.set_level("INFO", "baton.audit")
    files = [(await upload(gateway, b"%d\n" % n, name=f"{n}é")).json() for n in range(3)]
    assert [file["filename"] for file in files] == ["0é", "1é", "2é"]
    sent = sorted(file["id"] for file in files)

    async def listed(**query):
        page = (await gateway.client.get("/v1/files", params=query)).json()
        found = [file["id"] for file in page["data"]]
        ends = (found[0], found[-1]) if found else (None, None)
        assert (page["first_id"], page["last_id"]) == ends
        return found, page["has_more"]

    assert await listed() == (sent[::-1], False)
    assert await listed(order="asc", limit=2) == (sent[:2], True)
    assert await listed(order="asc", after=sent[1]) == (sent[2:], False)
    assert await listed(after=sent[2], limit=1) == (sent[1:2], True)
    assert await listed(purpose="batch_output") == ([], False)
    for wrong in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}):
        answer = await gateway.client.get("/v1/files", params=wrong)
        error = answer.json()["error"]
        assert (answer.status_code, [error["param"]]) == (400, [*wrong])
        assert error["message"].startswith(f"{error['param']}: ") and "$" not in error["message"]
    path = f"/v1/files/{files[0]['id']}"
    assert (await gateway.client.get(path)).json() == files[0]
    assert (await gateway.client.get(f"{path}/content")).content == b"0\n"
    assert not caplog.records
    assert (await gateway.client.delete(path)).json()["deleted"]
    (line,) = caplog.records
    fields = {"tenant": "default", "id": files[0]["id"]}
    assert (line.name, line.message, line.fields) == ("baton.audit", "file deleted", fields)
    for gone in (path, f"{path}/content", "/v1/files/..%2F.lock", "/v1/files/.lock"):
        assert (await gateway.client.get(gone)).status_code == 404
    assert await listed() == ([id for id in sent[::-1] if id != files[0]["id"]], False)


async def test_a_tenant_has_its_own_files_batches_and_uploads(
    gateway_of, api, tmp_path, monkeypatch
):
    """Whatever its name."""
    text = '[tenants.lock]\nkey_files = ["ann"]\n[tenants.bob]\nkey_files = ["bob"]'
    gateway = await gateway_of(api=api, tenants=tenants_of(tmp_path, text, "ann", "bob"))
    ann, bob = ({"authorization": f"Bearer {name}"} for name in ("ann", "bob"))
    batch = await create(gateway, [line(0)], ann)
    for path in (f"/v1/files/{batch['input_file_id']}", f"/v1/batches/{batch['id']}",
                 f"/v1/files/{batch['input_file_id']}/content"):  # fmt: skip
        assert (await gateway.client.get(path, headers=ann)).status_code == 200
        assert (await gateway.client.get(path, headers=bob)).status_code == 404
        assert (await gateway.client.get(path)).status_code == 401
    for path in ("/v1/files", "/v1/batches"):
        assert (await gateway.client.get(path, headers=bob)).json()["data"] == []
    seen = await finished(gateway, batch, ann)
    assert seen["request_counts"]["completed"] == 1
    (request,) = gateway.cluster.prefills[0].requests
    assert request.sequence.cache_salt == "lock/"
    monkeypatch.setattr(batches, "MAX_UPLOADS", 1)
    slow = UPLOAD.replace(b"\r\n", b"\r\nauthorization: Bearer ann\r\n", 1) % 1000
    async with sending(gateway, slow):
        await eventually(
            lambda: upload(gateway, b"x", ann), lambda it: it.status_code == 429, "no limit"
        )
        assert (await upload(gateway, b"x", bob)).status_code == 200


async def test_without_a_folder_there_are_neither_files_nor_batches(gateway_of, tmp_path):
    gateway = await gateway_of()
    for answer in (
        await upload(gateway, [line(0)]),
        await gateway.post("/v1/batches", {}),
        await gateway.client.get("/v1/files/x/content"),
    ):
        assert (answer.status_code, "--batch-dir DIR" in answer.text) == (404, True)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--batch-dir .* cannot be used"):
        frontend(RouterConfig(http_port=1, api=ApiConfig(batch_dir=tmp_path / "file" / "x")))
    with pytest.raises(ConfigError, match="--batch-dir is for the HTTP API"):
        RouterConfig(api=ApiConfig(batch_dir=tmp_path))


FORM = b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
FILE = FORM % (b"file", b'; filename="x"', b"abc")
PURPOSE = FORM % (b"purpose", b"", b"batch")
END = b"--b--\r\n"


async def test_what_a_form_may_be(gateway, monkeypatch):
    monkeypatch.setattr(batches, "MAX_FILE_BYTES", 4500)
    kind, kept = {"content-type": "multipart/form-data; boundary=b"}, 0
    for form, status, text in (
        (FILE + PURPOSE + END, 200, '"bytes":3'),
        (PURPOSE + FORM % (b"other", b"", b"x" * 3000) + FILE + END, 200, '"filename":"x"'),
        (FILE + b"--b\r\nx: y\r\n\r\nabc\r\n" + PURPOSE + END, 200, '"bytes":3'),
        (FILE + PURPOSE, 400, "ends before its last boundary"),
        (PURPOSE + END, 400, "file is missing or empty"),
        (PURPOSE + FORM % (b"file", b"", b"") + END, 400, "file is missing or empty"),
        (FILE + END, 400, "purpose must be batch"),
        (FILE + FORM % (b"purpose", b"", b"vision") + END, 400, "purpose must be batch"),
        (FILE + FILE + PURPOSE + END, 400, "one file"),
        (FORM % (b"x", b"", b"x" * 5000) + END, 413, "4500 bytes"),
        (PURPOSE + PURPOSE + FILE + END, 400, "purpose must be batch"),
        (
            FILE + PURPOSE + FORM % (b"expires_after[seconds]", b"", b"9") + END,
            400,
            "expires_after is not supported",
        ),
        (b"nonsense", 400, "is not a form"),
        (b"--b\r\nx: " + b"y" * 4300, 400, "is not a form"),
        (b"", 400, "ends before"),
        (PURPOSE + FORM % (b"file", b"", b"x" * 5000) + END, 413, "4500 bytes"),
    ):
        answer = await gateway.client.post("/v1/files", content=form, headers=kind)
        assert (answer.status_code, text in answer.text) == (status, True), (form, answer.text)
        kept += status == 200
        assert len(select(gateway, "SELECT id FROM files")) == kept, form
        assert len(select(gateway, "SELECT * FROM chunks")) == kept, form
    for kind in ("application/json", "multipart/form-data", "multipart/form-data; boundary="):
        sent = {"content": form, "headers": {"content-type": kind}}
        answer = await gateway.client.post("/v1/files", **sent)
        assert (answer.status_code, "multipart/form-data" in answer.text) == (400, True)
    assert (await upload(gateway, [line(0)], {"content-encoding": "gzip"})).status_code == 415


async def test_a_tenants_share_of_the_disk_holds_for_uploads_and_results(
    gateway_of, tmp_path, monkeypatch
):
    config = ApiConfig(batch_dir=tmp_path / "b", batch_disk=60_000)
    batch_store.prepare(config.batch_dir)
    gateway = await gateway_of(api=config)
    async with sending(gateway, UPLOAD % 70_000) as (reader, _):  # before any of it is sent
        assert b" 400 " in await asyncio.wait_for(reader.readline(), WAIT_S)

    async def chunks(size):
        yield PURPOSE + b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n'
        for _ in range(size >> 10):
            yield b"x" * (1 << 10)
        yield b"\r\n" + END

    kind = {"content-type": "multipart/form-data; boundary=b"}
    monkeypatch.setattr(batches, "_CHECKED_BYTES", 10_000)
    answer = await gateway.client.post("/v1/files", content=chunks(70 << 10), headers=kind)
    assert (answer.status_code, "--batch-disk" in answer.text) == (400, True)
    assert not select(gateway, "SELECT id FROM files")
    gateway.decode.runs = [gateway.decode.run_to_end] * 300
    lines = [line(number, {**BODY, "logprobs": 5}) for number in range(200)]
    batch = await finished(gateway, await create(gateway, lines))
    assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "disk_share_used_up")
    answered, _ = await results(gateway, batch)
    assert 0 < len(answered) == batch["request_counts"]["completed"] < 200
    refused = await upload(gateway, [line(0)])
    assert (refused.status_code, "--batch-disk" in refused.text) == (400, True)
    await gateway.client.delete(f"/v1/files/{batch['output_file_id']}")
    assert (await upload(gateway, [line(0)])).status_code == 200


@contextlib.asynccontextmanager
async def sending(gateway, request):
    """The ends of a connection, over which this was sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(request)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


UPLOAD = (
    b"POST /v1/files HTTP/1.1\r\ncontent-type: multipart/form-data; boundary=b\r\n"
    b"content-length: %d\r\n\r\n"
)


async def test_an_upload_goes_no_faster_than_the_disk(gateway, monkeypatch, connections):
    go_on, write = threading.Event(), batches._Upload.write
    monkeypatch.setattr(batches._Upload, "write", lambda *args: (go_on.wait(WAIT_S), write(*args)))
    form = PURPOSE + FORM % (b"file", b"", b"x" * (16 << 20)) + END
    async with sending(gateway, UPLOAD % len(form) + form) as (reader, writer):
        sent = asyncio.create_task(writer.drain())

        async def waiting():
            exchanges = connections and connections[0]._exchanges
            return sum(map(len, exchanges[0]._parts)) if exchanges else 0

        await eventually(waiting, lambda size: size > http_server.MAX_WAITING_BYTES, "no pause")
        await asyncio.sleep(0.2)
        assert await waiting() <= http_server.MAX_WAITING_BYTES + (256 << 10)
        assert not sent.done()
        go_on.set()
        assert b" 200 " in await reader.readline()
        writer.write(b"GET /health HTTP/1.1\r\n\r\n")
        while (await reader.readline()).strip():
            pass
        assert b'"bytes":16777216' in await reader.readuntil(b"}")
        assert b" 200 " in await reader.readline()  # the connection goes on


async def test_an_upload_may_take_long_while_it_comes(gateway, monkeypatch):
    monkeypatch.setattr(http_server, "BODY_TIMEOUT_S", 1.2)
    monkeypatch.setattr(http_server, "MIN_BODY_BYTES", 100)
    form = PURPOSE + FORM % (b"file", b"", b"x" * 2000) + END
    for piece, status in ((100, b" 200 "), (10, b" 408 ")):
        async with sending(gateway, UPLOAD % len(form)) as (reader, writer):
            answered = asyncio.create_task(reader.readline())
            for start in range(0, len(form), piece):
                if not answered.done():
                    writer.write(form[start : start + piece])
                    await asyncio.sleep(0.15)
            async with asyncio.timeout(WAIT_S):
                assert status in await answered
    assert len((await gateway.client.get("/v1/files")).json()["data"]) == 1


async def test_a_file_is_sent_no_faster_than_it_is_read(gateway, monkeypatch, connections):
    text = os.urandom(24 << 20)
    file = (await upload(gateway, text)).json()
    path = f"/v1/files/{file['id']}/content"
    async with gateway.client.stream("GET", path) as response:
        (connection,) = connections
        parts = response.aiter_raw()
        got = [await anext(parts)]
        await asyncio.sleep(0.3)
        assert connection.transport.get_write_buffer_size() < 1 << 20
        got += [part async for part in parts]
    assert b"".join(got) == text
    monkeypatch.setattr(batches, "UNREAD_S", 0.2)
    async with sending(gateway, b"GET %b HTTP/1.1\r\n\r\n" % path.encode()) as (reader, _):
        read = b""
        await seen(connections[-1].transport.is_closing)
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(ConnectionResetError):
                read = await reader.read()
        assert len(read) < len(text)


class SetClock:
    """Stands for the module `time` in modules whose wall clock somebody sets."""

    def __init__(self, monkeypatch):
        self.ahead_s = 0.0
        for module in (batch_runner, batch_store):
            monkeypatch.setattr(module, "time", self)

    def __getattr__(self, name):
        return getattr(time, name)

    def time(self):
        return time.time() + self.ahead_s

    def time_ns(self):
        return time.time_ns() + int(self.ahead_s * 1e9)


DAY_S = 24 * 3600.0


@pytest.mark.parametrize("jumps_s", [(DAY_S,), (-DAY_S,), (3 * DAY_S, -3 * DAY_S), (-DAY_S, DAY_S)])
async def test_batches_keep_their_time_when_the_clock_is_set(gateway, monkeypatch, jumps_s):
    clock, held = SetClock(monkeypatch), []
    gateway.decode.runs = [lambda *run: held.append(run)] * 20
    running = await create(gateway, [line(0), line(1)])
    await seen(lambda: len(held) == 2)
    waiting = await create(gateway, [line(2)])  # for the one before
    for jump_s in jumps_s:
        clock.ahead_s += jump_s
        looked = gateway.service.batches.copy
        await asyncio.sleep(0.2)  # ten looks
        assert looked() == {"in_progress": 1, "validating": 1}
    for batch in (running, waiting):
        left_s = (await get(gateway, batch))["expires_at"] - clock.time()
        assert DAY_S - 600 < left_s < DAY_S + 600
    for run in held:
        gateway.decode.run_to_end(*run)
    for batch in (running, waiting):
        gateway.decode.runs.clear()
        assert (await finished(gateway, batch))["status"] == "completed"


async def test_ids_are_in_the_order_of_their_making_when_the_clock_is_set_back(
    gateway, monkeypatch
):
    clock, files, made = SetClock(monkeypatch), [], []
    for ahead_s in (0.0, -DAY_S, 2 * DAY_S, 0.0):
        clock.ahead_s = ahead_s
        files.append((await upload(gateway, [line(0)])).json()["id"])
        made.append((await create(gateway, [line(0)]))["id"])
    listed = (await gateway.client.get("/v1/batches")).json()["data"]
    assert [each["id"] for each in listed] == made[::-1]
    assert sorted(files) == files


async def test_a_full_disk_is_named_with_a_507(gateway_of, api, monkeypatch, caplog):
    """The database may have no more pages. Reading goes on, and writing once there is room."""
    max_pages = 1 << 30

    class Full(batch_store.BatchStore):
        def _transaction(self):
            self._db.execute(f"PRAGMA max_page_count = {max_pages}")
            return super()._transaction()

    monkeypatch.setattr(batches, "BatchStore", Full)
    gateway = await gateway_of(api=api)
    file = (await upload(gateway, [line(0)])).json()
    body = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
    max_pages, large = 1, b"x" * (1 << 20)
    metadata = {str(number): "x" * 512 for number in range(16)}
    for answer in (
        await upload(gateway, large),
        await gateway.post("/v1/batches", body, metadata=metadata),
    ):
        assert answer.status_code == 507, answer.text
        error = answer.json()["error"]
        assert str(api.batch_dir) in error["message"] and "full" in error["message"]
        assert error["type"] == "server_error"
    assert len((await gateway.client.get("/v1/files")).json()["data"]) == 1
    assert "Traceback" not in caplog.text
    max_pages = 1 << 30
    assert (await upload(gateway, large)).status_code == 200


@pytest.mark.parametrize("content", [b"x", b"x" * (1 << 20)])
async def test_a_disk_without_room_for_an_upload_is_named(gateway, api, monkeypatch, content):
    """Whether the upload fails as it arrives or, from a buffer, at its end."""
    with monkeypatch.context() as full:
        opened = lambda dir: Path("/dev/full").open("w+b")  # noqa: E731, SIM115 - `close` closes it
        full.setattr(batches.tempfile, "TemporaryFile", opened)
        answer = await upload(gateway, content)
    assert answer.status_code == 507, answer.text
    assert str(api.batch_dir) in answer.text and "No space left" in answer.text
    assert (await upload(gateway, content)).status_code == 200


@pytest.mark.parametrize(
    ("error", "status"), [(OSError(errno.EROFS, "Read-only file system"), 507), (None, 503)]
)
async def test_a_folder_that_cannot_be_used_is_named(gateway, api, monkeypatch, error, status):
    """Or is busy: another process holds its transaction open."""

    def fails(store, *args):
        if error:
            raise error
        store._db.execute("PRAGMA busy_timeout = 10")
        return check(store, *args)

    check = batch_store.BatchStore.check_room
    monkeypatch.setattr(batch_store.BatchStore, "check_room", fails)
    with contextlib.closing(sqlite3.connect(api.batch_dir / "batches.sqlite3")) as other:
        other.execute("BEGIN IMMEDIATE")
        answer = await upload(gateway, [line(0)])
    assert (answer.status_code, str(api.batch_dir) in answer.text) == (status, True)


def test_a_folder_of_another_version_is_refused(tmp_path):
    (tmp_path / "older" / "ann").mkdir(parents=True)
    (tmp_path / "older" / "ann" / "batch_1.json").touch()
    (tmp_path / "newer").mkdir()
    with contextlib.closing(sqlite3.connect(tmp_path / "newer" / "batches.sqlite3")) as db:
        db.execute("PRAGMA user_version = 99")
    for name, text in (("older", "an older version"), ("newer", "has version 99")):
        with pytest.raises(ConfigError, match=text):
            batch_store.prepare(tmp_path / name)


@pytest.fixture
def processes(monkeypatch):
    """Runners are processes; those that were started."""
    started, popen = [], subprocess.Popen

    def start(*args, **more):
        started.append(popen(*args, **more))
        return started[-1]

    monkeypatch.setattr(batch_process, "run_runner", RUN_RUNNER)
    monkeypatch.setattr(batch_process.subprocess, "Popen", start)
    return started


async def test_a_runner_that_is_killed_is_followed_by_another(gateway_of, api, processes, caplog):
    """No line is lost, and none with a result is run again. None is left behind at the end."""
    caplog.set_level("INFO")
    gateway = await gateway_of(api=api)
    gateway.decode.runs = [gateway.decode.run_to_end] * 3 + [lambda *run: None] * 4
    batch = await create(gateway, [line(number) for number in range(8)])
    await completed(gateway, batch, 3)
    await seen(lambda: not gateway.decode.runs)  # else one of them hangs in the next runner
    processes[0].kill()
    batch = await finished(gateway, batch)
    assert batch["request_counts"] == {"total": 8, "completed": 8, "failed": 0}
    answered, _ = await results(gateway, batch)
    assert ids(answered) == IDS
    await eventually(
        lambda: asyncio.sleep(0, dict(gateway.service.batches)), {"completed": 1}.__eq__, "counts"
    )
    assert "the batch runner ended with status -9" in caplog.text
    said = [record.getMessage() for record in caplog.records]
    assert said.count(f"batches of {api.batch_dir} run here") == 2
    await gateway._stack.aclose()
    assert [process.returncode for process in processes] == [-9, 0]


async def test_the_port_for_lines_is_the_runners_alone(gateway, settings):
    url = f"http://{settings[0].host}:{settings[0].port}"
    async with httpx.AsyncClient(base_url=url) as client:
        for headers in ({}, {"x-baton-batch-secret": "x", "x-baton-batch-tenant": "default"}):
            answer = await client.post(URL, json=BODY, headers=headers)
            assert (answer.status_code, "batch runner" in answer.text) == (401, True)


def test_a_tenant_has_as_many_files_as_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_store, "MAX_FILES", 2)
    store = batch_store.BatchStore(tmp_path, 1 << 20)
    for name in ("a", "b"):
        store.check_room("t")
        store.add("t", name, io.BytesIO(b"{}"))
    for refused in (store.check_room, lambda tenant: store.add(tenant, "c", io.BytesIO(b"{}"))):
        with pytest.raises(InvalidRequest, match="there are 2 files"):
            refused("t")
    store.close()
