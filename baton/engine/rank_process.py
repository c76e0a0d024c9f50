"""Starts, watches and ends the process of another rank; run as a module, it is that process.

    python -m baton.engine.rank_process DESCRIPTOR     a rank on the host of the first one
    python -m baton.worker.remote_rank DESCRIPTOR      a rank on another host

As a process of multiprocessing, a rank gets what it starts with from its parent, on standard input.
All else goes over a socketpair (DESCRIPTOR) to its parent, with which it ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator
from multiprocessing.connection import Connection
from typing import Any

from baton.engine.rank_executor import MESSAGES, Failed, RankWork, serve
from baton.engine.runner import RunnerFailed
from baton.errors import ConfigError
from baton.net.object_connection import Messages, ObjectConnection

log = logging.getLogger(__name__)
_STOP_S = 5.0


class RankProcess:
    """Another rank, as the process that started it or uses it sees it.

    process: None for a rank on another host.
    """

    def __init__(
        self,
        number: int,
        connection: ObjectConnection,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.number, self.connection, self.process = number, connection, process

    @classmethod
    def start(
        cls,
        module: str,
        number: int,
        argument: object,
        messages: Messages,
        descriptors: Collection[int] = (),
    ) -> RankProcess:
        """A process that runs `module`, which gets `argument` and inherits `descriptors`."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", module, str(theirs.fileno())]
            inherited = [theirs.fileno(), *descriptors]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=inherited)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # it ended at once
            Connection(os.dup(stdin.fileno()), readable=False).send(argument)
        return cls(number, ObjectConnection(ours, messages), process)

    def answer(self, timeout_s: float) -> Any:
        """The rank's next message. Raises ConfigError when it has failed, ended or says nothing."""
        try:
            if self.connection.poll(timeout_s):
                found = self.connection.recv()
                if not isinstance(found, Failed):
                    return found
                reason = found.reason
            else:
                reason = f"nothing came from it in {timeout_s:.0f} s"
        except (EOFError, OSError) as error:
            reason = self._status() if self.process else str(error)
        raise ConfigError(f"rank {self.number} cannot begin: {reason}")

    def expect(self, answer: object, timeout_s: float) -> None:
        """Waits for this answer. Raises ConfigError with what comes instead."""
        if (found := self.answer(timeout_s)) != answer:
            raise ConfigError(f"rank {self.number} cannot begin: {found}, not {answer}")

    def end(self) -> None:
        """Closes the connection; returns when the process has ended, which is killed if need be."""
        self.connection.close()
        if self.process is None:
            return
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _status(self) -> str:
        """Describes the end of a process whose connection is closed."""
        assert self.process is not None
        try:
            return f"it ended with status {self.process.wait(_STOP_S)}"
        except subprocess.TimeoutExpired:
            return "its connection ended, but it did not"


@contextlib.contextmanager
def rank_process(messages: Messages) -> Iterator[tuple[ObjectConnection, Any]]:
    """Within, this process is a rank's: (connection to its starter, what it starts with).

    Leaves quietly when a connection has ended, and with a log line when the rank failed.
    """
    connection = ObjectConnection(socket.socket(fileno=int(sys.argv[1])), messages)
    # A signal to the whole process group is for the first rank, which ends this one once drained.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        yield connection, Connection(os.dup(sys.stdin.fileno()), writable=False).recv()
    except (EOFError, OSError):
        log.debug("the first rank has ended")
    except RunnerFailed as error:
        log.error("%s", error)


def main() -> None:
    """A rank on the first one's host: serves until the first one ends."""
    with rank_process(MESSAGES) as (connection, work):
        assert isinstance(work, RankWork)
        logging.basicConfig(level=work.log_level, format=f"rank {work.shard.rank}: %(message)s")
        serve(connection, work)


if __name__ == "__main__":
    main()
