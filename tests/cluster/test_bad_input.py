"""Malformed requests are refused before any work, with the exact status and field."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton import rpc
from baton.errors import InvalidRequest, ModelNotFound
from baton.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.cluster.conftest import Clusters

CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"token_ids": {"ids": []}}, "input"),
    ({"chat": {}}, "chat"),
    ({"token_ids": {"ids": [5, 4_000_000]}}, "token_ids"),
    ({"token_ids": {"ids": [5] * 2048}}, "input"),
    ({"sampling": {"temperature": -1}}, "sampling.temperature"),
    ({"sampling": {"temperature": float("nan")}}, "sampling.temperature"),
    ({"sampling": {"top_p": 1.5}}, "sampling.top_p"),
    ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
    ({"sampling": {"min_tokens": 99}}, "sampling.min_tokens"),
    ({"sampling": {"logprobs": 1000}}, "sampling.logprobs"),
    ({"sampling": {"logit_bias": {999_999: 1.0}}}, "sampling.logit_bias"),
    ({"text": "a", "stop": [""]}, "stop"),
]


async def test_malformed_requests(clusters: Clusters) -> None:
    """INVALID_ARGUMENT with BadRequest naming the field; a model that is not served: NOT_FOUND."""
    cluster, _ = await clusters()
    async with rpc.channel(cluster.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def call(**fields: Any) -> None:
            with rpc.translated():
                async for _ in stub.Generate(inference_pb2.GenerateRequest(**fields)):
                    pass

        for fields, where in CASES:
            if "sampling" in fields:
                sampling = common_pb2.SamplingParams(**fields["sampling"])
                fields = {"text": "a", "sampling": sampling}  # noqa: PLW2901
            with pytest.raises(InvalidRequest) as refused:
                await call(**fields)
            assert refused.value.field == where, fields
        with pytest.raises(ModelNotFound, match="'demo' is"):
            await call(model="gpt-5", text="a")


async def test_health_and_reflection(clusters: Clusters) -> None:
    """Health and reflection answer on the router and on every worker."""
    cluster, _ = await clusters()
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
