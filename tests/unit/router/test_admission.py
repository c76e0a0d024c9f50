"""Admission: every kind of input, every refusal with its field, before any work."""

import json
import re
import time

import pytest

from baton.errors import (
    CheckpointError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
)
from baton.generation.generation_config import sampling_defaults
from baton.generation.sampling_params import (
    FILL_CONTEXT,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_CACHE_SALT_CHARS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
)
from baton.v1 import common_pb2, inference_pb2
from router.admission.admission import PromptChoices
from router.admission.chat import MAX_MESSAGES
from router.admission.prompt_tokenizer import PromptTokenizer
from router.admission.tenants import Tenants
from router.admission.tokenizer_pool import TokenizerPool
from router.admission.validation import MAX_WORKERS

from .small_tokenizers import TEMPLATE, byte_tokenizer, ids_only_tokenizer
from .small_tokenizers import admission as new_admission


@pytest.fixture
async def admission_of(tmp_path):
    """Makes an admission; `tenant` is the [default] table of its tenants file."""

    made = []

    def make(tenant=None, max_context=32, template=TEMPLATE, **settings):
        if tenant is not None:
            path = tmp_path / "tenants.toml"
            path.write_text(f"[default]\n{tenant}")
            settings["tenants"] = Tenants(path)
        tokenizer = byte_tokenizer(tmp_path, template=template, max_position_embeddings=max_context)
        made.append(new_admission(tokenizer, **settings))
        return made[-1]

    yield make
    for one in made:
        await one.aclose()


@pytest.fixture
def admission(admission_of):
    return admission_of()


@pytest.fixture
def ids_only(tmp_path):
    return new_admission(ids_only_tokenizer(tmp_path))


def request(text="Hi", ids=None, chat=None, **fields):
    sampling = common_pb2.SamplingParams(**fields.pop("sampling", {}))
    if ids is not None:
        fields["token_ids"] = inference_pb2.TokenIds(ids=ids)
    elif chat is not None:
        messages = [inference_pb2.ChatMessage(role=role, content=text) for role, text in chat]
        fields["chat"] = inference_pb2.Chat(messages=messages)
    else:
        fields["text"] = text
    return inference_pb2.GenerateRequest(sampling=sampling, **fields)


async def admit(admission, asked=None, time_left_s=60.0, max_context=0, **fields):
    choices, number = fields.pop("choices", PromptChoices()), fields.pop("number", 0)
    tenant = admission.tenants.tenant_for(())
    asked = asked or request(**fields)
    deadline = time.monotonic() + time_left_s
    return await admission.admit(asked, deadline, max_context, "r1", tenant, choices, number)


def enter(admission, admitted, priority=0, rate=0.0):
    tenant = admission.tenants.tenant_for(())
    return admission.enter(admitted, tenant, priority, PromptChoices(), prefill_rate=rate)


async def test_a_request_becomes_tokens(admission, admission_of):
    more = {"stop": ["\n"], "include_stop": True, "cache_salt": "salt"}
    admitted = await admit(admission, **more, stream_interval=8)
    assert admitted.stream_interval == 1, "a stop string may come with each token"
    assert (await admit(admission, stream_interval=8)).stream_interval == 8
    assert (await admit(admission, stream_interval=1000)).stream_interval == 64
    together = admission_of(stream_interval=4)
    assert (await admit(together)).stream_interval == 4, "the router's own"
    assert (await admit(together, stream_interval=1)).stream_interval == 1
    assert (await admit(together, stop=["\n"])).stream_interval == 1
    assert [*admitted.prompt] == admission.tokenizer.encode("Hi") and len(admitted.prompt) == 2
    assert (admitted.request_id, admitted.stop, admitted.include_stop) == ("r1", ("\n",), True)
    assert (admitted.tenant, admitted.cache_salt) == ("default", "salt")
    assert (await admit(admission_of(""), cache_salt="salt")).cache_salt == "default/salt"
    chat = await admit(admission, chat=[("user", "Hi")])
    assert admission.tokenizer.decode(chat.prompt) == "user:Hi\nassistant:"


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (inference_pb2.GenerateRequest(), "input"),
        (request(""), "input"),
        (request(chat=[]), "chat"),
        (request(ids=[]), "input"),
        (request(ids=[257]), "token_ids"),
        (request(ids=[1 << 31]), "token_ids"),
        (request("x" * 32), "input"),
        (request("x" * 513), "input"),
        (request(chat=[("user", "x" * 513)]), "input"),
        (request(chat=[("", "")] * (MAX_MESSAGES + 1)), "chat"),
        (request(ids=[1] * 32), "input"),
        (request(priority=9), "priority"),
        (request(cache_salt="x" * (MAX_CACHE_SALT_CHARS + 1)), "cache_salt"),
        (request(user="u" * 1025), "user"),
        (request(workers=["x"] * (MAX_WORKERS + 1)), "workers"),
        (request(stop=[""]), "stop"),
        *(
            (request(sampling={name: value}), f"sampling.{name}")
            for name, value in (
                ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1)),
                ("stop_token_ids", [1] * (MAX_STOP_TOKEN_IDS + 1)),
                ("allowed_token_ids", [1] * (MAX_ALLOWED_TOKEN_IDS + 1)),
                ("temperature", -1),  # ranges are tested where they are
                ("logit_bias", {257: 1}),
                ("stop_token_ids", [257]),
            )
        ),
        (request(ids=[1], resumed_token_ids=[2] * 5, sampling={"max_tokens": 5}),
         "resumed_token_ids"),
        (request(ids=[1], resumed_token_ids=[2], sampling={"temperature": 0.5}), "sampling.seed"),
        (request(ids=[1], resumed_token_ids=[1 << 30], sampling={"temperature": 0}), "token_ids"),
    ],
)  # fmt: skip
async def test_what_can_never_work_is_refused_with_its_field(admission, asked, field):
    with pytest.raises(InvalidRequest) as caught:
        await admit(admission, asked)
    assert caught.value.field == field
    assert len(str(caught.value)) < 300, "whatever it quotes"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": "Hi"}, "text"),
        ({"chat": [("user", "Hi")]}, "chat"),
        ({"ids": [1], "stop": ["x"]}, "stop"),
        ({"ids": [50]}, "token_ids"),
    ],
)
async def test_a_model_without_a_tokenizer_takes_token_ids_alone(ids_only, fields, field):
    assert [*(await admit(ids_only, ids=[49])).prompt] == [49]
    with pytest.raises(InvalidRequest) as caught:
        await admit(ids_only, **fields)
    assert caught.value.field == field


async def test_the_smaller_context_counts_and_one_token_is_for_output(admission, ids_only):
    for length, workers in ((31, 0), (30, 31), (31, 99)):
        assert len((await admit(admission, max_context=workers, text="x" * length)).prompt)
    assert len((await admit(ids_only, ids=[1] * 1000)).prompt), "its context is not known"
    for one in (admission, ids_only):
        with pytest.raises(InvalidRequest, match="31 tokens and the context holds 31"):
            await admit(one, ids=[1] * 31, max_context=31)


@pytest.mark.parametrize("wanted", [{}, {"embedding": True}, {"prompt_logprobs": 0}])
async def test_a_prompt_without_output_may_fill_the_context(admission, wanted):
    sampling = {"max_tokens": 0, **wanted}
    for given in ({"ids": [1] * 32}, {"text": "x" * 32}):
        assert len((await admit(admission, sampling=sampling, **given)).prompt) == 32
    for given in ({"ids": [1] * 33}, {"text": "x" * 33}):
        with pytest.raises(InvalidRequest, match=r"33 tokens and the context holds 32$"):
            await admit(admission, sampling=sampling, **given)
    kept = await admit(admission, ids=[1] * 40, sampling=sampling, truncate_prompt_tokens=32)
    assert len(kept.prompt) == 32


@pytest.mark.parametrize(
    ("max_tokens", "kept"), [(0, 32), (1, 31), (20, 12), (FILL_CONTEXT, 31), (None, 31)]
)
async def test_a_prompt_is_cut_to_what_the_context_holds_before_its_output(
    admission, max_tokens, kept
):
    sampling = {} if max_tokens is None else {"max_tokens": max_tokens}
    fields = {"sampling": sampling, "truncate_prompt_tokens": FILL_CONTEXT}
    cut = await admit(admission, ids=[*range(1, 41)], **fields)
    assert [*cut.prompt] == [*range(41 - kept, 41)]
    assert [*(await admit(admission, ids=[1, 2], **fields)).prompt] == [1, 2]


@pytest.mark.parametrize(
    ("router", "tenant", "limit"), [(5, 0, 5), (0, 5, 5), (9, 5, 5), (5, 9, 5), (0, 0, 31)]
)
async def test_the_smallest_limit_of_a_prompt_counts(admission_of, router, tenant, limit):
    fields = f"max_prompt_tokens = {tenant}" if tenant else ""
    admission = admission_of(fields, max_prompt_tokens=router)
    assert len((await admit(admission, text="x" * limit)).prompt) == limit
    with pytest.raises(InvalidRequest) as caught:
        await admit(admission, text="x" * (limit + 1))
    assert caught.value.field == "input"


@pytest.mark.parametrize(("own", "workers", "most"), [(32, 0, 22), (32, 20, 10), (32, 99, 22)])
async def test_no_more_output_is_admitted_than_the_context_holds(admission_of, own, workers, most):
    admission = admission_of(max_context=own)

    async def max_tokens(**sampling):
        asked = request("x" * 10, sampling=sampling)
        return (await admit(admission, asked, max_context=workers)).params.max_tokens

    assert await max_tokens() == await max_tokens(max_tokens=FILL_CONTEXT) == most
    assert await max_tokens(max_tokens=7) == 7
    with pytest.raises(InvalidRequest, match=f"is {most + 1}, but .* leaves {most} ") as caught:
        await max_tokens(max_tokens=most + 1)
    assert caught.value.field == "sampling.max_tokens"


async def test_seed_and_target_are_the_requests_or_the_routers(admission_of):
    admission, now = admission_of(ttft_target_s=2.0), time.monotonic()
    seeds = [(await admit(admission, sampling={"seed": seed})).params.seed for seed in (0, 9)]
    assert seeds == [0, 9]
    random = {(await admit(admission)).params.seed for _ in range(8)}
    assert len(random) == 8 and max(random) > 1 << 32
    assert (await admit(admission, time_left_s=5.0)).deadline == pytest.approx(now + 5.0, abs=2)
    targets = [(await admit(admission, ttft_target_ms=ms)).ttft_target_s for ms in (0, 500, 4000)]
    assert targets == [2.0, 0.5, 4.0]


async def test_a_passed_deadline_is_reported_before_anything_else(admission_of):
    admission = admission_of(max_context=100_000)
    for time_left_s in (0.0, -3.0):
        with pytest.raises(DeadlineExceeded):
            await admit(admission, time_left_s=time_left_s)
    with pytest.raises(DeadlineExceeded, match="tokenizing"):  # before its process has started
        await admit(admission, chat=[("user", "x" * 10_000)], time_left_s=0.001)


async def test_what_will_be_refused_is_not_tokenized(admission_of, monkeypatch):
    admission = admission_of("max_running = 1")
    lease = enter(admission, await admit(admission))
    monkeypatch.setattr(TokenizerPool, "encode", lambda *_: pytest.fail("it was tokenized"))
    monkeypatch.setattr(type(admission.tokenizer), "encode", lambda *_: pytest.fail("tokenized"))
    with lease, pytest.raises(Overloaded):
        await admit(admission)
    for asked in (request("x" * 10_000), request(chat=[("user", "x" * 10_000)])):
        with pytest.raises(InvalidRequest, match="characters and the context holds 32 tokens"):
            await admit(admission, asked)


async def test_a_short_chat_that_its_template_makes_long_or_slow_holds_no_event_loop(
    admission_of, monkeypatch
):
    template = "{% for i in range(messages[0].content | int) %}{{ i }} {% endfor %}{{ 'x' }}"
    admission, pooled = admission_of(max_context=1_000_000, template=template), []
    encode = TokenizerPool.encode
    monkeypatch.setattr(
        TokenizerPool, "encode", lambda *args: pooled.append(args[1]) or encode(*args)
    )
    lengths = []
    for repeated in (3, 2000, 40_000):
        lengths.append(len((await admit(admission, chat=[("user", str(repeated))])).prompt))
    assert len(pooled) == 2
    assert lengths == [7, 8891, 228_891]


async def test_a_prompt_of_which_the_end_is_kept_may_be_longer_than_the_context(admission_of):
    admission, text = admission_of(max_context=8192), "x" * 100_000
    for given in ({"text": text}, {"chat": [("user", text)]}):
        with pytest.raises(InvalidRequest, match="the context holds 8192"):
            await admit(admission, **given)
        admitted = await admit(admission, **given, truncate_prompt_tokens=100)
        assert len(admitted.prompt) == 100


async def test_choices_of_a_prompt_share_its_tokens_and_have_seeds_of_their_own(
    admission, monkeypatch
):
    choices, asked = PromptChoices(total=3), request("Hi", sampling={"seed": (1 << 64) - 2})
    first = await admit(admission, asked, choices=choices)
    monkeypatch.setattr(PromptTokenizer, "tokenize", lambda *_: pytest.fail("tokenized again"))
    others = [await admit(admission, asked, choices=choices, number=i) for i in (1, 2)]
    assert all(other.prompt is first.prompt for other in others)
    assert [other.params.seed for other in others] == [(1 << 64) - 1, 0]


async def test_open_output_is_cut_to_the_tenants_bucket(admission_of):
    admission = admission_of("tokens_per_minute = 1000", max_context=5000)
    asked = request("x" * 100, sampling={"max_tokens": FILL_CONTEXT})
    for total, most in ((1, 900), (3, 300)):
        admitted = await admit(admission, asked, choices=PromptChoices(total=total))
        assert admitted.params.max_tokens == most
    with enter(admission, admitted):
        enter(admission, admitted)  # what the first may use is not held back


@pytest.mark.parametrize("max_context", [5000, None])
@pytest.mark.parametrize("default", [{}, {"max_tokens": FILL_CONTEXT}])
@pytest.mark.parametrize("model_says", [{}, {"max_tokens": 2000}])
async def test_a_default_that_fits_the_context_is_cut_to_the_tenants_bucket(
    admission_of, max_context, default, model_says
):
    admission = admission_of(
        "tokens_per_minute = 110", max_context=max_context, sampling_defaults=model_says
    )
    admitted = await admit(admission, request("x" * 100, sampling=default))
    assert admitted.params.max_tokens == 10
    with enter(admission, admitted):
        pass
    asked = await admit(admission, request("x" * 100, sampling={"max_tokens": 11}))
    with pytest.raises(InvalidRequest, match="ask for fewer"):
        enter(admission, asked)


@pytest.mark.parametrize(("rate", "work_s"), [(0.0, 0.02), (40.0, 0.5)])
async def test_the_virtual_finish_follows_from_size_rate_and_priority(admission_of, rate, work_s):
    admission = admission_of()
    admitted = await admit(admission, text="x" * 20)
    first, second, urgent = (
        enter(admission, admitted, priority, rate).prompt
        for priority in (0, 0, common_pb2.PRIORITY_HIGH)
    )
    fair_s = [prompt.fair_wait_s for prompt in (first, urgent, second)]
    assert fair_s == pytest.approx([work_s, 2 * work_s, 3 * work_s])


async def test_settings_that_a_request_does_not_give_are_the_models(admission_of, tmp_path):
    """What it says goes first, though it be 0 or 1; an output limit is a default as ours is."""
    recommended = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "do_sample": True,
                   "repetition_penalty": 1.2, "max_new_tokens": 7, "eos_token_id": 3}  # fmt: skip
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    admission = admission_of(sampling_defaults=sampling_defaults(tmp_path))
    params = (await admit(admission, request())).params
    found = {name: getattr(params, name) for name in recommended if hasattr(params, name)}
    assert found == {k: v for k, v in recommended.items() if hasattr(params, k)}
    assert params.max_tokens == 7
    own = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    params = (await admit(admission, request(sampling={**own, "max_tokens": 9}))).params
    assert {name: getattr(params, name) for name in own} == own and params.max_tokens == 9
    params = (await admit(admission, request(sampling={"max_tokens": FILL_CONTEXT}))).params
    assert params.max_tokens == 7
    assert (await admit(admission_of(), request())).params.temperature == 1.0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"temperature": 1.0}),
        ({"temperature": None, "top_k": None}, {"temperature": 1.0}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"do_sample": True, "top_p": 0.8}, {"temperature": 1.0, "top_p": 0.8}),
        ({"top_k": 2.5}, "top_k is 2.5; supported: a whole number from 0"),
        ({"top_p": 0}, "top_p is 0; supported: a number above 0"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"min_p": True}, "min_p is True"),
    ],
)
def test_generation_config_is_read_with_checks(tmp_path, values, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    if isinstance(expected, dict):
        assert sampling_defaults(tmp_path) == expected
        return
    with pytest.raises(CheckpointError, match=f"generation_config.json: {re.escape(expected)}"):
        sampling_defaults(tmp_path)
