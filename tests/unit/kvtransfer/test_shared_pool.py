"""Who is given a receiver's memory, in what time, and what is left of it in /dev/shm."""

import contextlib
import gc
import json
import mmap
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.errors import TransferFailed
from kvtransfer import shared_pool
from kvtransfer.shared_pool import SharedPoolListener, received
from tests.namespaces import OWN_PIDS_AND_NETWORK, needs_namespaces
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[3]
UNIX_SOCKETS = Path("/proc/self/net/unix")
# A receiver in a process of its own: prints its endpoint, and whose memory it gave when it did.
RECEIVER = """
import os, sys
from pathlib import Path
from kvtransfer import shared_pool
shared_pool.SHARED_FOLDER = Path(sys.argv[1])
memory = os.memfd_create("memory")
os.write(memory, b"theirs")
listener = shared_pool.SharedPoolListener("test", memory, {"pid": os.getpid()})
print(listener.endpoint.decode(), flush=True)
if sys.argv[2:] != ["waits"]:
    listener.accept(300.0)
    print(os.fstat(listener.sender_pidfd()).st_ino, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    """The test's own. Descriptors are what they were before, and no file is left."""
    with tempfile.TemporaryDirectory() as folder:  # a socket's path is short
        monkeypatch.setattr(shared_pool, "SHARED_FOLDER", Path(folder))
        gc.collect()
        before = open_files()
        yield
        gc.collect()
        assert not open_files() - before, "new ones; what other tests left may be closed"
        assert not sockets()


@pytest.fixture
def memory():
    fd = os.memfd_create("memory", os.MFD_CLOEXEC)
    os.write(fd, b"ours")
    yield fd
    os.close(fd)


def open_files():
    """Descriptors of processes, shared memory and Unix sockets: other tests' TCP connections may
    still be closing."""
    unix = {f"socket:[{line.split()[6]}]" for line in UNIX_SOCKETS.read_text().splitlines()[1:]}
    found = Counter[str]()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it listed the folder, or has been closed
            target = str(descriptor.readlink())
            if target in unix or target.startswith(("/memfd:", "anon_inode:[pidfd]", "pidfd:")):
                found[target] += 1
    return found


def sockets():
    return list(shared_pool.SHARED_FOLDER.iterdir())


def content(fd):
    with mmap.mmap(fd, os.fstat(fd).st_size) as mapped:
        return bytes(mapped)


@contextmanager
def accepting(memory, timeout_s=WAIT_S):
    """A listener that waits for its sender, and what comes of that."""
    listener = SharedPoolListener("test", memory, {"blocks": 3})
    with ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(listener.accept, timeout_s)
        try:
            yield listener, accepted
        finally:
            listener.abort()
            accepted.exception()
            listener.close()


def no_such_receiver(endpoint, why, timeout_s=WAIT_S):
    with (
        pytest.raises(TransferFailed, match=f"test: no such receiver: {why}"),
        received("test", endpoint, timeout_s),
    ):
        pass


@contextmanager
def running(*argv, first=()):
    command = [*first, sys.executable, "-c", RECEIVER, str(shared_pool.SHARED_FOLDER), *argv]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            yield process, process.stdout.readline().encode()
        finally:
            process.kill()


def test_a_sender_is_given_the_memory_and_each_end_sees_the_others_process(memory):
    with accepting(memory) as (listener, accepted):
        (path,) = sockets()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with received("test", listener.endpoint, WAIT_S) as (place, fd, receiver):
            assert (place["blocks"], content(fd)) == (3, b"ours")
            assert not os.get_inheritable(fd) and not os.get_inheritable(receiver._pidfd)
            receiver.check()
        accepted.result(WAIT_S)
        assert not sockets(), "it is for one link"
        assert not os.get_inheritable(listener.sender_pidfd())
        receiver.close()
        no_such_receiver(listener.endpoint, "")


@pytest.mark.parametrize(
    "first", [(), pytest.param(OWN_PIDS_AND_NETWORK, marks=needs_namespaces)], ids=["same", "other"]
)
def test_a_process_in_other_namespaces_is_given_it_and_its_end_is_seen(first):
    """Where pids mean nothing to each other, and no network is shared."""
    with (
        running(first=first) as (process, endpoint),
        received("test", endpoint, WAIT_S) as (place, fd, receiver),
    ):
        assert (place["pid"] == 1) == bool(first)
        assert content(fd) == b"theirs"
        receiver.check()
        own = os.pidfd_open(os.getpid())
        assert int(process.stdout.readline()) == os.fstat(own).st_ino
        os.close(own)
        process.kill()
        deadline = time.monotonic() + WAIT_S
        with pytest.raises(TransferFailed, match="the receiver is gone"):
            while time.monotonic() < deadline:
                receiver.check()
                time.sleep(0.005)
        assert content(fd) == b"theirs"  # as long as it is held
        receiver.close()


def test_who_does_not_know_the_secret_or_is_another_user_gets_nothing(memory, monkeypatch):
    with accepting(memory) as (listener, accepted):
        (path,) = sockets()

        def ask(sent, descriptors):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(str(path))
                socket.send_fds(stranger, [sent], descriptors)
                return socket.recv_fds(stranger, 1, 2)[:2]

        secret = bytes.fromhex(json.loads(listener.endpoint)["secret"])
        for sent in (b"", b"\0" * 32, secret[:-1], secret + b"\0"):
            assert ask(sent, [memory]) == (b"", [])
        assert ask(secret, []) == (b"", []), "it cannot be watched"
        with monkeypatch.context() as patch:
            patch.setattr(shared_pool.os, "geteuid", lambda: os.getuid() + 1)
            assert ask(secret, [memory]) == (b"", [])
            no_such_receiver(listener.endpoint, "it belongs to another user")
        with received("test", listener.endpoint, WAIT_S) as (_, fd, receiver):
            assert content(fd) == b"ours"
        receiver.close()
        accepted.result(WAIT_S)


def test_one_that_only_connects_holds_nobody_up_for_long(memory, monkeypatch):
    monkeypatch.setattr(shared_pool, "_HELLO_S", 0.5)
    with accepting(memory) as (listener, accepted):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
            silent.connect(str(sockets()[0]))
            with received("test", listener.endpoint, WAIT_S) as (_, _, receiver):
                receiver.close()
        accepted.result(WAIT_S)


@pytest.mark.parametrize(
    "endpoint",
    [b"", b"[]", b"3", b"{}", b"\xff", b'{"secret": 7}', b'{"secret": "x"}', b'{"secret": "00"}'],
)
def test_what_is_no_endpoint_is_no_receiver(endpoint):
    no_such_receiver(endpoint, "")


@pytest.mark.parametrize("error", [OSError, ValueError, RuntimeError, KeyError])
def test_memory_that_cannot_be_used_is_given_back_with_its_process(memory, error):
    with (
        accepting(memory) as (listener, _),
        pytest.raises(TransferFailed, match=r"test: cannot open the receiver's memory: .*why"),
        received("test", listener.endpoint, WAIT_S),
    ):
        raise error("why")


def test_waits_end_in_time_and_with_an_abort(memory):
    began = time.monotonic()
    listener = SharedPoolListener("test", memory, {})
    with pytest.raises(TransferFailed, match="test: the sender did not come: timed out"):
        listener.accept(0.1)
    with accepting(memory, WAIT_S) as (_, accepted):
        pass
    with pytest.raises(TransferFailed, match="test: the link was aborted"):
        accepted.result()
    listener = SharedPoolListener("test", memory, {})  # it accepts nobody: its process hangs
    no_such_receiver(listener.endpoint, "timed out", 0.1)
    listener.close()
    listener.close()
    assert time.monotonic() - began < WAIT_S


def test_what_a_killed_receiver_leaves_is_removed_by_the_next(memory):
    with running("waits") as (process, endpoint):
        (path,) = sockets()
        live = SharedPoolListener("test", memory, {})
        process.send_signal(signal.SIGKILL)
        process.wait()
    no_such_receiver(endpoint, ".*refused")
    for left in sockets():  # as if they were there for long
        os.utime(left, (1, 1))
    SharedPoolListener("test", memory, {}).close()
    assert path not in sockets() and live._path in sockets()
    live.close()


def test_a_socket_that_is_being_made_is_no_abandoned_one(memory):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as bound:
        path = shared_pool.SHARED_FOLDER / "baton-link-bound"
        bound.bind(str(path))
        SharedPoolListener("test", memory, {}).close()
        assert path.exists()
        path.unlink()


def test_many_links_leave_no_thread_and_no_descriptor(memory):
    before = threading.active_count()
    for _ in range(50):
        with (
            accepting(memory) as (listener, _),
            received("test", listener.endpoint, WAIT_S) as (_, _, receiver),
        ):
            receiver.close()
    assert threading.active_count() == before
