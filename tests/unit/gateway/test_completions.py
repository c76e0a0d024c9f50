"""Completions and chats over HTTP: whole and streamed, in OpenAI's shapes."""

import asyncio

from tests.unit.router.scripted_workers import seen

from .conftest import PROMPT


async def test_a_completion_in_one_piece(gateway_of):
    gateway = await gateway_of()
    response = await gateway.complete()
    assert response.status_code == 200
    answer = response.json()
    assert answer["id"] == f"cmpl-{response.headers['x-request-id']}"
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    assert answer["choices"] == [
        {"index": 0, "text": "abcde", "logprobs": None, "finish_reason": "length",
         "stop_reason": None}]  # fmt: skip
    assert answer["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0}}  # fmt: skip


async def test_a_streamed_completion_says_the_same_in_chunks(gateway_of):
    gateway = await gateway_of()
    events = await gateway.events(stream_options={"include_usage": True})
    *chunks, last = events
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abcde"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["length"]
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert len({(e["id"], e["object"], e["model"], e["created"]) for e in events}) == 1
    assert all("usage" not in event for event in await gateway.events())


async def test_a_chat_whole_and_streamed(gateway_of):
    gateway = await gateway_of()
    response = await gateway.chat(max_completion_tokens=3)
    answer = response.json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"][0]["message"] == {
        "role": "assistant", "content": "abc", "refusal": None}  # fmt: skip
    chunks = await gateway.events("/v1/chat/completions", max_tokens=3)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": "a"}, {"content": "b"}, {"content": "c"}]  # fmt: skip
    assert chunks[0]["object"] == "chat.completion.chunk"
    prompt = gateway.cluster.prefills[0].requests[0].sequence.token_ids
    assert list(prompt) == gateway.tokenizer.encode_chat([("user", "Hi")])


async def test_a_chat_without_a_limit_may_fill_the_context(gateway_of):
    gateway = await gateway_of()
    prompt = gateway.tokenizer.encode_chat([("user", "Hi")])
    answer = (await gateway.chat()).json()
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["completion_tokens"] == 32 - len(prompt)


async def test_choices_of_prompts_are_numbered_prompt_by_prompt(gateway_of):
    gateway = await gateway_of()
    answer = (await gateway.complete(prompt=["ab", "c"], n=2, seed=7)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert {choice["text"] for choice in answer["choices"]} == {"abcde"}
    assert answer["usage"]["prompt_tokens"] == 3  # each prompt once
    assert answer["usage"]["completion_tokens"] == 20
    sequences = [request.sequence for request in gateway.cluster.prefills[0].requests]
    sent = sorted((len(s.token_ids), s.sampling.seed) for s in sequences)
    assert sent == [(1, 7), (1, 8), (2, 7), (2, 8)]


async def test_streamed_choices_come_interleaved_and_each_is_whole(gateway_of):
    gateway = await gateway_of()
    events = await gateway.events(n=3, stream_options={"include_usage": True})
    texts = {}
    for event in events[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {0: "abcde", 1: "abcde", 2: "abcde"}
    assert events[-1]["usage"]["completion_tokens"] == 15
    assert events[-1]["usage"]["prompt_tokens"] == 3


async def test_lists_of_token_ids_are_prompts(gateway_of):
    gateway = await gateway_of()
    answer = (await gateway.complete(prompt=[[5, 6], [7]], return_token_ids=True)).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == [[100, 101, 102, 103, 104]] * 2
    sequences = [request.sequence for request in gateway.cluster.prefills[0].requests]
    assert sorted(map(list, (s.token_ids for s in sequences))) == [[5, 6], [7]]


async def test_a_stop_string_is_reported_and_cut(gateway_of):
    gateway = await gateway_of()
    (choice,) = (await gateway.complete(max_tokens=20, stop="cd")).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", "cd")
    (choice,) = (await gateway.complete(stop=["x", "cd"], include_stop_str_in_output=True)).json()[
        "choices"
    ]
    assert choice["text"] == "abcd"
    chunks = await gateway.events(max_tokens=20, stop="cd")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_echo_begins_with_the_prompt(gateway_of):
    gateway = await gateway_of()
    assert (await gateway.complete(prompt="xy", echo=True)).json()["choices"][0]["text"] == (
        "xyabcde")  # fmt: skip
    chunks = await gateway.events(prompt=[[100, 101]], echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ababcde"


async def test_sampling_settings_reach_the_workers(gateway_of):
    gateway = await gateway_of()
    await gateway.complete(
        temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, presence_penalty=0.5,
        frequency_penalty=-0.5, repetition_penalty=1.5, logit_bias={"5": -100}, seed=-1,
        stop_token_ids=[9], min_tokens=2, logprobs=2,
    )  # fmt: skip
    sampling = gateway.cluster.prefills[0].requests[0].sequence.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (
        0.125, 0.5, -0.5)  # fmt: skip
    assert (sampling.repetition_penalty, dict(sampling.logit_bias)) == (1.5, {5: -100.0})
    assert (sampling.seed, list(sampling.stop_token_ids)) == ((1 << 64) - 1, [9])
    assert (sampling.min_tokens, sampling.logprobs, sampling.ignore_eos) == (2, 2, True)


async def test_defaults_are_openais(gateway_of):
    gateway = await gateway_of()
    await gateway.post("/v1/completions", {"prompt": PROMPT, "top_k": -1, "stop": None})
    sampling = gateway.cluster.prefills[0].requests[0].sequence.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.top_k) == (1.0, 16, 0)
    assert not sampling.HasField("logprobs")
    assert not sampling.ignore_eos


async def test_a_prompt_of_several_choices_is_computed_before_the_others_begin(gateway_of):
    gateway = await gateway_of()
    prefill, go_on = gateway.cluster.prefills[0], asyncio.Event()

    async def slow(request):
        await go_on.wait()
        async for message in prefill.good(request):
            yield message

    prefill.scripts = [slow]
    call = asyncio.create_task(gateway.complete(n=3))
    await seen(lambda: prefill.requests)
    await asyncio.sleep(0.2)
    assert len(prefill.requests) == 1
    go_on.set()
    assert len((await call).json()["choices"]) == 3
    assert len(prefill.requests) == 3
