"""OpenAI's own client against a real cluster: what it streams equals what the SDK streams."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from baton.local.cluster import LocalCluster
from tests.cluster.conftest import Clusters
from tests.cluster.oracle import (
    SAMPLING,
    SIMULATED,
    Oracle,
    all_blocks_free,
    check,
    decoding_process,
)
from tests.waiting import eventually

PROMPT = "def read(path):\n    with open(path) as file:\n"
MESSAGES: Any = [{"role": "user", "content": "Write a stack."}]
TIMEOUT_S = 60.0


def settings(cluster: LocalCluster) -> dict[str, Any]:
    """For OpenAI's clients."""
    url = f"http://{cluster.http_addresses[0]}/v1"
    return {"base_url": url, "api_key": "any", "max_retries": 0, "timeout": TIMEOUT_S}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
async def test_responses_equal_the_sdks(clusters: Clusters, sampling: str, chat: bool) -> None:
    """Whole and streamed: text, finish reason and usage."""
    cluster, own = await clusters()
    sdk = {**SAMPLING[sampling], "max_tokens": 32, "ignore_eos": not chat}
    http = dict(sdk)
    http["extra_body"] = {key: http.pop(key) for key in ("top_k", "ignore_eos") if key in http}
    http |= {"messages": MESSAGES} if chat else {"prompt": PROMPT}
    async with openai.AsyncOpenAI(**settings(cluster)) as client:
        create: Any = client.chat.completions.create if chat else client.completions.create
        expected = await own.generate(MESSAGES if chat else PROMPT, **sdk)
        whole = await create(model="demo", **http)
        stream = await create(
            model="demo", stream=True, stream_options={"include_usage": True}, **http
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


async def test_token_ids_choices_batches_and_logprobs(clusters: Clusters, oracle: Oracle) -> None:
    """Prompts in tokens, four of them, twice each: all of them the oracle's."""
    cluster, own = await clusters()
    cases = [oracle.case(length) for length in (1, 17, 100, 500)]
    async with openai.AsyncOpenAI(**settings(cluster)) as client:
        done = await client.completions.create(
            model="demo", prompt=[list(case.prompt) for case in cases], n=2, temperature=0,
            max_tokens=cases[0].new_tokens, logprobs=3,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        expected = await check(own, oracle, cases[-1], logprobs=3)
        await all_blocks_free(own)
    assert [choice.index for choice in done.choices] == list(range(8))
    for choice in done.choices:
        tokens = oracle.tokens(cases[choice.index // 2])
        assert choice.model_extra is not None
        assert tuple(choice.model_extra["token_ids"]) == tokens
        assert choice.text == oracle.text(tokens)
    logprobs = done.choices[-1].logprobs
    assert logprobs is not None and logprobs.tokens and logprobs.top_logprobs
    assert logprobs.token_logprobs == pytest.approx([one.logprob for one in expected.logprobs])
    assert "".join(logprobs.tokens) == expected.text
    assert all(len(top) == 3 for top in logprobs.top_logprobs)


async def test_closing_the_connection_frees_the_blocks(clusters: Clusters) -> None:
    """Of a stream, and of a response that is awaited whole."""
    cluster, own = await clusters(engine=SIMULATED)
    runs = lambda status: bool(status["router"]["running"])  # noqa: E731
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        for stream in (False, True):
            body = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "stream": stream}
            url = f"http://{cluster.http_addresses[0]}/v1/completions"
            call = asyncio.create_task(client.post(url, json=body))
            await eventually(own.status, runs, "the request did not begin", TIMEOUT_S)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await all_blocks_free(own)
            assert not runs(await own.status())


async def test_a_stream_survives_its_decode_worker(clusters: Clusters, simulated: Oracle) -> None:
    """Over HTTP too: every token once, the oracle's."""
    cluster, own = await clusters(alone=True, engine=SIMULATED, decode=2)
    case = simulated.case(100, new_tokens=400)
    tokens: list[int] = []
    killed = False
    async with openai.AsyncOpenAI(**settings(cluster)) as client:
        stream = await client.completions.create(
            model="demo", prompt=list(case.prompt), max_tokens=400, temperature=0, stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        async for chunk in stream:
            assert chunk.choices[0].model_extra is not None
            tokens += chunk.choices[0].model_extra["token_ids"]
            if len(tokens) > 10 and not killed:
                killed = True
                cluster.kill(await decoding_process(cluster, own))
    assert killed
    assert tuple(tokens) == simulated.tokens(case)
