"""What the shared story of a call decides when endings cross each other."""

import pytest

from baton.client.call import GenerateCall, Target
from baton.errors import Cancelled, InternalError, Unavailable
from baton.v1 import inference_pb2
from tests.unit.client.scripted_router import delta, finish, started


@pytest.fixture
def call():
    target = Target.of("127.0.0.1:1", None, None, None)
    return GenerateCall(target, inference_pb2.GenerateRequest(text="x"), None)


def test_a_closed_call_does_not_report_its_own_cancellation(call):
    call.received(delta("Hel", 1))
    call.close()
    assert call.failed(Cancelled("by the caller")) is None


def test_a_failure_after_the_last_message_changes_nothing(call):
    for message in (started(), delta("Hel", 1), finish()):
        call.received(message)
    assert call.failed(Unavailable("the router left")) is None
    assert call.over
    assert call.completion.text == "Hel"


def test_a_failure_before_output_is_worth_another_attempt(call):
    call.received(started())
    assert call.failed(Unavailable("gone")) > 0
    assert not call.over


def test_a_final_failure_ends_the_call(call):
    call.received(started())
    call.received(delta("Hel", 1))
    with pytest.raises(InternalError):
        call.failed(InternalError("a bug"))
    assert call.over


def test_the_next_attempt_goes_on_behind_what_has_come(call):
    call.received(started())
    call.received(delta("Hel", 1, 2))
    assert call.failed(Unavailable("gone")) > 0
    assert list(call.request.resumed_token_ids) == [1, 2]
    call.received(started(resumed_tokens=2))
    call.received(delta("lo", 3))
    call.received(finish())
    assert call.failed(Unavailable("the router left")) is None
    assert call.completion.token_ids == (1, 2, 3)


@pytest.mark.parametrize(("temperature", "seeded"), [(0.0, False), (0.7, True)])
def test_what_is_drawn_at_random_is_repeatable(temperature, seeded):
    request = inference_pb2.GenerateRequest(text="x")
    request.sampling.temperature = temperature
    call = GenerateCall(Target.of("127.0.0.1:1", None, None, None), request, None)
    assert call.request.sampling.HasField("seed") is seeded
