"""OpenAI's own client against a real cluster: what it streams equals what the SDK streams."""

from __future__ import annotations

import asyncio
import signal
from functools import partial
from typing import Any

import httpx
import openai
import pytest

from baton.client import AsyncClient
from baton.local import ports
from baton.local.cluster import LocalCluster
from tests.cluster.conftest import USED_PORTS, ClusterFactory
from tests.cluster.oracle import SAMPLING, Case, Oracle, all_blocks_free
from tests.cluster.streams import decoding_process
from tests.waiting import eventually

PROMPT = "def read(path):\n    with open(path) as file:\n"
MESSAGES: Any = [{"role": "user", "content": "Write a stack."}]
TIMEOUT_S = 120.0
HTTP_PORT = ports.free()


def runs_one(status: dict[str, Any]) -> bool:
    """Whether a request is under way."""
    return bool(status["router"]["running"])


async def http_cluster(cluster_factory: ClusterFactory) -> LocalCluster:
    """The cluster that these tests share."""
    USED_PORTS.add(HTTP_PORT)
    return await cluster_factory(http_port=HTTP_PORT)


def client_of(cluster: LocalCluster, **more: Any) -> openai.AsyncOpenAI:
    url = f"http://{cluster.http_addresses[0]}/v1"
    settings = {"max_retries": 0, "timeout": TIMEOUT_S, **more}
    return openai.AsyncOpenAI(base_url=url, api_key="any", **settings)


def options_of(sampling: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(for OpenAI's client, for the SDK): the same settings."""
    settings = {**SAMPLING[sampling], "max_tokens": 32, **more}
    extra = {key: settings.pop(key) for key in ("top_k", "ignore_eos") if key in settings}
    return {**settings, "extra_body": extra}, {**settings, **extra}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
async def test_responses_equal_the_sdks(
    cluster_factory: ClusterFactory, sampling: str, chat: bool
) -> None:
    """Whole and streamed: text, finish reason and usage."""
    cluster = await http_cluster(cluster_factory)
    http, sdk = options_of(sampling, ignore_eos=not chat)
    prompt: dict[str, Any] = {"messages": MESSAGES} if chat else {"prompt": PROMPT}
    async with AsyncClient(cluster.address) as own, client_of(cluster) as client:
        create: Any = client.chat.completions.create if chat else client.completions.create
        expected = await own.generate(MESSAGES if chat else PROMPT, **sdk)
        whole = await create(model="demo", **prompt, **http)
        stream = await create(
            model="demo", stream=True, stream_options={"include_usage": True}, **prompt, **http
        )
        *chunks, last = [chunk async for chunk in stream]
        await all_blocks_free(own)
    choices = [chunk.choices[0] for chunk in chunks]
    if chat:
        assert whole.choices[0].message.content == expected.text
        assert "".join(choice.delta.content or "" for choice in choices) == expected.text
        assert choices[0].delta.role == "assistant"
    else:
        assert whole.choices[0].text == expected.text
        assert "".join(choice.text for choice in choices) == expected.text
    assert whole.choices[0].finish_reason == choices[-1].finish_reason == expected.finish_reason
    for usage in (whole.usage, last.usage):
        assert usage.prompt_tokens == expected.usage.prompt_tokens
        assert usage.completion_tokens == len(expected.token_ids)


async def test_the_sync_client_works_too(cluster_factory: ClusterFactory) -> None:
    cluster = await http_cluster(cluster_factory)
    http, sdk = options_of("greedy")

    def use() -> tuple[str, str, list[str]]:
        url = f"http://{cluster.http_addresses[0]}/v1"
        with openai.OpenAI(base_url=url, api_key="any", timeout=TIMEOUT_S) as client:
            whole = client.completions.create(model="demo", prompt=PROMPT, **http)
            stream = client.completions.create(model="demo", prompt=PROMPT, stream=True, **http)
            text = "".join(chunk.choices[0].text for chunk in stream)
            return whole.choices[0].text, text, [model.id for model in client.models.list()]

    whole, streamed, models = await asyncio.to_thread(use)
    async with AsyncClient(cluster.address) as own:
        expected = await own.generate(PROMPT, **sdk)
    assert whole == streamed == expected.text
    assert models == ["demo"]


async def test_token_ids_choices_and_batches(
    cluster_factory: ClusterFactory, oracle: Oracle
) -> None:
    """Prompts in tokens, four of them, twice each: all of them the oracle's."""
    cluster = await http_cluster(cluster_factory)
    cases = [Case(oracle.prompt(length), "greedy") for length in (1, 17, 100, 500)]
    async with client_of(cluster) as client, AsyncClient(cluster.address) as own:
        done = await client.completions.create(
            model="demo",
            prompt=[list(case.prompt) for case in cases],
            n=2,
            max_tokens=cases[0].new_tokens,
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        await all_blocks_free(own)
    assert [choice.index for choice in done.choices] == list(range(8))
    for choice in done.choices:
        tokens = oracle.tokens(cases[choice.index // 2])
        assert choice.model_extra is not None
        assert tuple(choice.model_extra["token_ids"]) == tokens
        assert choice.text == oracle.text(tokens)


async def test_logprobs_are_the_sdks_in_both_shapes(cluster_factory: ClusterFactory) -> None:
    cluster = await http_cluster(cluster_factory)
    async with AsyncClient(cluster.address) as own, client_of(cluster) as client:
        expected = await own.generate(PROMPT, max_tokens=8, logprobs=3, ignore_eos=True)
        done = await client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=8, logprobs=3, temperature=0,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        chat = await client.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=8, logprobs=True, top_logprobs=2,
            temperature=0,
        )  # fmt: skip
    logprobs = done.choices[0].logprobs
    assert (
        logprobs is not None
        and logprobs.tokens
        and logprobs.token_logprobs
        and logprobs.top_logprobs
    )
    assert logprobs.token_logprobs == pytest.approx([one.logprob for one in expected.logprobs])
    assert "".join(logprobs.tokens) == expected.text
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(8)]
    assert all(len(top) == 3 for top in logprobs.top_logprobs)
    of_chat = chat.choices[0].logprobs
    assert of_chat is not None and of_chat.content
    assert all(len(one.top_logprobs) == 2 for one in of_chat.content)
    assert all(one.bytes == list(one.token.encode()) for one in of_chat.content)
    assert "".join(one.token for one in of_chat.content).startswith(
        chat.choices[0].message.content or "?")  # fmt: skip


async def test_a_stop_string_ends_a_completion(cluster_factory: ClusterFactory) -> None:
    cluster = await http_cluster(cluster_factory)
    async with client_of(cluster) as client:
        settings: Any = {"model": "demo", "prompt": PROMPT, "max_tokens": 32, "temperature": 0}
        text = (await client.completions.create(**settings)).choices[0].text
        stop = text[10:14]
        stopped = (await client.completions.create(**settings, stop=[stop])).choices[0]
        assert (stopped.text, stopped.finish_reason) == (text[: text.index(stop)], "stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_closing_the_connection_frees_the_blocks(
    cluster_factory: ClusterFactory, stream: bool
) -> None:
    cluster = await http_cluster(cluster_factory)
    body = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "stream": stream}
    async with AsyncClient(cluster.address) as own:
        assert not runs_one(await own.status())
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            url = f"http://{cluster.http_addresses[0]}/v1/completions"
            call = asyncio.create_task(client.post(url, json=body))
            await eventually(own.status, runs_one, "the request did not begin", TIMEOUT_S)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await all_blocks_free(own)
        assert not runs_one(await own.status())


async def test_a_stream_survives_its_decode_worker(
    repaired_cluster: ClusterFactory, oracle: Oracle
) -> None:
    """Over HTTP too: every token once, the oracle's."""
    port = ports.free()
    USED_PORTS.add(port)
    cluster = await repaired_cluster(decode=2, http_port=port)
    case = Case(oracle.prompt(100), "greedy", 1500)  # so many that none of it is too quick
    tokens, killed = [], False
    async with client_of(cluster) as client, AsyncClient(cluster.address) as own:
        stream = await client.completions.create(
            model="demo", prompt=list(case.prompt), max_tokens=1500, temperature=0, stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        async for chunk in stream:
            assert chunk.choices[0].model_extra is not None
            tokens += chunk.choices[0].model_extra["token_ids"]
            if len(tokens) > 10 and not killed:
                killed = True
                cluster.kill(await decoding_process(cluster, own))
    assert killed
    assert tuple(tokens) == oracle.tokens(case)


async def test_a_drained_router_finishes_its_streams(own_cluster: ClusterFactory) -> None:
    """SIGTERM: the stream completes, new requests get 503, exit status 0."""
    port = ports.free()
    USED_PORTS.add(port)
    cluster = await own_cluster(http_port=port, restart=False, drain_s=60.0)
    chunks, refused = [], None
    async with client_of(cluster) as client:
        stream = await client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=400, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        async for chunk in stream:
            chunks.append(chunk)
            if len(chunks) == 5:
                cluster.kill("router", signal.SIGTERM)
                url = f"http://{cluster.http_addresses[0]}/ready"
                async with httpx.AsyncClient(timeout=TIMEOUT_S) as other:
                    ready = partial(other.get, url)
                    await eventually(ready, lambda r: r.status_code == 503, "not draining")
                with pytest.raises(openai.InternalServerError) as refused:
                    await client.completions.create(model="demo", prompt=PROMPT)
    assert len(chunks) == 400
    assert chunks[-1].choices[0].finish_reason == "length"
    assert refused is not None
    assert refused.value.status_code == 503
    assert refused.value.response.headers["retry-after"]
    assert await cluster.processes["router"].wait() == 0
