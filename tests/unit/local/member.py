"""A member of a local cluster without a model, started with the arguments of the real one.

A worker registers READY; a router serves and lists who has registered. Further options: "--fail"
exits at once, "--deaf" ignores SIGTERM, "--hasty" exits with 3 on SIGTERM.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator

import grpc

from baton.config import RegistryConfig
from baton.local.child import die_with_parent
from baton.registry.etcd import EtcdRegistry
from baton.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc


class Fleet(fleet_pb2_grpc.FleetServiceServicer):
    def __init__(self, membership):
        self.membership = membership

    async def GetStatus(self, request, context):
        records = self.membership.records.values()
        workers = [fleet_pb2.WorkerStatus(record=record, state="READY") for record in records]
        router = fleet_pb2.RouterStatus(state="SERVING")
        return fleet_pb2.GetStatusResponse(router=router, workers=workers)


@contextlib.asynccontextmanager
async def routing(registry: EtcdRegistry, port: int) -> AsyncIterator[None]:
    server = grpc.aio.server()
    async with registry.watch() as membership:
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(Fleet(membership), server)
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        yield
        await server.stop(0)


async def main() -> None:
    die_with_parent()
    role = sys.argv[1].removesuffix("-worker")
    settings = json.loads(sys.argv[sys.argv.index("--config") + 1])
    if "--fail" in sys.argv:
        sys.exit("the checkpoint is broken")
    stop = asyncio.Event()
    on_term = (lambda: None) if "--deaf" in sys.argv else stop.set
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_term)
    print(f"{role} begins", flush=True)
    config = RegistryConfig(etcd=settings["etcd"], cluster=settings.get("cluster", "default"))
    registry = EtcdRegistry(config)
    if role == "router":
        member = routing(registry, settings["port"])
    else:
        record = common_pb2.WorkerRecord(
            incarnation=uuid.uuid4().hex,
            role=common_pb2.WorkerRole.Value(f"WORKER_ROLE_{role.upper()}"),
            pid=os.getpid(),
            state=common_pb2.WORKER_STATE_READY,
        )
        member = registry.register(record)
    async with member:
        await stop.wait()
    await registry.close()
    print(f"{role} ended by itself", flush=True)
    sys.exit(3 if "--hasty" in sys.argv else 0)


asyncio.run(main())
