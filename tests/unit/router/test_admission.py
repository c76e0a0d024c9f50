"""The service: every kind of input, every refusal with its field, before any work."""

import asyncio
import math
import threading
import time

import pytest

from baton.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Unauthenticated,
)
from baton.sampling import FILL_CONTEXT, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from baton.v1 import common_pb2, inference_pb2
from router.admission.admission import MAX_MESSAGES, Admission, Choices
from router.admission.tenants import Tenants

from .small_tokenizers import byte_tokenizer, ids_only_tokenizer


@pytest.fixture
def service(tmp_path):
    return Admission("tiny", byte_tokenizer(tmp_path), default_timeout_s=60.0)


@pytest.fixture
def ids_door(tmp_path):
    return Admission("tiny", ids_only_tokenizer(tmp_path), default_timeout_s=60.0)


def request(text="Hi", **fields):
    if {"chat", "token_ids"} & fields.keys():
        return inference_pb2.GenerateRequest(**fields)
    return inference_pb2.GenerateRequest(text=text, **fields)


def ids(*token_ids):
    return inference_pb2.TokenIds(ids=token_ids)


def chat(*fair_queue):
    messages = [
        inference_pb2.ChatMessage(role=role, content=content) for role, content in fair_queue
    ]
    return inference_pb2.Chat(messages=messages)


def sampling(**fields):
    return common_pb2.SamplingParams(**fields)


async def admit(service, asked, time_left_s=None, max_context=0):
    return await service.admit(asked, time_left_s, max_context, "r1")


async def test_text_becomes_tokens(service):
    asked = await admit(service, request("Hi", stop=["\n"], include_stop=True, cache_salt="salt"))
    assert asked.prompt == tuple(service.tokenizer.encode("Hi"))
    assert len(asked.prompt) == 2
    assert (asked.request_id, asked.stop, asked.include_stop) == ("r1", ("\n",), True)
    assert asked.cache_salt == "salt"


async def test_chat_is_rendered_by_the_models_template(service):
    asked = await admit(service, request(chat=chat(("user", "Hi"))))
    assert service.tokenizer.decode(asked.prompt) == "user:Hi\nassistant:"


async def test_the_name_of_the_model_may_be_given_or_left_out(service):
    assert await admit(service, request(model="tiny"))
    with pytest.raises(ModelNotFound, match="'other' is not served here; 'tiny' is"):
        await admit(service, request(model="other"))


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (inference_pb2.GenerateRequest(), "input"),
        (request(""), "input"),
        (request(chat=chat()), "chat"),
        (request(token_ids=ids()), "input"),
        (request(token_ids=ids(257)), "token_ids"),
        (request(token_ids=ids(1 << 31)), "token_ids"),
        (request("x" * 32), "input"),
        (request("x" * 513), "input"),
        (request(chat=chat(("user", "x" * 513))), "input"),
        (request(chat=chat(*[("", "")] * (MAX_MESSAGES + 1))), "chat"),
        (request(token_ids=ids(*[1] * 32)), "input"),
        (
            request(sampling=sampling(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1))),
            "sampling.logit_bias",
        ),
        (
            request(sampling=sampling(stop_token_ids=[1] * (MAX_STOP_TOKEN_IDS + 1))),
            "sampling.stop_token_ids",
        ),
        (request(stop=[""]), "stop"),
        (request(stop=["x"] * 17), "stop"),
        (request(stop=["x" * 257]), "stop"),
        (request(sampling=sampling(temperature=-1)), "sampling.temperature"),
        (request(sampling=sampling(temperature=math.nan)), "sampling.temperature"),
        (request(sampling=sampling(top_p=0)), "sampling.top_p"),
        (request(sampling=sampling(min_p=2)), "sampling.min_p"),
        (request(sampling=sampling(repetition_penalty=0)), "sampling.repetition_penalty"),
        (request(sampling=sampling(presence_penalty=3)), "sampling.presence_penalty"),
        (request(sampling=sampling(frequency_penalty=-3)), "sampling.frequency_penalty"),
        (request(sampling=sampling(max_tokens=0)), "sampling.max_tokens"),
        (request(sampling=sampling(min_tokens=65)), "sampling.min_tokens"),
        (request(sampling=sampling(logprobs=21)), "sampling.logprobs"),
        (request(sampling=sampling(logit_bias={1: 101})), "sampling.logit_bias"),
        (request(sampling=sampling(logit_bias={257: 1})), "sampling.logit_bias"),
        (request(sampling=sampling(stop_token_ids=[257])), "sampling.stop_token_ids"),
    ],
)
async def test_what_can_never_work_is_refused_with_its_field(service, asked, field):
    with pytest.raises(InvalidRequest) as caught:
        await admit(service, asked)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("length", "workers", "fits"), [(31, 0, True), (31, 31, False), (30, 31, True), (31, 99, True)]
)
async def test_the_smaller_context_counts_and_one_token_is_for_output(
    service, length, workers, fits
):
    asked = request("x" * length)
    if fits:
        assert len((await admit(service, asked, max_context=workers)).prompt) == length
        return
    with pytest.raises(InvalidRequest, match=f"{length} tokens and the context holds {workers}"):
        await admit(service, asked, max_context=workers)


async def test_a_context_that_nobody_knows_limits_nothing(ids_door):
    asked = await admit(ids_door, request(token_ids=ids(*[1] * 1000)))
    assert len(asked.prompt) == 1000
    with pytest.raises(InvalidRequest, match="the context holds 10"):
        await admit(ids_door, request(token_ids=ids(*[1] * 10)), max_context=10)


async def test_a_given_seed_is_kept_and_none_is_drawn_anew(service):
    assert (await admit(service, request(sampling=sampling(seed=0)))).params.seed == 0
    assert (await admit(service, request(sampling=sampling(seed=9)))).params.seed == 9
    drawn = {(await admit(service, request())).params.seed for _ in range(8)}
    assert len(drawn) == 8
    assert max(drawn) > 1 << 32


async def test_the_deadline_is_the_callers_or_the_default(service):
    now = time.monotonic()
    assert (await admit(service, request(), 5.0)).deadline == pytest.approx(now + 5.0, abs=2)
    assert (await admit(service, request())).deadline == pytest.approx(now + 60.0, abs=2)


@pytest.mark.parametrize("time_left_s", [0.0, -3.0])
async def test_a_passed_deadline_is_told_before_anything_else(service, time_left_s):
    with pytest.raises(DeadlineExceeded):
        await admit(service, request(model="other"), time_left_s)


async def test_tokenizing_counts_against_the_deadline(service, monkeypatch):
    stuck = threading.Event()
    monkeypatch.setattr(type(service.tokenizer), "encode_chat", lambda *_: stuck.wait(5) and [1])
    try:
        async with asyncio.timeout(2):
            with pytest.raises(DeadlineExceeded, match="tokenizing"):
                await admit(service, request(chat=chat(("user", "Hi"))), 0.02)
    finally:
        stuck.set()


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (request("Hi"), "text"),
        (request(chat=chat(("user", "Hi"))), "chat"),
        (request(token_ids=ids(1), stop=["x"]), "stop"),
        (request(token_ids=ids(50)), "token_ids"),
    ],
)
async def test_a_model_without_a_tokenizer_takes_token_ids_alone(ids_door, asked, field):
    assert (await admit(ids_door, request(token_ids=ids(49)))).prompt == (49,)
    with pytest.raises(InvalidRequest) as caught:
        await admit(ids_door, asked)
    assert caught.value.field == field


def limited_tenants(tmp_path, fields):
    path = tmp_path / "tenants.toml"
    path.write_text(f"[default]\n{fields}")
    return Tenants.load(path)


@pytest.mark.parametrize(
    ("routers", "tenants", "limit"), [(5, 0, 5), (0, 5, 5), (9, 5, 5), (5, 9, 5), (0, 0, 31)]
)
async def test_the_smallest_limit_of_a_prompt_counts(tmp_path, routers, tenants, limit):
    fields = f"max_prompt_tokens = {tenants}" if tenants else ""
    service = Admission(
        "tiny", byte_tokenizer(tmp_path), 60.0, max_prompt_tokens=routers,
        tenants=limited_tenants(tmp_path, fields),
    )  # fmt: skip
    assert len((await admit(service, request("x" * limit))).prompt) == limit
    with pytest.raises(InvalidRequest) as caught:
        await admit(service, request("x" * (limit + 1)))
    assert caught.value.field == "input"


@pytest.mark.parametrize(("own_ms", "target_s"), [(0, 2.0), (500, 0.5), (4000, 4.0)])
async def test_a_requests_own_target_goes_before_the_routers(tmp_path, own_ms, target_s):
    service = Admission("tiny", byte_tokenizer(tmp_path), 60.0, ttft_target_s=2.0)
    assert (await admit(service, request(ttft_target_ms=own_ms))).ttft_target_s == target_s


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(service, monkeypatch):
    monkeypatch.setattr(Admission, "in_thread", lambda *_: pytest.fail("it was tokenized"))
    for asked in (request("x" * 10_000), request(chat=chat(("user", "x" * 10_000)))):
        with pytest.raises(InvalidRequest, match="characters and the context holds 32 tokens"):
            await admit(service, asked)


async def test_a_message_quotes_200_characters_of_a_value_at_most(service):
    for asked, error in (
        (request(model="m" * 100_000), ModelNotFound),
        (request(sampling=sampling(logit_bias=dict.fromkeys(range(1000), 1))), InvalidRequest),
    ):
        with pytest.raises(error) as caught:
            await admit(service, asked)
        assert len(str(caught.value)) < 300


async def test_texts_are_tokenized_on_a_few_threads_of_their_own(service, monkeypatch):
    names = []

    def encode_chat(*_):
        names.append(threading.current_thread().name)
        time.sleep(0.001)
        return [1]

    monkeypatch.setattr(type(service.tokenizer), "encode_chat", encode_chat)
    asked = request(chat=chat(("user", "Hi")))
    await asyncio.gather(*(admit(service, asked) for _ in range(64)))
    assert len(names) == 64
    assert {name.partition("_")[0] for name in names} == {"text"}
    assert len(set(names)) <= 4


async def test_choices_of_a_prompt_share_its_tokens_and_have_seeds_of_their_own(
    service, monkeypatch
):
    choices, asked = Choices(total=3), request("Hi", sampling=sampling(seed=(1 << 64) - 2))
    first = await service.admit(asked, None, 0, "r1", choices=choices)
    monkeypatch.setattr(Admission, "tokenize", lambda *_: pytest.fail("tokenized again"))
    others = [await service.admit(asked, None, 0, "r1", choices=choices, number=i) for i in (1, 2)]
    assert all(other.prompt is first.prompt for other in others)
    assert [other.params.seed for other in others] == [(1 << 64) - 1, 0]


async def test_a_chat_without_a_limit_is_let_in_where_the_bucket_is_smaller(tmp_path):
    tenants = limited_tenants(tmp_path, "tokens_per_minute = 1000")
    tokenizer = byte_tokenizer(tmp_path, max_position_embeddings=5000)
    service = Admission("tiny", tokenizer, 60.0, tenants=tenants)
    asked = request("x" * 100, sampling=sampling(max_tokens=FILL_CONTEXT))
    for total, most in ((1, 900), (3, 300)):
        ask = await service.admit(asked, None, 0, "r1", choices=Choices(total=total))
        assert ask.params.max_tokens == most
    _, lease = service.enter(ask, tenants.of(None), 0)
    with lease:
        service.enter(ask, tenants.of(None), 0)  # what the first may use is not held back


async def test_a_priority_that_nobody_knows_is_refused(service):
    for priority in common_pb2.Priority.values():
        assert await admit(service, request(priority=priority))
    with pytest.raises(InvalidRequest, match="no priority 9") as caught:
        await admit(service, request(priority=9))
    assert caught.value.field == "priority"


async def test_the_tenant_is_noted_and_salts_the_cache(service, tmp_path):
    plain = await admit(service, request(cache_salt="s"))
    assert (plain.tenant, plain.cache_salt) == ("default", "s")
    service = Admission("tiny", service.tokenizer, 60.0, tenants=limited_tenants(tmp_path, ""))
    assert (await admit(service, request(cache_salt="s"))).cache_salt == "default/s"


async def test_with_keys_and_no_tenant_given_nobody_is_let_in(service, tmp_path):
    path = tmp_path / "tenants.toml"
    path.write_text(f'[tenants.a]\nkeys = ["sha256:{"0" * 64}"]')
    service = Admission("tiny", service.tokenizer, 60.0, tenants=Tenants.load(path))
    with pytest.raises(Unauthenticated):
        await admit(service, request())


async def test_who_is_over_a_limit_is_refused_before_any_work(service, tmp_path, monkeypatch):
    tenants = limited_tenants(tmp_path, "max_running = 1")
    service = Admission("tiny", service.tokenizer, 60.0, tenants=tenants)
    _, lease = service.enter(await admit(service, request()), tenants.of(None), 0)
    monkeypatch.setattr(Admission, "tokenize", lambda *_: pytest.fail("it was tokenized"))
    with lease, pytest.raises(Overloaded):
        await admit(service, request())


@pytest.mark.parametrize(("rate", "work_s"), [(0.0, 0.02), (40.0, 0.5)])
async def test_the_virtual_finish_follows_from_size_rate_and_priority(tmp_path, rate, work_s):
    service = Admission("tiny", byte_tokenizer(tmp_path), 60.0, prefill_rate=lambda: rate)
    tenant = service.tenants.of(None)
    first, _ = service.enter(await admit(service, request("x" * 20)), tenant, 0)
    second, _ = service.enter(await admit(service, request("x" * 20)), tenant, 0)
    urgent, _ = service.enter(
        await admit(service, request("x" * 20)), tenant, common_pb2.PRIORITY_HIGH
    )
    assert first.virtual_finish < second.virtual_finish
    assert urgent.virtual_finish - time.monotonic() == pytest.approx(1.5 * work_s, abs=1.0)
    assert second.virtual_finish - urgent.virtual_finish == pytest.approx(
        0.5 * work_s, abs=0.01 + work_s / 4
    )


async def test_entering_is_charged_and_leaving_gives_back(tmp_path):
    tenants = limited_tenants(tmp_path, "tokens_per_minute = 100")
    tokenizer = byte_tokenizer(tmp_path, max_position_embeddings=100)
    service = Admission("tiny", tokenizer, 60.0, tenants=tenants)
    asked = await admit(service, request("x" * 20, sampling=sampling(max_tokens=60)))
    for _ in range(3):
        _, lease = service.enter(asked, tenants.of(None), 0)
        with pytest.raises(Overloaded) as caught:
            service.enter(asked, tenants.of(None), 0)
        assert caught.value.retry_after_s == pytest.approx(36, abs=10)
        with pytest.raises(Overloaded, match="refused"), lease:
            raise Overloaded("refused")


@pytest.mark.parametrize(("own", "workers", "most"), [(32, 0, 22), (32, 20, 10), (32, 99, 22)])
async def test_no_more_output_is_admitted_than_the_context_holds(tmp_path, own, workers, most):
    service = Admission("tiny", byte_tokenizer(tmp_path, max_position_embeddings=own), 60.0)
    for given in (sampling(max_tokens=FILL_CONTEXT), common_pb2.SamplingParams()):
        asked = request("x" * 10, sampling=given)
        assert (await admit(service, asked, max_context=workers)).params.max_tokens == most
    asked = request("x" * 10, sampling=sampling(max_tokens=most + 1))
    with pytest.raises(InvalidRequest, match=f"is {most + 1}, but .* leaves {most} ") as caught:
        await admit(service, asked, max_context=workers)
    assert caught.value.field == "sampling.max_tokens"
    asked = request("x" * 10, sampling=sampling(max_tokens=7))
    assert (await admit(service, asked, max_context=workers)).params.max_tokens == 7
