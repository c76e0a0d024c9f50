"""Objects over sockets: whole, in order, and only between ends that know the secret."""

import pickle
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton import object_connection
from baton.local import certs
from baton.object_connection import ObjectConnection
from baton.rendezvous import listening_socket
from baton.tls import Credentials

SECRET = b"of this worker"


@pytest.fixture(params=["plain", "TLS"])
def contexts(request, tmp_path):
    """Of the one that is called, and of the caller."""
    if request.param == "plain":
        return None, None
    certs.write(tmp_path, [])
    pair = (tmp_path / "decode.pem", tmp_path / "decode-key.pem")
    credentials = Credentials(*pair, client_ca_file=tmp_path / "ca.pem")
    return credentials.context(), credentials.client_context()


def both(contexts, caller_secret=SECRET):
    """What each end gets: a connection, or why not."""
    listening = listening_socket("127.0.0.1")
    port = listening.getsockname()[1]
    name = "decode.baton" if contexts[1] else ""

    def call():
        return object_connection.connect("127.0.0.1", port, caller_secret, contexts[1], name)

    def answer():
        return object_connection.accepted(listening.accept()[0], SECRET, contexts[0])

    with listening, ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(call), threads.submit(answer)]
    return [end.exception() or end.result() for end in ends]


def test_objects_arrive_whole_and_in_order(contexts):
    caller, called = both(contexts)
    large = bytes(3 << 20)
    sender = threading.Thread(target=lambda: [caller.send(one) for one in ("a", large, {"b": 1})])
    sender.start()
    assert [called.recv() for _ in range(3)] == ["a", large, {"b": 1}]
    sender.join()
    assert not called.poll(0.0)
    caller.end_sending()
    assert called.poll(5.0)
    called.send("the other way still works")
    with pytest.raises((EOFError, OSError)):
        called.recv()
    assert caller.recv() == "the other way still works"
    called.close()
    with pytest.raises((EOFError, OSError)):
        caller.recv()
    caller.close()


def test_who_does_not_know_the_secret_is_refused_before_any_object(contexts, monkeypatch):
    monkeypatch.setattr(pickle, "loads", lambda data: pytest.fail("a stranger's object"))
    caller, called = both(contexts, b"a guess")
    assert isinstance(called, ConnectionRefusedError)
    assert isinstance(caller, (ConnectionError, EOFError, ssl.SSLError))


def test_a_caller_that_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(object_connection, "_PROOF_S", 0.1)
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(TimeoutError):
        object_connection.accepted(ours, SECRET, None)
    assert ours.fileno() == -1, "it is closed"


def test_what_the_other_end_does_not_take_is_given_up():
    ours, theirs = (ObjectConnection(end) for end in socket.socketpair())
    ours.limit_sending(1)
    with pytest.raises(OSError, match="temporarily unavailable"):
        ours.send(bytes(8 << 20))
    ours.close()
    theirs.close()
