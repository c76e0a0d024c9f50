"""A tiny checkpoint for every worker test here."""

from tests.unit.worker.fixtures import directory, store

__all__ = ["directory", "store"]
