"""A registry in this process, for tests of what registers or watches: no leases, no waiting."""

import contextlib
import copy
import secrets

from baton.errors import Unavailable
from baton.registry.membership import Membership, copy_for_update, key_of


class MemoryRegistry:
    """What `EtcdRegistry` does while nothing is lost; `stop` and `start` play an outage."""

    def __init__(self):
        self.entries = {}
        self._ticket_key = secrets.token_bytes(32)
        self.missing = set()
        self._up = True
        self._registrations = []
        self._watches = []

    def stop(self):
        self._up = False
        self._settle()

    def start(self):
        self._up = True
        self._settle()

    def put(self, record):
        """Writes a record as another process would."""
        self.entries[record.incarnation] = copy.deepcopy(record)
        self._settle()

    def lose(self, incarnation):
        """Ends the lease of a record, which its worker may yet write again with `find`."""
        self.missing.add(incarnation)
        self._settle()

    def find(self, incarnation):
        self.missing.discard(incarnation)
        self._settle()

    def drop(self, incarnation):
        """Removes a record."""
        del self.entries[incarnation]
        self._settle()

    @contextlib.asynccontextmanager
    async def register(self, record):
        self._require()
        key_of("", record)
        registration = MemoryRegistration(self, record)
        self._registrations.append(registration)
        self._settle()
        try:
            yield registration
        finally:
            self._registrations.remove(registration)
            self.entries.pop(record.incarnation, None)
            self._settle()

    @contextlib.asynccontextmanager
    async def watch(self):
        self._require()
        self._watches.append(membership := Membership())
        self._settle()
        try:
            yield membership
        finally:
            self._watches.remove(membership)
            membership.close()

    async def ticket_key(self):
        self._require()
        return self._ticket_key

    async def close(self):
        pass

    def _require(self):
        if not self._up:
            raise Unavailable("the registry in memory cannot be reached: it was stopped")

    def _settle(self):
        """Does at once what retries and streams do in time: everyone writes, everyone reads."""
        for registration in self._registrations:
            registration.connected = self._up
            if self._up:
                self.entries[registration.record.incarnation] = registration.record
        for one in self._watches:
            records = self.entries if self._up else one.records
            one.publish(records, connected=self._up, missing=self.missing & records.keys())


class MemoryRegistration:
    def __init__(self, registry, record):
        self._registry, self.record, self.connected = registry, copy.deepcopy(record), True

    async def update(self, record):
        self.record = copy_for_update(self.record, record)
        self._registry._settle()
