"""A member of a local cluster without a model, started with the arguments of the real one.

A worker registers READY, a router shows its parent who has registered. Further options: "--fail"
exits at once, "--late" does not register, "--deaf" ignores SIGTERM, "--hasty" exits with 3 on
SIGTERM.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import uuid

from baton.config import RegistryConfig, host_id
from baton.local.child import die_with_parent
from baton.registry.etcd_registry import EtcdRegistry
from baton.v1 import common_pb2, fleet_pb2
from router.shared_state import SharedState


@contextlib.asynccontextmanager
async def routing(registry):
    """Shows its parent all members as READY."""
    path, number = (sys.argv[sys.argv.index(name) + 1] for name in ("--process-of", "--process"))
    shared = SharedState(path, 1, int(number))

    async def show():
        async for records in membership.changes():
            workers = [fleet_pb2.WorkerStatus(record=r, state="READY") for r in records.values()]
            router = fleet_pb2.RouterStatus(state="SERVING")
            shared.publish(fleet_pb2.GetStatusResponse(router=router, workers=workers))

    async with registry.watch() as membership:
        showing = asyncio.create_task(show())
        yield
        showing.cancel()


async def main():
    die_with_parent()
    settings = json.loads(sys.argv[sys.argv.index("--config") + 1])
    role = settings["role"] if sys.argv[1] == "worker" else sys.argv[1]
    if "--fail" in sys.argv:
        sys.exit("the checkpoint is broken")
    stop = asyncio.Event()
    on_term = (lambda: None) if "--deaf" in sys.argv else stop.set
    for number in (signal.SIGTERM, signal.SIGUSR1):
        asyncio.get_running_loop().add_signal_handler(number, on_term)
    print(f"{role} begins", flush=True)
    config = RegistryConfig(etcd=settings["etcd"], cluster=settings.get("cluster", "default"))
    registry = EtcdRegistry(config)
    if "--late" in sys.argv:
        member = contextlib.nullcontext()
    elif role == "router":
        member = routing(registry)
    else:
        record = common_pb2.WorkerRecord(
            incarnation=uuid.uuid4().hex,
            role=common_pb2.WorkerRole.Value(f"WORKER_ROLE_{role.upper()}"),
            pid=os.getpid(),
            host_id=host_id(),
            state=common_pb2.WORKER_STATE_READY,
        )
        member = registry.register(record)
    async with member:
        await stop.wait()
    await registry.close()
    print(f"{role} ended by itself", flush=True)
    sys.exit(3 if "--hasty" in sys.argv else 0)


asyncio.run(main())
