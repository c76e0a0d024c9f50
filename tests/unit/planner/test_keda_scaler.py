"""KEDA's contract, with a real gRPC client: one of our stubs, and one that sends KEDA's bytes."""

import contextlib

import grpc
import pytest

from baton.errors import InvalidRequest, Unavailable
from baton.net import rpc
from baton.net.server import bind
from baton.planner import keda_scaler
from baton.planner.keda_scaler import PublishedPlan, ScalerServicer
from baton.v1 import externalscaler_pb2, externalscaler_pb2_grpc, planner_pb2
from tests.waiting import WAIT_S

SERVICE = "/externalscaler.ExternalScaler/"


def plan(**wanted):
    roles = [planner_pb2.RolePlan(role=role, wanted=number) for role, number in wanted.items()]
    return planner_pb2.Plan(roles=roles)


def reference(role="decode"):
    metadata = {"scalerAddress": "planner:7740", "role": role}
    return externalscaler_pb2.ScaledObjectRef(name="d", namespace="n", scalerMetadata=metadata)


def metrics_of(role, name=""):
    return externalscaler_pb2.GetMetricsRequest(
        scaledObjectRef=reference(role), metricName=name or f"baton-wanted-{role}"
    )


@pytest.fixture
async def published():
    published = PublishedPlan()
    published.set(plan(prefill=2, decode=5, mixed=0))
    return published


@pytest.fixture
async def channel(published):
    server, address = bind("127.0.0.1", 0)
    externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(ScalerServicer(published), server)
    await server.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, 0)
        yield await stack.enter_async_context(rpc.channel(address))


@pytest.fixture
def keda(channel):
    return externalscaler_pb2_grpc.ExternalScalerStub(channel)


@pytest.mark.parametrize(("role", "wanted"), [("prefill", 2), ("decode", 5), ("mixed", 0)])
async def test_the_autoscaler_gets_the_wanted_replicas(keda, role, wanted):
    (spec,) = (await keda.GetMetricSpec(reference(role), timeout=WAIT_S)).metricSpecs
    assert (spec.targetSize, spec.targetSizeFloat) == (1, 1.0), "one replica for each"
    answer = await keda.GetMetrics(metrics_of(role, spec.metricName), timeout=WAIT_S)
    (value,) = answer.metricValues
    assert value.metricName == spec.metricName
    assert (value.metricValue, value.metricValueFloat) == (wanted, wanted)
    assert (await keda.IsActive(reference(role), timeout=WAIT_S)).result is (wanted > 0)


async def test_a_change_is_pushed(keda, published):
    stream = keda.StreamIsActive(reference("mixed"), timeout=WAIT_S)
    assert (await stream.read()).result is False
    published.set(plan(mixed=1))
    assert (await stream.read()).result is True
    published.set(plan(mixed=0))
    assert (await stream.read()).result is False
    stream.cancel()


async def test_the_bytes_are_kedas(channel):
    """Encoded here by the field numbers of KEDA's proto: name 1, namespace 2, scalerMetadata 3."""
    entry = b"\x0a\x04role\x12\x06decode"
    ref = b"\x0a\x01d\x12\x01n\x1a" + bytes([len(entry)]) + entry
    name = b"baton-wanted-decode"
    spec = await channel.unary_unary(SERVICE + "GetMetricSpec")(ref, timeout=WAIT_S)
    inner = b"\x0a" + bytes([len(name)]) + name + b"\x10\x01\x19" + bytes(6) + b"\xf0\x3f"
    assert spec == b"\x0a" + bytes([len(inner)]) + inner
    asked = b"\x0a" + bytes([len(ref)]) + ref + b"\x12" + bytes([len(name)]) + name
    value = await channel.unary_unary(SERVICE + "GetMetrics")(asked, timeout=WAIT_S)
    inner = b"\x0a" + bytes([len(name)]) + name + b"\x10\x05\x19" + bytes(6) + b"\x14\x40"
    assert value == b"\x0a" + bytes([len(inner)]) + inner
    assert await channel.unary_unary(SERVICE + "IsActive")(ref, timeout=WAIT_S) == b"\x08\x01"


@pytest.mark.parametrize(
    ("call", "request_", "text"),
    [
        ("GetMetricSpec", reference("router"), "role: prefill, decode, mixed, not 'router'"),
        ("IsActive", externalscaler_pb2.ScaledObjectRef(), "not ''"),
        ("GetMetrics", metrics_of("decode", "s0-other"), "is baton-wanted-decode"),
    ],
)
async def test_wrong_metadata_is_named(keda, call, request_, text):
    with pytest.raises(grpc.RpcError) as raised:
        await getattr(keda, call)(request_, timeout=WAIT_S)
    assert (
        raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT and text in raised.value.details()
    )


async def test_of_several_models_the_trigger_names_one(published):
    of = {("chat", "v1"): 2, ("chat", "v2"): 1, ("code", ""): 4}
    roles = [
        planner_pb2.RolePlan(role="decode", wanted=number, model=model, version=version)
        for (model, version), number in of.items()
    ]
    published.set(planner_pb2.Plan(roles=roles))
    wanted = [published.wanted("decode", name) for name in ("chat@v1", "chat@v2", "code")]
    assert wanted == [2, 1, 4]
    for name in ("", "chat"):
        with pytest.raises(InvalidRequest, match="must have model, one of chat@v1, chat@v2"):
            published.wanted("decode", name)
    with pytest.raises(Unavailable, match="workers of other"):
        published.wanted("decode", "other")


@pytest.mark.parametrize("call", ["GetMetrics", "IsActive"])
async def test_without_a_recent_plan_there_is_an_error_so_that_replicas_stay(
    keda, published, monkeypatch, call
):
    with pytest.raises(Unavailable, match="does a planner lead"):
        PublishedPlan().wanted("decode")
    asked = metrics_of("decode") if call == "GetMetrics" else reference()
    for text in ("has not seen the workers", "does a planner lead"):
        published.set(plan())  # of a planner that has just started
        with pytest.raises(grpc.RpcError, match=text) as raised:
            await getattr(keda, call)(asked, timeout=WAIT_S)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        monkeypatch.setattr(keda_scaler, "PLAN_S", -1.0)
