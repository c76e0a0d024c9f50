"""Runs a prefill worker as a process."""

from __future__ import annotations

from baton.config import WorkerConfig
from baton.worker import process
from prefill_worker.prefills import Prefills


def run(config: WorkerConfig) -> int:
    """Runs until drained; 0. Raises ConfigError when it cannot begin."""
    return process.run(config, Prefills)
