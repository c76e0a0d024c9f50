"""What the shared story of a call decides when endings cross each other."""

import pytest

from baton.client.call import GenerateCall, Target
from baton.errors import Cancelled, Unavailable
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
    call.received(delta("Hel", 1))
    with pytest.raises(Unavailable):
        call.failed(Unavailable("gone"))
    assert call.over
