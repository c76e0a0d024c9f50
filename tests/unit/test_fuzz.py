"""`make fuzz` finds what breaks a promise, and nothing in the parsers for some inputs."""

import os
import re
import time

import pytest

from baton.config import ApiConfig
from baton.gateway import batch_store, responses_store, routes
from tests.fuzz import __main__ as fuzzing
from tests.fuzz import inputs
from tests.unit.gateway.conftest import Gateway
from tests.unit.router.scripted_workers import Cluster
from tests.unit.router.small_tokenizers import byte_tokenizer


class Fuzz(fuzzing.Fuzz):
    """Tries some inputs of each kind."""

    goes_on = property(lambda self: self.tried["etcd"] < 40)


def test_some_inputs_break_no_parser(tmp_path):
    fuzz = Fuzz(7, 0.0)
    fuzz.parsers(tmp_path)
    assert fuzz.broken == []
    assert len(fuzz.tried) == 10 and set(fuzz.tried.values()) == {40}


@pytest.mark.parametrize("breaks", [ZeroDivisionError("oops"), None])
def test_what_breaks_a_promise_is_found_with_its_input(tmp_path, monkeypatch, breaks):
    def parse(data):
        began = time.thread_time()
        if breaks:
            raise breaks
        while time.thread_time() < began + 0.02:
            pass

    monkeypatch.setattr(fuzzing, "parse_chat", parse)
    monkeypatch.setattr(fuzzing, "MAX_PARSE_S", 0.01)
    fuzz = Fuzz(7, 0.0)
    fuzz.parsers(tmp_path)
    found = [line for line in fuzz.broken if line.startswith("chat: ")]
    assert found and ("oops" if breaks else "took 0.0 s") in found[0] and "input: b'" in found[0]


@pytest.fixture
async def address(tmp_path):
    api = ApiConfig(batch_dir=tmp_path / "batches", response_dir=tmp_path / "responses")
    for store, folder in ((batch_store, api.batch_dir), (responses_store, api.response_dir)):
        folder.mkdir()
        store.prepare(folder)
    async with Cluster() as cluster, Gateway(cluster, byte_tokenizer(tmp_path), api=api) as gateway:
        yield f"127.0.0.1:{gateway.port}"


async def test_every_endpoint_has_requests_that_are_answered(address, monkeypatch):
    monkeypatch.setattr(Fuzz, "goes_on", property(lambda self: self.tried["POST /v1/files"] < 2))
    fuzz = Fuzz(7, 0.0)
    await fuzz.requests(address)
    assert fuzz.broken == []
    assert set(fuzz.tried) == set(inputs.REQUESTS)
    tried = {re.sub(r"(resp_|conv_|file-|batch_)0", "{id}", name) for name in inputs.REQUESTS}
    posted = {f"POST {path}" for path, methods in routes.ALL_ROUTES.items() if "POST" in methods}
    rest = {name for name in posted - tried if "lora" not in name}
    assert rest == {"POST /rerank", "POST /v2/rerank", "POST /v1/score", "POST /ping"}


@pytest.mark.parametrize("limit_s", [1e9, 0.01])
async def test_a_request_that_keeps_the_event_loop_is_found(address, monkeypatch, limit_s):
    def slow(tenant):
        until = time.thread_time() + 0.03
        while time.thread_time() < until:
            pass

    monkeypatch.setattr("router.admission.tenants.Tenant.check", slow)
    monkeypatch.setattr(inputs, "LARGE", {"POST /tokenize": [b'{"prompt":"x"}']})
    monkeypatch.setattr(fuzzing, "MAX_STALL_S", limit_s)
    fuzz = Fuzz(7, 0.0)
    fuzz.tried["etcd"] = 40  # it goes on no longer than for the large one
    await fuzz.alone(address, os.getpid())
    assert fuzz.stalls_s["POST /tokenize"][0] >= 0.03
    assert len(fuzz.broken) == (limit_s < 1)
