"""Messages in frames, and errors as messages."""

from types import SimpleNamespace

import pytest

from baton import errors
from baton.net.connection import MessageConnection, error_of, failure_of, framed
from baton.v1.dispatch_pb2 import Failure, RouterMessage


class Taking(MessageConnection):
    """Keeps what comes."""

    received = sent = RouterMessage

    def __init__(self):
        super().__init__()
        self.taken, self.is_closing = [], False
        self.transport = SimpleNamespace(is_closing=lambda: self.is_closing, abort=lambda: None)

    def take(self, message):
        self.taken.append(message)


@pytest.mark.parametrize("size", [1, 3, 4, 7, 1000])
async def test_messages_come_whole_however_their_bytes_are_cut(size):
    messages = [RouterMessage(cancel=["h" * n]) if n else RouterMessage() for n in (0, 9, 300, 0)]
    data, connection = b"".join(map(framed, messages)), Taking()
    for at in range(0, len(data), size):
        connection.data_received(data[at : at + size])
    assert connection.taken == messages
    assert not connection._buffer


async def test_nothing_is_taken_once_this_end_is_closing():
    connection = Taking()
    connection.is_closing = True  # as after a refusal
    connection.data_received(framed(RouterMessage(cancel=["h"])))
    assert connection.taken == []


async def test_a_bug_ends_the_connection_with_an_error_of_its_own():
    connection = Taking()
    connection.taken = None
    connection.data_received(framed(RouterMessage()))
    with pytest.raises(errors.InternalError, match="AttributeError"):
        await connection.closed


def test_errors_keep_their_kind_advice_and_field():
    for name, cls in vars(errors).items():
        if isinstance(cls, type) and issubclass(cls, errors.BatonError):
            failure = Failure.FromString(failure_of(cls("why"), "h").SerializeToString())
            assert (failure.handoff_id, failure.error, type(error_of(failure))) == ("h", name, cls)
            assert str(error_of(failure)) == "why"
    assert error_of(failure_of(errors.Overloaded("full", 2.5))).retry_after_s == 2.5
    assert error_of(failure_of(errors.InvalidRequest("bad", "sequence"))).field == "sequence"
    assert str(error_of(failure_of(errors.InvalidRequest("\ud800")))) == "?"
    of_a_newer_version = Failure(error="NewKind", text="why")
    assert type(error_of(of_a_newer_version)) is errors.InternalError
    unexpected = error_of(failure_of(ValueError("x")))
    assert type(unexpected) is errors.InternalError and "ValueError" in str(unexpected)
