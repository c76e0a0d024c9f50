"""For every test: kernels are interpreted, whichever module imports triton first."""

from __future__ import annotations

import os
import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of a job in a script's background
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # what tests start would ignore it, too
if "PYTEST_XDIST_WORKER" in os.environ:  # as many workers as cores: one thread each
    os.environ["OMP_NUM_THREADS"] = "1"

import tests.interpreted  # noqa: F401
