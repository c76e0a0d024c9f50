"""LoRA adapters: one in memory; those in an engine's slots, and how many sequences use each."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from baton.errors import InvalidRequest, Overloaded, Unavailable

Update = tuple[Tensor, Tensor]
"""A `[sections, rank, in]` and B `[rank, out]` of one field, float32, B with its scale."""


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """A LoRA adapter in the host's memory.

    identity: hash of its files' content · rank: the largest of its matrices · updates: by layer and
    field of its weights.
    """

    identity: str
    rank: int
    updates: Mapping[tuple[int, str], Update]


@dataclass
class _Resident:
    """An adapter in a slot. unused: set while it is retired; done once no sequence uses it."""

    slot: int
    users: int = 0
    unused: Future[None] | None = field(default=None, repr=False)


class AdapterTable:
    """Assigns slots to adapters by their identity. Used by the engine thread only."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots))[::-1]
        self._slots = slots
        self._residents: dict[str, _Resident] = {}

    def add(self, identity: str) -> int:
        """A slot for a new adapter. Raises Overloaded when there is none."""
        assert identity not in self._residents, "an adapter has one slot"
        if not self._slots:
            raise InvalidRequest("there is no memory for adapters: start workers with --max-loras")
        if not self._free:
            raise Overloaded(
                f"all {self._slots} places for adapters are taken: unload one, or start workers "
                "with a larger --max-loras"
            )
        slot = self._free.pop()
        self._residents[identity] = _Resident(slot)
        return slot

    def acquire(self, identity: str) -> int:
        """The slot of an adapter that a sequence begins to use. Raises Unavailable."""
        resident = self._residents.get(identity)
        if resident is None or resident.unused is not None:
            raise Unavailable(f"this worker does not have the adapter {identity}")
        resident.users += 1
        return resident.slot

    def release(self, identity: str) -> None:
        """A sequence that used the adapter has ended."""
        resident = self._residents[identity]
        resident.users -= 1
        if not resident.users and resident.unused is not None:
            resident.unused.set_result(None)

    def retire(self, identity: str) -> Future[None]:
        """Gives the adapter to no further sequence; the future is done once none uses it."""
        resident = self._residents[identity]
        if resident.unused is None:
            resident.unused = Future()
            resident.unused.set_running_or_notify_cancel()  # from here on cancel() has no effect
            if not resident.users:
                resident.unused.set_result(None)
        return resident.unused

    def keep(self, identity: str) -> int:
        """Gives a retired adapter to sequences again; returns how many use it."""
        resident = self._residents[identity]
        resident.unused = None
        return resident.users

    def remove(self, identity: str) -> None:
        """Frees the slot of an adapter that no sequence uses."""
        resident = self._residents[identity]
        assert not resident.users, "running sequences keep their adapter"
        del self._residents[identity]
        self._free.append(resident.slot)
