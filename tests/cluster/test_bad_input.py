"""Malformed requests are refused before any work, with the exact status and field."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton import rpc
from baton.client import AsyncClient, RetryPolicy
from baton.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, Unavailable
from baton.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.cluster.conftest import ClusterFactory
from tests.cluster.oracle import Oracle, all_blocks_free
from tests.waiting import eventually

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("no input", {}, "input"),
    ("empty ids", {"token_ids": {"ids": []}}, "input"),
    ("no messages", {"chat": {}}, "chat"),
    ("unknown token", {"token_ids": {"ids": [5, 4_000_000]}}, "token_ids"),
    ("too long", {"token_ids": {"ids": [5] * 2048}}, "input"),
    ("temperature", {"text": "a", "sampling": {"temperature": -1}}, "sampling.temperature"),
    ("top_p", {"text": "a", "sampling": {"top_p": 1.5}}, "sampling.top_p"),
    ("max_tokens", {"text": "a", "sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
    ("min_tokens", {"text": "a", "sampling": {"min_tokens": 99}}, "sampling.min_tokens"),
    ("logprobs", {"text": "a", "sampling": {"logprobs": 1000}}, "sampling.logprobs"),
    ("not a number", {"text": "a", "sampling": {"temperature": float("nan")}},
     "sampling.temperature"),
    ("bias", {"text": "a", "sampling": {"logit_bias": {999_999: 1.0}}}, "sampling.logit_bias"),
    ("empty stop", {"text": "a", "stop": [""]}, "stop"),
]  # fmt: skip


async def call(address: str, **fields: Any) -> None:
    """One raw Generate call; raises the error its status stands for."""
    request = inference_pb2.GenerateRequest(**fields)
    async with rpc.channel(address) as channel:
        with rpc.translated():
            async for _ in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request):
                pass


@pytest.mark.parametrize(("fields", "where"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
async def test_malformed_requests(
    cluster_factory: ClusterFactory, fields: dict[str, Any], where: str
) -> None:
    """INVALID_ARGUMENT with BadRequest naming the field."""
    cluster = await cluster_factory()
    if "sampling" in fields:
        fields = {**fields, "sampling": common_pb2.SamplingParams(**fields["sampling"])}
    with pytest.raises(InvalidRequest) as refused:
        await call(cluster.address, **fields)
    assert refused.value.field == where


async def test_an_unknown_model_is_not_found(cluster_factory: ClusterFactory) -> None:
    cluster = await cluster_factory()
    with pytest.raises(ModelNotFound, match="'demo' is"):
        await call(cluster.address, model="gpt-5", text="a")


async def test_a_deadline_ends_the_request_and_frees_its_blocks(
    cluster_factory: ClusterFactory, oracle: Oracle
) -> None:
    cluster = await cluster_factory()
    async with AsyncClient(cluster.address) as client:
        with pytest.raises(DeadlineExceeded):
            await client.generate(
                oracle.prompt(300, start=900), max_tokens=1000, ignore_eos=True, timeout=0.5
            )
        await all_blocks_free(client)


async def test_closing_the_stream_stops_the_work(
    cluster_factory: ClusterFactory, oracle: Oracle
) -> None:
    cluster = await cluster_factory()
    async with AsyncClient(cluster.address) as client:
        async with client.stream(
            oracle.prompt(300, start=901), max_tokens=1500, ignore_eos=True
        ) as stream:
            async for _ in stream:
                break
        await all_blocks_free(client)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_no_worker_of_a_role(own_cluster: ClusterFactory, role: str) -> None:
    """UNAVAILABLE with RetryInfo, and the router's readiness says NOT_SERVING."""
    cluster = await own_cluster(restart=False)
    async with AsyncClient(cluster.address, retry=RetryPolicy(max_attempts=1)) as client:
        cluster.kill(f"{role}-0")
        await eventually(
            client.status, lambda s: s["router"]["state"] == "NOT_SERVING", "still serving"
        )
        with pytest.raises(Unavailable, match=f"no {role} worker is ready") as refused:
            await client.generate([5] * 40, max_tokens=4)
        assert refused.value.retry_after_s > 0


async def test_health_and_reflection(cluster_factory: ClusterFactory) -> None:
    """Health and reflection answer on the router and on every worker."""
    cluster = await cluster_factory()
    addresses = [record.address for record in cluster.membership.records.values()]
    for address in [cluster.address, *addresses]:
        async with grpc.aio.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            ask = reflection_pb2.ServerReflectionRequest(list_services="*")
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            stream = reflection.ServerReflectionInfo(iter([ask]), timeout=5)
            listing = await stream.read()
            names = {service.name for service in listing.list_services_response.service}
            assert "grpc.health.v1.Health" in names
            assert any(name.startswith("baton.v1.") for name in names)
