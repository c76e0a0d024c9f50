"""What survives any worker: the failover rule, usage and times."""

import time

import pytest

from baton.v1 import common_pb2
from router.dispatch.request_state import RequestState

from .scripted_workers import request_state, tokenized


def test_the_first_attempt_asks_for_the_prompt():
    spec = request_state(cache_salt="tenant").spec("r-1")
    assert list(spec.token_ids) == [1, 2, 3]
    assert (spec.handoff_id, spec.prompt_tokens, spec.cache_salt) == ("r-1", 3, "tenant")
    assert spec.sampling.HasField("seed")
    assert spec.sampling.HasField("max_tokens")


def test_a_later_attempt_goes_on_where_the_caller_is():
    told = request_state()
    told.deliver([7])
    told.deliver([8, 9])
    first, later = told.spec("r-1"), told.spec("r-2")
    assert list(later.token_ids) == [1, 2, 3, 7, 8, 9]
    assert later.prompt_tokens == 3
    assert later.sampling == first.sampling
    assert later.sampling.seed == 7


@pytest.mark.parametrize(
    ("timeout_s", "least", "most"),
    [(2.0, 1000, 2000), (-1.0, 1, 1), (1e9, (1 << 32) - 1, (1 << 32) - 1)],
)
def test_the_time_left_is_never_none_and_always_fits(timeout_s, least, most):
    assert least <= request_state(timeout_s=timeout_s).spec("r").time_left_ms <= most


def test_the_time_left_is_never_negative():
    assert tokenized(timeout_s=-1).time_left_s == 0.0


def test_usage_counts_tokens_once():
    told = request_state()
    assert told.usage() == common_pb2.Usage(prompt_tokens=3)
    told.deliver([7, 8])
    told.cached_tokens = 2
    assert told.usage() == common_pb2.Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=2)


def test_times_are_from_arrival_and_between_tokens():
    now = time.monotonic()
    told = RequestState(tokenized(), started=now - 10.0)
    told.placed_at, told.first_at, told.last_at = now - 9.5, now - 9.0, now - 8.0
    told.delivered, told.prefill_queue_ms = [1, 2, 3, 4, 5], 100.0
    told.transfer_bytes, told.transfer_ms = 4096, 12.5
    timing = told.timing()
    assert timing.queue_ms == pytest.approx(600.0)
    assert timing.ttft_ms == pytest.approx(1000.0)
    assert timing.tpot_ms == pytest.approx(250.0)
    assert 10_000.0 <= timing.e2e_ms < 12_000.0
    assert (timing.transfer_bytes, timing.transfer_ms) == (4096, 12.5)


def test_one_token_has_no_time_between_tokens():
    told = request_state()
    told.deliver([1])
    assert told.timing().tpot_ms == 0.0
    assert told.timing().ttft_ms > 0.0


def test_the_first_delivery_alone_sets_the_first_time():
    told = request_state()
    told.deliver([1])
    first_at = told.first_at
    told.deliver([2])
    assert told.first_at == first_at
    assert told.last_at >= first_at


def test_the_route_is_the_last_attempts_with_the_count_of_all():
    told = request_state()
    told.attempts, told.route.decode = 3, "d1"
    assert told.final_route() == common_pb2.Route(decode="d1", attempts=3)
    assert told.route.attempts == 0
