"""Values over sockets: whole, in order, and only between ends that know the secret."""

import socket
import ssl
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest

from baton.local import certs
from baton.net import object_connection
from baton.net.object_connection import ObjectConnection
from baton.net.tls import Credentials
from baton.rendezvous import listening_socket

SECRET = b"of this worker"


@dataclass(frozen=True)
class Step:
    arrays: list
    count: int
    note: dict | None = None


@dataclass(frozen=True)
class Other:
    pass


@pytest.fixture(params=["plain", "TLS"])
def contexts(request, tmp_path):
    """Of the one that is called, and of the caller."""
    if request.param == "plain":
        return None, None
    certs.write(tmp_path, [])
    pair = (tmp_path / "worker.pem", tmp_path / "worker-key.pem")
    credentials = Credentials(*pair, client_ca_file=tmp_path / "ca.pem")
    return credentials.context(), credentials.client_context()


def both(contexts, caller_secret=SECRET):
    """What each end gets: a connection, or why not."""
    listening = listening_socket("127.0.0.1")
    port = listening.getsockname()[1]
    name = "worker.baton" if contexts[1] else ""

    def call():
        return object_connection.connect(
            "127.0.0.1", port, caller_secret, contexts[1], name, (Step,)
        )

    def answer():
        return object_connection.accepted(listening.accept()[0], SECRET, contexts[0], (Step,))

    with listening, ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(call), threads.submit(answer)]
    return [end.exception() or end.result() for end in ends]


def test_messages_arrive_whole_and_in_order(contexts):
    caller, called = both(contexts)
    arrays = [np.arange(1 << 20, dtype=np.int32).reshape(2, -1), np.zeros((0, 3), np.int32)]
    messages = [Step([], 1), Step(arrays, 7), Step([], 2, {"b": None})]
    sender = threading.Thread(target=lambda: [caller.send(one) for one in messages])
    sender.start()
    assert called.recv() == messages[0]
    found = called.recv()
    assert found.count == 7
    for array, sent in zip(found.arrays, arrays, strict=True):
        assert array.shape == sent.shape and np.array_equal(array, sent) and array.flags.writeable
    assert called.recv() == messages[2]
    sender.join()
    assert not called.poll(0.0)
    caller.end_sending()
    assert called.poll(5.0)
    called.send(Step([], 3))
    with pytest.raises((EOFError, OSError)):
        called.recv()
    assert caller.recv() == Step([], 3), "the other way still works"
    called.close()
    with pytest.raises((EOFError, OSError)):
        caller.recv()
    caller.close()


def test_only_messages_of_the_table_pass():
    ours, theirs = socket.socketpair()
    few = ObjectConnection(ours, (Step,))
    for message, reason in (
        (Other(), "Other is no message of this connection"),
        (Step([b"1"], 0), "bytes cannot be sent"),
        (Step([np.zeros(1)], 0), "ndarray cannot be sent"),
    ):
        with pytest.raises(TypeError, match=reason):
            few.send(message)
    for text in (
        '["Other"]', '["Step"]', "7", "nonsense", '["__class__", 1]',
        '["Step", {"int32": [1099511627776]}, 1]',
    ):  # fmt: skip
        theirs.sendall(struct.pack(">IQ", len(text), 0) + text.encode())
        with pytest.raises(ConnectionError, match="not a message of this connection"):
            few.recv()
    ours.close()
    theirs.close()


def test_who_does_not_know_the_secret_is_refused(contexts):
    caller, called = both(contexts, b"a guess")
    assert isinstance(called, ConnectionRefusedError)
    assert isinstance(caller, (ConnectionError, EOFError, ssl.SSLError))


def test_a_caller_that_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(object_connection, "_PROOF_S", 0.1)
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(TimeoutError):
        object_connection.accepted(ours, SECRET, None, ())
    assert ours.fileno() == -1, "it is closed"
