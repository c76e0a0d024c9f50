"""A tiny checkpoint and a decode worker for every worker test here."""

from tests.unit.worker.running import decode, directory, router, store

__all__ = ["decode", "directory", "router", "store"]
