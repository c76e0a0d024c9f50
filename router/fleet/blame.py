"""Whom a failed attempt speaks against: one of its workers, or the two of them together."""

from __future__ import annotations

from collections.abc import Set

from baton.errors import BatonError, DeadlineExceeded, KvMismatch, Overloaded, TransferFailed
from router.fleet.circuit_breaker import HealthBook
from router.placement.placement import Choice

_BETWEEN = (TransferFailed, KvMismatch)  # each of the two may be fine with others
_OF_THE_REQUEST = (DeadlineExceeded, Overloaded)


def suspects(choice: Choice, suspected: Set[str], error: BatonError) -> Set[str]:
    """The workers that the request avoids from now on; nobody suspected is the decode worker."""
    if isinstance(error, _BETWEEN):
        return frozenset(choice.names)
    return suspected or {choice.decode.incarnation}


def tell(health: HealthBook, choice: Choice, blamed: Set[str], error: BatonError) -> None:
    """Notes the failure against a worker, or against the pair where both are blamed."""
    if isinstance(error, _OF_THE_REQUEST):
        return
    if len(blamed) > 1:
        health.failed(choice.names, str(error))
        return
    for name in blamed:
        health.failed(name, str(error))
