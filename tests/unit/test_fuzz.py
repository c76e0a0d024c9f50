"""`make fuzz` with few inputs: they break no parser and no endpoint."""

import re

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
