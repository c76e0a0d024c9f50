"""A cluster streams what one process would, token for token: handoffs, int8, speculation, HTTP."""

import asyncio
import itertools
import json
from dataclasses import replace
from typing import Any, Literal

import openai
import pydantic
import pytest

from baton.config import DEMO_MODEL
from baton.engine.kernels.native import library
from baton.local.span_store import is_complete
from baton.net import rpc
from baton.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tests.cluster.oracle import (
    ENGINE,
    LENGTHS,
    SAMPLING,
    SIMULATED,
    Oracle,
    Streams,
    all_blocks_free,
    check,
    decoding_process,
    decoding_processes,
)  # fmt: skip
from tests.preloaded import ranks_of
from tests.waiting import WAIT_S, eventually

SERVICES = {"baton-router", "baton-prefill", "baton-decode"}
CONFIG = json.loads((DEMO_MODEL / "config.json").read_text())
HEAD_SIZE = CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
FLOAT32_BYTES = 4
BYTES_PER_TOKEN = (
    2 * CONFIG["num_hidden_layers"] * CONFIG["num_key_value_heads"] * HEAD_SIZE * FLOAT32_BYTES
)


# Clusters that run already come first: only the last few are kept.
# Pairs of two and two over gloo: tests/cluster/test_chaos.py.
@pytest.mark.parametrize(("size", "transport"), [(1, "gloo"), (1, "shm"), (2, "shm")])
async def test_cold_cached_and_32_at_once(clusters, oracle, size, transport):
    """Every length, in each way to sample, in a batch; of one pair before it alone, without and
    with prefix-cache hits.

    The KV bytes of exactly the prompt's tokens travel.
    """
    topology: dict[str, Any] = {} if size == 1 else {"prefill": size, "decode": size}
    topology |= {} if transport == "shm" else {"transport": transport}
    _, client = await clusters(**topology)
    for sampling, length in itertools.product(SAMPLING, LENGTHS if size == 1 else ()):
        case = oracle.case(length, 0, sampling)
        salt = {"cache_salt": f"{sampling}-{length}"}
        cold = await check(client, oracle, case, **salt)
        assert cold.usage.prompt_tokens == length
        if cold.route.prefill:
            assert cold.timing.transfer_bytes == BYTES_PER_TOKEN * length
        warm = await check(client, oracle, case, **salt)
        assert warm.usage.cached_tokens == (length - 1) // 16 * 16
    await all_blocks_free(client)

    cases = [
        oracle.case(length, 0, sampling)
        for length in (*LENGTHS, *LENGTHS[:5], *LENGTHS[:5])
        for sampling in SAMPLING
    ]
    done = await asyncio.gather(
        *(check(client, oracle, c, cache_salt=f"{i % 4}") for i, c in enumerate(cases))
    )
    await all_blocks_free(client)
    by_handoff = [one for one in done if one.route.prefill]
    assert {one.route.transport for one in by_handoff} == {transport}
    assert {one.route.attempts for one in done} == {1}
    assert len({one.route.decode for one in done}) == size
    assert len({one.route.prefill for one in by_handoff}) == size


async def test_mixed_workers(clusters, oracle):
    """The router decides where each part of a request runs."""
    _, client = await clusters(mixed=2)
    done = await asyncio.gather(
        *(check(client, oracle, case) for case in oracle.mixed(24)),
        check(client, oracle, oracle.case(LENGTHS[-1], 3)),
    )
    assert all(one.route.decode.startswith("mixed-") for one in done if one.route.decode)
    await all_blocks_free(client)


async def test_only_what_decode_lacks_is_sent(clusters, oracle):
    """A second turn moves its new blocks; a short or a cached prompt skips the prefill worker."""
    _, client = await clusters()
    first = oracle.case(200, 2000)
    done = await check(client, oracle, first, cache_salt="turns")
    new = oracle.case(100, 2500).prompt
    second = replace(first, prompt=(*first.prompt, *done.token_ids, *new))
    done = await check(client, oracle, second, cache_salt="turns")
    # Decode keeps whole blocks of the first turn; its last token was never computed there.
    kept = (200 + first.new_tokens - 1) // 16 * 16
    assert done.timing.transfer_bytes == BYTES_PER_TOKEN * (len(second.prompt) - kept)
    assert done.usage.cached_tokens >= 200 // 16 * 16

    short = await check(client, oracle, oracle.case(15, 3000))
    assert (short.route.prefill, short.timing.transfer_bytes) == (None, 0)
    long = oracle.case(333, 3100, "seeded")
    assert (await check(client, oracle, long)).route.prefill is not None
    again = await check(client, oracle, long)
    assert (again.route.prefill, again.usage.cached_tokens) == (None, 320)


async def test_text_chat_logprobs_stop_strings_and_one_token(clusters, oracle):
    _, client = await clusters()
    for prompt in ("def read(path):\n    with open(path) as file:\n",
                   [{"role": "user", "content": "Write a stack."}]):  # fmt: skip
        ids = await client.tokenize(prompt)
        asked = await client.generate(prompt, max_tokens=16, temperature=0)
        assert (
            asked.token_ids == (await client.generate(ids, max_tokens=16, temperature=0)).token_ids
        )
        assert asked.text == oracle.text(asked.token_ids)

    case = oracle.case(40)
    whole = await check(client, oracle, case, logprobs=3, cache_salt="logprobs")
    assert [one.token_id for one in whole.logprobs] == list(whole.token_ids)
    assert all(len(one.top) == 3 and one.top[0][1] >= one.logprob for one in whole.logprobs)
    assert whole.route.prefill is not None
    stop = whole.text[10:14]
    stopped = await client.generate(case.prompt, **{**case.options, "stop": stop})
    assert (stopped.finish_reason, stopped.stop) == ("stop", stop)
    assert stopped.text == whole.text[: whole.text.index(stop)]

    case = oracle.case(100, 300)
    done = await client.generate(case.prompt, max_tokens=1, temperature=0, ignore_eos=True)
    assert (done.token_ids, done.finish_reason) == (oracle.tokens(case)[:1], "length")


async def spans_of(receiver, done):
    """A request's spans, when all of them have arrived."""
    whole = lambda spans: is_complete(spans, SERVICES)  # noqa: E731
    return await receiver.store.wait_for(done.trace_id, whole, WAIT_S)


async def test_the_trace_of_a_long_prompt(clusters, oracle, receiver):
    """The first token leaves before Commit, and blocks are sent while later chunks compute.

    The router assigns the handoff's id: with two, each end would wait for the other.
    """
    _, client = await clusters()
    await check(client, oracle, oracle.case(64, 100))  # the link is open then
    salts = itertools.count()

    async def traced():
        done = await check(client, oracle, oracle.case(1900), cache_salt=f"own {next(salts)}")
        await all_blocks_free(client)
        return done, await spans_of(receiver, done)

    def in_order(traced):
        """On a busy machine the first token and Commit race, and so do chunks and blocks."""
        ends = {span.name: span.end_ns for span in traced[1]}
        last = max(span.start_ns for span in traced[1] if span.name == "prefill.chunk")
        (transfer,) = (span for span in traced[1] if span.name == "kv.transfer")
        return ends["router.first_token"] < transfer.end_ns and transfer.start_ns < last

    done, spans = await eventually(
        traced, in_order, "the first token waits for Commit, or blocks for the last chunk"
    )
    by_name = {span.name: span for span in spans}
    transfer = by_name["kv.transfer"]
    chunks = sorted((s for s in spans if s.name == "prefill.chunk"), key=lambda s: s.start_ns)
    assert len(chunks) > 1
    assert sum(int(s.attributes["baton.chunk_tokens"]) for s in chunks) == 1900
    assert transfer.attributes["bytes"] == 1900 * BYTES_PER_TOKEN
    assert int(transfer.attributes["chunks"]) == len(chunks)
    assert by_name["decode.first_step"].start_ns >= by_name["decode.admit"].start_ns
    assert by_name["text_completion demo"].end_ns >= by_name["decode.run"].end_ns
    ids = {span.attributes["baton.handoff_id"] for span in spans
           if span.attributes.get("baton.handoff_id")}  # fmt: skip
    assert "baton.handoff_id" in transfer.attributes
    assert ids == {f"{done.request_id}-1"}


async def test_the_first_handoff_of_a_pair_opens_nothing(clusters, simulated):
    """Its link is there since both workers are. An epoch counts the links that a decode worker
    has offered."""
    cluster, client = await clusters(engine=SIMULATED, decode=2, alone=True)
    records = cluster.membership.records.values()
    (prefill,) = (one for one in records if one.role == common_pb2.WORKER_ROLE_PREFILL)
    async with rpc.channel(prefill.address) as channel:
        worker = worker_pb2_grpc.WorkerServiceStub(channel)

        async def links():
            found = await worker.Describe(worker_pb2.DescribeRequest(), timeout=WAIT_S)
            return {link.decode: link for link in found.pairs}

        before = await eventually(links, lambda found: len(found) == 2, "not every link is open")
        for decode in before:
            done = await check(
                client, simulated, simulated.case(100), workers=(prefill.incarnation, decode)
            )
            assert done.route.transport == "shm"
        after = await links()
    assert [link.sent_bytes > 0 for link in before.values()] == [False] * 2
    assert [link.sent_bytes > 0 for link in after.values()] == [True] * 2
    assert [link.epoch for link in (*before.values(), *after.values())] == [1] * 4


# Native kernels give a row the same bits beside any other rows, in any precision.
NATIVE = pytest.mark.skipif(library.load() is None, reason="no native library here")
INT8: dict[str, Any] = {"quantization": "int8", "kv_dtype": "int8"}
INT4: dict[str, Any] = {"quantization": "int4", "kv_dtype": "int8"}


@pytest.mark.parametrize(
    ("engine", "transport"),
    [
        pytest.param(replace(ENGINE, dtype="bfloat16", **INT8), "shm", marks=NATIVE, id="native"),
        pytest.param(replace(ENGINE, dtype="bfloat16", **INT4), "shm", marks=NATIVE, id="int4"),
        pytest.param(replace(ENGINE, kernels="torch", **INT8), "gloo", id="torch"),
    ],
)
async def test_quantised_weights_and_kv(clusters, oracle, engine, transport):
    """Cold and cached over a handoff of the int8 pool; a killed worker changes nothing."""
    native = engine.kernels != "torch"
    cluster, client = await clusters(
        alone=True, engine=engine, transport=transport, decode=1 + native
    )
    differs = False
    with Oracle(engine) as quantised:
        for sampling in SAMPLING:
            for length in (49, 500):
                case = quantised.case(length, 0, sampling)
                cold = await check(client, quantised, case, cache_salt=sampling)
                assert cold.route.transport == transport
                warm = await check(client, quantised, case, cache_salt=sampling)
                assert warm.usage.cached_tokens == (length - 1) // 16 * 16
                differs |= quantised.tokens(case) != oracle.tokens(case)
        assert differs, "it changed no token: it was not used"
        if native:
            streams = Streams(client, quantised, quantised.mixed(16))
            running = await streams.start()
            cluster.kill("decode-0")
            assert any(one.route.attempts > 1 for one in await running)
        await all_blocks_free(client)


@pytest.mark.parametrize(
    ("options", "workers", "killed"),
    [
        ({"speculate": 4}, {"decode": 2}, "decode-0"),
        ({"speculative_model": str(DEMO_MODEL)}, {"mixed": 2}, "mixed-0"),
        ({"speculative_model": str(DEMO_MODEL)}, {}, "decode-0"),
    ],
    ids=["n-grams", "draft model", "draft model after handoffs"],
)
async def test_speculation_changes_no_token(clusters, oracle, options, workers, killed):
    """Several tokens at once, with log-probabilities and stop strings, and a worker is killed."""
    engine, largest = replace(ENGINE, **options), 0
    cluster, client = await clusters(alone=True, engine=engine, **workers)
    for sampling in SAMPLING:
        case = oracle.case(200, 900, sampling, new_tokens=120)
        asked = client.stream(case.prompt, **case.options, logprobs=1, cache_salt=sampling)
        async with asked as stream:
            async for delta in stream:
                assert len(delta.logprobs) == len(delta.token_ids)
                largest = max(largest, len(delta.token_ids))
        whole = stream.completion
        assert whole.token_ids == oracle.tokens(case)
        assert [one.token_id for one in whole.logprobs] == list(whole.token_ids)
        assert whole.text == oracle.text(whole.token_ids)
    assert largest > 1
    for at in (60, 83):
        stop = whole.text[at : at + 5]
        done = await client.generate(case.prompt, **case.options, stop=stop)
        assert (done.stop, done.finish_reason) == (stop, "stop")
        assert done.text == whole.text[: whole.text.index(stop)]
        count = done.usage.completion_tokens
        assert done.token_ids == whole.token_ids[:count]
        assert stop in oracle.text(done.token_ids)
        assert stop not in oracle.text(done.token_ids[:-1]), "tokens after it are no output"
    streams = Streams(client, oracle, oracle.mixed(16))
    running = await streams.start()
    cluster.kill(killed)
    assert any(one.route.attempts > 1 for one in await running)
    await all_blocks_free(client)


# OpenAI's own client: what it gets equals what the SDK gets.

PROMPT = "def read(path):\n    with open(path) as file:\n"
MESSAGES: Any = [{"role": "user", "content": "Write a stack."}]
TIMEOUT_S = WAIT_S


def settings(cluster):
    """For OpenAI's clients."""
    url = f"http://{cluster.http_addresses[0]}/v1"
    return {"base_url": url, "api_key": "any", "max_retries": 0, "timeout": TIMEOUT_S}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
async def test_responses_equal_the_sdks(clusters, sampling, chat):
    """Whole and streamed: text, finish reason and usage."""
    cluster, own = await clusters()
    ignore_eos = not chat and sampling != "structured"
    sdk = {**SAMPLING[sampling], "max_tokens": 32, "ignore_eos": ignore_eos}
    http, ours = dict(sdk), ("top_k", "ignore_eos", "structured_outputs")
    http["extra_body"] = {key: http.pop(key) for key in ours if key in http}
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
    (choice,), choices = whole.choices, [chunk.choices[0] for chunk in chunks]
    if chat:
        text, pieces = choice.message.content, [one.delta.content or "" for one in choices]
        assert choices[0].delta.role == "assistant"
    else:
        text, pieces = choice.text, [one.text for one in choices]
    assert text == "".join(pieces) == expected.text
    assert choice.finish_reason == choices[-1].finish_reason == expected.finish_reason
    for usage in (whole.usage, last.usage):
        assert usage.prompt_tokens == expected.usage.prompt_tokens
        assert usage.completion_tokens == len(expected.token_ids)


async def test_token_ids_choices_batches_and_logprobs(clusters, oracle):
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
        alone = await client.completions.create(
            model="demo", prompt=list(cases[-1].prompt), echo=True, max_tokens=0, logprobs=3
        )
        asked = {"prompt_logprobs": 3, "max_tokens": 1}
        scored = await own.generate(cases[-1].prompt, **asked)
        short = await own.generate(cases[1].prompt, **asked)  # computed by decode
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
    here, there = (
        oracle.generate(case.prompt, max_tokens=0, prompt_logprobs=3).prompt_logprobs
        for case in (cases[-1], cases[1])
    )
    assert scored.prompt_logprobs == here and scored.route.prefill and not short.route.prefill
    assert short.prompt_logprobs == there
    (choice,) = alone.choices
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs == [one and one.logprob for one in here]
    assert alone.usage is not None and alone.usage.completion_tokens == 0


class Answer(pydantic.BaseModel, extra="forbid"):
    name: str = pydantic.Field(max_length=12)
    sizes: list[Literal[1, 20]] = pydantic.Field(max_length=3)


async def test_structured_output(clusters):
    """By pydantic models, whole and streamed, over a handoff; it matches wherever it says so."""
    cluster, own = await clusters()
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 80}
    async with openai.AsyncOpenAI(**settings(cluster)) as client:
        done = await client.chat.completions.parse(
            model="demo", messages=MESSAGES, response_format=Answer, **sampling
        )
        (choice,) = done.choices
        assert choice.finish_reason == "stop" and choice.message.parsed is not None
        prompt = "def sizes_of(names):\n" * 20
        expected = await own.generate(prompt, response_format=Answer, **sampling)
        assert expected.route.prefill and expected.finish_reason == "stop"
        Answer.model_validate_json(expected.text)
        stream = await client.completions.create(
            model="demo", prompt=prompt, stream=True, **sampling,
            extra_body={"structured_outputs": {"json": Answer.model_json_schema()}},
        )  # fmt: skip
        assert "".join([c.choices[0].text async for c in stream]) == expected.text
    await all_blocks_free(own)


@pytest.fixture(scope="module")
def two_decode_workers(tmp_path_factory):
    """Settings of a cluster that several tests use, each of which kills a worker."""
    folder = str(tmp_path_factory.mktemp("responses") / "responses")
    return {"decode": 2, "extra_args": {"router": ["--response-dir", folder]}}


FUNCTION = {"name": "weather", "parameters": Answer.model_json_schema()}
WEATHER = {"type": "function", "function": FUNCTION}


async def test_a_tool_that_must_be_called_is_called_though_its_decode_worker_is_killed(
    clusters, two_decode_workers
):
    """Whole, streamed and resumed on another worker: the same valid call, and its answer back."""
    cluster, own = await clusters(**two_decode_workers)
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 200}
    asked = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    whole = await own.chat(MESSAGES, **asked, **sampling)
    (call,) = whole.tool_calls
    assert (call.name, whole.finish_reason, whole.text) == ("weather", "tool_calls", "")
    Answer.model_validate_json(call.arguments)
    arguments, killed = "", False
    async with openai.AsyncOpenAI(**settings(cluster)) as client:
        stream = await client.chat.completions.create(
            model="demo", messages=MESSAGES, stream=True, **asked, **sampling
        )
        async for chunk in stream:
            (choice,) = chunk.choices
            for piece in choice.delta.tool_calls or ():
                assert piece.function is not None
                arguments += piece.function.arguments or ""
                if not killed:
                    killed = True
                    cluster.kill(await decoding_process(cluster, own))
        assert choice.finish_reason == "tool_calls"
    assert killed and arguments == call.arguments
    answered = [*MESSAGES, whole.message, {"role": "tool", "tool_call_id": call.id, "content": "4"}]
    assert (await own.chat(answered, tools=[WEATHER], max_tokens=4)).usage.prompt_tokens > 20


async def test_a_message_streams_on_though_its_decode_worker_is_killed(
    clusters, two_decode_workers
):
    """What Anthropic's accumulator has at the end is the SDK's text, and goes back."""
    import anthropic  # noqa: PLC0415 - 2 s, in every process that collects tests

    cluster, own = await clusters(**two_decode_workers)
    expected = await own.chat(MESSAGES, seed=5, temperature=1.0, max_tokens=1000, ignore_eos=True)
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 1000}
    more = {"seed": 5, "temperature": 1.0, "ignore_eos": True}
    killed, url = "", f"http://{cluster.http_addresses[0]}"
    async with anthropic.AsyncAnthropic(
        base_url=url, api_key="any", max_retries=0, timeout=TIMEOUT_S
    ) as client:
        async with client.messages.stream(messages=MESSAGES, extra_body=more, **asked) as stream:
            async for event in stream:
                if event.type == "text" and not killed:
                    killed = await decoding_process(cluster, own)
                    cluster.kill(killed)
            answer = await stream.get_final_message()
        (block,) = answer.content
        assert killed and block.type == "text" and block.text == expected.text
        assert answer.stop_reason == "max_tokens"
        assert answer.usage.output_tokens == expected.usage.completion_tokens == 1000
        turn: Any = {"role": "assistant", "content": answer.content}
        messages: Any = [*MESSAGES, turn, {"role": "user", "content": "Go on."}]
        asked |= {"max_tokens": 4, "extra_body": {"temperature": 0}}
        first = await client.messages.create(messages=messages, **asked)
        again = await client.messages.create(messages=messages, **asked)
        assert again.content == first.content
        assert again.usage.cache_read_input_tokens and again.usage.input_tokens


async def test_a_response_in_the_background_streams_on_though_its_decode_worker_is_killed(
    clusters, two_decode_workers
):
    """Its client leaves, the worker dies, and who follows it later misses nothing."""
    cluster, own = await clusters(**two_decode_workers)
    expected = await own.chat(MESSAGES, temperature=0.0, max_tokens=1000, ignore_eos=True)
    asked: dict[str, Any] = {"model": "demo", "input": MESSAGES, "max_output_tokens": 1000}
    more = {"temperature": 0.0, "ignore_eos": True}
    async with openai.AsyncOpenAI(**settings(cluster)) as client:
        events: list[Any] = []
        decoding: list[str] = []
        while len(decoding) != 1:  # the stream has ended, or the one before is still reported
            begun = await client.responses.create(
                **asked, extra_body=more, background=True, stream=True
            )
            events.clear()
            async with begun:
                async for event in begun:
                    events.append(event)
                    if event.type == "response.output_text.delta":
                        break
            decoding = await decoding_processes(cluster, own)
        cluster.kill(decoding[0])
        rest = await client.responses.retrieve(
            events[0].response.id, stream=True, starting_after=events[-1].sequence_number
        )
        events += [event async for event in rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = (event.delta for event in events if event.type == "response.output_text.delta")
    assert "".join(deltas) == events[-1].response.output_text == expected.text
    assert events[-1].response.usage.output_tokens == 1000


# Over gloo: tests/cluster/test_architectures.py, and test_hosts.py.
async def test_halves_of_unlike_tensor_parallelism_and_a_rank_that_is_killed(clusters, oracle):
    """Workers of one rank and of two are paired in every way; with a rank its worker ends."""
    engine = replace(ENGINE, tp=2, tp_backend="shm")
    other = {name: ["--tp", "1"] for name in ("prefill-1", "decode-1")}
    cluster, client = await clusters(
        alone=True, engine=engine, prefill=2, decode=2, extra_args=other
    )
    workers = (await client.status())["workers"]
    roles = [[w["incarnation"] for w in workers if w["role"] == r] for r in ("prefill", "decode")]
    for pair in itertools.product(*roles):
        done = await check(client, oracle, oracle.case(200), cache_salt=pair[0], workers=pair)
        assert (done.route.prefill, done.route.decode) == pair
    running = await Streams(client, oracle, oracle.mixed(8)).start()
    worker = cluster.processes["decode-0"]
    (rank,) = ranks_of(worker.pid)
    rank.kill()
    await running
    assert await worker.wait() != 0
    await all_blocks_free(client)
