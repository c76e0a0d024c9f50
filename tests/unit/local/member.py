"""A member of a local cluster without a model: `member.py ROLE ETCD CLUSTER PORT [OPTION]`.

A worker registers READY; a router serves grpc.health.v1. Options: "--fail" exits at once,
"--deaf" ignores SIGTERM.
"""

import asyncio
import os
import signal
import sys
import uuid

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.config import RegistryConfig
from baton.local.child import die_with_parent
from baton.registry.etcd import EtcdRegistry
from baton.v1 import common_pb2


async def work(role: str, config: RegistryConfig, stop: asyncio.Event) -> None:
    registry = EtcdRegistry(config)
    record = common_pb2.WorkerRecord(
        incarnation=uuid.uuid4().hex,
        role=common_pb2.WorkerRole.Value(f"WORKER_ROLE_{role.upper()}"),
        pid=os.getpid(),
        state=common_pb2.WORKER_STATE_READY,
    )
    async with registry.register(record):
        await stop.wait()
    await registry.close()


async def route(port: int, stop: asyncio.Event) -> None:
    server, servicer = grpc.aio.server(), health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    await stop.wait()
    await server.stop(0)


async def main() -> None:
    die_with_parent()
    role, etcd, cluster, port, *options = sys.argv[1:]
    if "--fail" in options:
        sys.exit("the checkpoint is broken")
    stop = asyncio.Event()
    on_term = (lambda: None) if "--deaf" in options else stop.set
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_term)
    print(f"{role} begins", flush=True)
    if role == "router":
        await route(int(port), stop)
    else:
        await work(role, RegistryConfig(etcd=etcd, cluster=cluster), stop)
    print(f"{role} ended by itself", flush=True)


asyncio.run(main())
