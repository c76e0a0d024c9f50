"""Takes workers and pairs that keep failing out of a snapshot, but never all of them."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

from router.fleet.circuit_breaker import HealthBook, Key
from router.fleet.snapshot import EJECTED, Snapshot, WorkerView


def without_failing(snapshot: Snapshot, health: HealthBook) -> Snapshot:
    """The snapshot with EJECTED workers and shut pairs as the health book tells.

    If that would leave no pair, the one that failed longest ago is used: a bad patch of the last
    pair must not make a dead cluster.
    """
    shut = health.shut()
    if not shut:
        return snapshot
    spared = _last_resort(snapshot, shut, health)
    shut = {key: why for key, why in shut.items() if key not in spared}
    pairs = {key: why for key, why in shut.items() if isinstance(key, tuple)}
    return Snapshot(
        prefill=tuple(_judged(worker, shut) for worker in snapshot.prefill),
        decode=tuple(_judged(worker, shut) for worker in snapshot.decode),
        shut_pairs={**pairs, **snapshot.shut_pairs},
    )


def _last_resort(snapshot: Snapshot, shut: Mapping[Key, str], health: HealthBook) -> Set[Key]:
    """The keys of the pair to use although it fails; none while another pair is left."""
    pairs = [_keys(*pair) for pair in snapshot.usable_pairs()]
    if not pairs or any(keys.isdisjoint(shut) for keys in pairs):
        return frozenset()
    return min(pairs, key=lambda keys: max(health.failed_at(key) for key in keys))


def _keys(prefill: WorkerView, decode: WorkerView) -> Set[Key]:
    names = prefill.incarnation, decode.incarnation
    return frozenset({*names, names})


def _judged(worker: WorkerView, shut: Mapping[Key, str]) -> WorkerView:
    why = shut.get(worker.incarnation)
    return replace(worker, state=EJECTED, reason=why) if why and worker.ready else worker
