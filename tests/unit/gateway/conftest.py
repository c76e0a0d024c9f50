"""The HTTP API on a real socket, over a service to scripted workers."""

import asyncio
import contextlib
import json

import httpx
import openai
import pytest

from baton.config import DEMO_MODEL, ApiConfig
from baton.gateway import responses_store
from baton.gateway.routes import serving
from baton.generation.structured_output import GrammarCompiler
from baton.net.http_server import Connection, listen
from baton.net.server import EventLoop
from baton.v1 import common_pb2
from router.admission.tenants import Tenants
from tests.unit.router import scripted_workers
from tests.unit.router.scripted_workers import TIMEOUT_S, UNFINISHED, Cluster, seen
from tests.unit.router.small_tokenizers import admission, byte_tokenizer

PROMPT = [1, 2, 3]
# Of a model with tools and reasoning.
TEMPLATE = "{% for m in messages %}{{ m }}{% endfor %}{# tools </think> #}<tool_call>"
THINK = ["<think>", "</think>"]
# What it may say: reasoning, an answer, two calls.
CALLS = (
    "<think>\nHm.\n</think>\n\nSee:\n"
    '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
)


def pytest_asyncio_loop_factories(config, item):
    """The loop that routers run on."""
    return {"uvloop": EventLoop}


@pytest.fixture
def config(tmp_path):
    """Of a gateway that stores responses."""
    folder = tmp_path / "responses"
    responses_store.prepare(folder)
    return ApiConfig(response_dir=folder)


class Gateway:
    """A service behind HTTP, and a client. Output token i of every request is the i-th letter."""

    def __init__(self, cluster, tokenizer, **limits):
        limits.setdefault("grammars", GrammarCompiler(DEMO_MODEL, 4096, {1}))
        self.api = limits.pop("api", ApiConfig())
        self.host = limits.pop("host", "127.0.0.1")
        self.cluster = cluster
        self.tokenizer = tokenizer
        settings = {"default_timeout_s": TIMEOUT_S, **limits}
        self.admission = admission(tokenizer, api=self.api, **settings)
        self.service = cluster.service(self.admission)
        self._stack = contextlib.AsyncExitStack()

    @property
    def decode(self):
        return self.cluster.decodes[0]

    async def __aenter__(self):
        self.listener = listener = listen(self.host, 0, "HTTP", "--http-port")
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        await self._stack.enter_async_context(serving(self.service, listener, self.api))
        client = httpx.AsyncClient(base_url=self.url, timeout=TIMEOUT_S)
        self.client = await self._stack.enter_async_context(client)
        return self

    async def begun_with_three_choices(self, timeout_s=TIMEOUT_S):
        """A body under way, of whose choices one has entered, and what lets that have its token."""
        prefill, go_on = self.cluster.prefills[0], asyncio.Event()

        async def slow(request):
            await go_on.wait()
            async for message in prefill.good(request):
                yield message

        prefill.scripts = [slow]
        call = asyncio.create_task(self.complete({"x-request-timeout": f"{timeout_s}"}, n=3))
        await seen(lambda: not prefill.scripts)
        return call, go_on

    async def __aexit__(self, *exc):
        await self.idle()
        await self._stack.aclose()
        await self.admission.aclose()

    def watch(self):
        """(request, caller) of every call of the service from now on."""
        seen, generate = [], self.service.generate

        def watched(request, caller, *args, **more):
            seen.append((request, caller))
            return generate(request, caller, *args, **more)

        self.service.generate = watched
        return seen

    async def idle(self):
        """Returns once no request runs."""
        async with asyncio.timeout(TIMEOUT_S):
            await self.service.idle()

    async def post(self, path, body=None, headers=None, **more):
        """A completion's answer, greedy, of five tokens, unless given otherwise."""
        sent = {**(body or {}), **more}
        return await self.client.post(path, json=sent, headers=headers)

    async def complete(self, headers=None, **body):
        sent = {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True, **body}
        return await self.post("/v1/completions", sent, headers)

    async def chat(self, headers=None, **body):
        sent = {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True, **body}
        return await self.post("/v1/chat/completions", sent, headers)

    def stream(self, path="/v1/completions", **body):
        """A stream under way, as httpx has it."""
        prompt = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {
            "prompt": PROMPT}  # fmt: skip
        sent = {**prompt, "max_tokens": 5, "ignore_eos": True, "stream": True, **body}
        return self.client.stream("POST", path, json=sent)

    async def events(self, path="/v1/completions", **body):
        """All events of a stream that ends as it should, without its [DONE]."""
        async with self.stream(path, **body) as response:
            assert response.status_code == 200, await response.aread()
            return await events_of(response)


def client_of(gateway, key="any"):
    """OpenAI's client for a gateway; what it gets must be what its types say."""
    return openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key=key, max_retries=0, _strict_response_validation=True
    )


def rejected(response):
    """The status and the field that an error names."""
    return response.status_code, response.json()["error"]["param"]


async def events_of(response):
    lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.fixture
async def gateway_of(tmp_path):
    """Starts gateways over clusters of scripted workers."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(prefill=1, decode=1, *, cluster=None, tokenizer=None, **settings):
            cluster = Cluster(prefill, decode, **(cluster or {}))
            await stack.enter_async_context(cluster)
            tokenizer = tokenizer or byte_tokenizer(tmp_path)
            return await stack.enter_async_context(Gateway(cluster, tokenizer, **settings))

        yield start


@pytest.fixture
async def gateway(gateway_of):
    """One of them, over one worker of each role."""
    return await gateway_of()


@pytest.fixture
def connections(monkeypatch):
    """The server's, in the order in which they were made."""
    made, found = Connection.connection_made, []

    def connection_made(connection, transport):
        made(connection, transport)
        found.append(connection)

    monkeypatch.setattr(Connection, "connection_made", connection_made)
    return found


@pytest.fixture
async def says(gateway_of, tmp_path, monkeypatch):
    """Starts a gateway whose model says a text, or what a function makes of the prompt's."""

    async def start(
        text, reason=common_pb2.FINISH_REASON_STOP, template=TEMPLATE, added=THINK,
        max_context=2000, **settings
    ):  # fmt: skip
        tokenizer = byte_tokenizer(
            tmp_path, added=added, template=template, max_position_embeddings=9999
        )
        end = [0] if reason == common_pb2.FINISH_REASON_STOP else []

        def token(sequence, ahead=0):
            prompt = sequence.token_ids[: sequence.prompt_tokens]
            said = text(tokenizer.decode(prompt)) if callable(text) else text
            tokens = [*tokenizer.encode(said), *end]
            index = len(sequence.token_ids) - sequence.prompt_tokens + ahead
            ends = index + 1 == len(tokens)
            return tokens[index], reason if ends else UNFINISHED

        monkeypatch.setattr(scripted_workers, "token", token)
        cluster = {"max_context": max_context}
        return await gateway_of(tokenizer=tokenizer, cluster=cluster, **settings)

    return start


def tenants_of(folder, text, *keys):
    """Tenants by a file of this text, in which files of keys have the keys' names."""
    for key in keys:
        (folder / key).write_text(key)
    (folder / "tenants.toml").write_text(text + "\n")
    return Tenants(folder / "tenants.toml")


@pytest.fixture
def ann_and_bob(tmp_path):
    """Two tenants, whose keys are their names."""
    text = '[tenants.a]\nkey_files = ["ann"]\n[tenants.b]\nkey_files = ["bob"]'
    return tenants_of(tmp_path, text, "ann", "bob")
