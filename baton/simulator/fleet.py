"""The simulated workers, and what a router knows of them: the snapshots that placement reads."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping

from baton.registry.membership import ROLES
from baton.simulator.worker import SimulatedWorker, WorkerSpec
from baton.v1 import common_pb2, worker_pb2
from router.fleet.kv_index import AssignedPrompt, KvIndex
from router.fleet.snapshot import READY, Snapshot, WorkerView

_ROLE_NUMBERS = {name: role for role, name in ROLES.items()}


class _Member:
    """A worker as the router sees it."""

    def __init__(self, worker: SimulatedWorker, role: str, slot: int) -> None:
        self.worker, self.slot = worker, slot
        self.assigned: dict[str, AssignedPrompt] = {}
        self.num_requests = 0
        self.reported: worker_pb2.Load | None = None  # None: since then it has changed
        self.role = role

    @property
    def role(self) -> str:
        return self._role

    @role.setter
    def role(self, role: str) -> None:
        self._role, spec = role, self.worker.spec
        # Its KV has the bytes that it has to send, in a layer of one head with two elements.
        kv = common_pb2.KvDescriptor(
            dtype="bfloat16",
            num_layers=1,
            parts=2,
            num_kv_heads=1,
            head_size=spec.token_bytes // 4,
            block_size=spec.block_size,
        )
        self.record = common_pb2.WorkerRecord(
            incarnation=self.worker.name,
            role=_ROLE_NUMBERS[role],
            host_id="simulated",
            state=common_pb2.WORKER_STATE_READY,
            kv=kv,
            blocks_total=spec.num_blocks,
            max_context=spec.max_context,
            max_batch=spec.max_batch,
        )

    @property
    def view(self) -> WorkerView:
        load = self.reported
        if load is None or load.prefill_share != self.worker.prefill_share:
            load = self.reported = self.worker.load()
        return WorkerView(
            self.record,
            load,
            READY,
            "",
            tuple(self.assigned.values()),
            self.num_requests,
            self.slot,
        )


class SimulatedFleet:
    """Workers by name, each of which may have any role at any time."""

    def __init__(
        self,
        spec: WorkerSpec,
        roles: Mapping[str, int],
        on_gap: Callable[[float, int], None],
    ) -> None:
        """`roles`: number of workers by role. Needs the running loop."""
        self.members: dict[str, _Member] = {}
        self.spec, self._on_gap = spec, on_gap
        self._index = KvIndex()
        self._seen: Snapshot | None = None
        self._touched: set[str] = set()
        self.listeners: list[Callable[[], None]] = []  # called at each change
        self._names = itertools.count()
        for role, count in roles.items():
            for _ in range(count):
                self.add(role)

    def add(self, role: str) -> str:
        """A new worker that is ready at once; returns its name."""
        name = f"worker-{next(self._names)}"
        worker = SimulatedWorker(name, self.spec, lambda: self._touch(name), self._on_gap)
        self.members[name] = _Member(worker, role, self._index.join())
        self._seen = None
        self.announce()
        return name

    def set_role(self, name: str, role: str) -> None:
        """Changes a worker's role; what it runs goes on."""
        self.members[name].role = role
        self._seen = None
        self.announce()

    @property
    def roles(self) -> Counter[str]:
        return Counter(member.role for member in self.members.values())

    def announce(self) -> None:
        for listener in self.listeners:
            listener()

    def views(self) -> list[WorkerView]:
        """All workers as they are now, by name."""
        return [self.members[name].view for name in sorted(self.members)]

    def snapshot(self) -> Snapshot:
        if self._seen is None:
            self._touched.clear()
            self._seen = Snapshot(tuple(self.views()), {}, self._index, decode_alone=True)
        elif self._touched:
            views = [self.members[name].view for name in self._touched]
            self._touched.clear()
            self._seen = self._seen.replaced(views)
        return self._seen

    def assign(self, name: str, request: str, prompt: AssignedPrompt) -> None:
        """Counts a prompt against a worker until `unassign`."""
        member = self.members[name]
        member.assigned[request] = prompt
        self._index.begin(request, member.slot, prompt)
        self._touched.add(name)

    def unassign(self, name: str, request: str) -> None:
        if prompt := self.members[name].assigned.pop(request, None):
            self._index.end(request, prompt)
        self._touched.add(name)

    def count_request(self, name: str, change: int) -> None:
        """Counts a request that a worker has, or has no longer."""
        self.members[name].num_requests += change
        self._touched.add(name)

    def _touch(self, name: str) -> None:
        member = self.members[name]
        member.reported = None
        changes = member.worker.blocks.take_changes()
        if changes.stored or changes.evicted:
            self._index.take(member.slot, list(changes.stored), list(changes.evicted))
        self._touched.add(name)
        self.announce()
