"""Runs a decode worker as a process."""

from __future__ import annotations

from baton.config import WorkerConfig
from baton.worker import process
from decode_worker.batch import Batch


def run(config: WorkerConfig) -> int:
    """Runs until drained; 0. Raises ConfigError when it cannot begin."""
    return process.run(config, Batch)
