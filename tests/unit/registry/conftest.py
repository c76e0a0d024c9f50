"""A real etcd, and registries over it that are closed."""

import asyncio
import contextlib

import pytest

from baton.local.etcd import EmbeddedEtcd
from baton.registry.etcd import EtcdRegistry
from baton.v1.common_pb2 import WorkerRecord, WorkerRole, WorkerState

RECORD = WorkerRecord(
    incarnation="d1",
    role=WorkerRole.WORKER_ROLE_DECODE,
    address="127.0.0.1:7001",
    state=WorkerState.WORKER_STATE_READY,
)


@pytest.fixture
async def etcd():
    async with EmbeddedEtcd(args=["--bcrypt-cost", "4"]) as etcd:
        yield etcd


@contextlib.asynccontextmanager
async def opened(config):
    registry = EtcdRegistry(config)
    try:
        yield registry
    finally:
        await registry.close()


async def until(membership, holds):
    async with asyncio.timeout(12), contextlib.aclosing(membership.changes()) as changes:
        async for snapshot in changes:
            if holds(snapshot):
                return


def record(name, pid=0):
    return WorkerRecord(incarnation=name, pid=pid)
