"""A router whose answers a test writes, served by a real gRPC server on a free port."""

import asyncio
import contextlib

from baton.net import rpc
from baton.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc, inference_pb2, inference_pb2_grpc


def started(**fields):
    known = {"request_id": "r1", "trace_id": "ab" * 16, "prompt_tokens": 3}
    return inference_pb2.GenerateResponse(started=inference_pb2.Started(**{**known, **fields}))


def delta(text, *token_ids, reason=common_pb2.FINISH_REASON_UNSPECIFIED, **fields):
    return inference_pb2.GenerateResponse(
        delta=inference_pb2.Delta(text=text, token_ids=token_ids, finish_reason=reason, **fields)
    )


def finish(reason=common_pb2.FINISH_REASON_STOP, **fields):
    return inference_pb2.GenerateResponse(finish=inference_pb2.Finish(reason=reason, **fields))


HELLO = [started(), delta("Hel", 1), delta("lo", 2, 3), finish()]


class ScriptedRouter(
    inference_pb2_grpc.InferenceServiceServicer, fleet_pb2_grpc.FleetServiceServicer
):
    """Answers the n-th Generate with the n-th script; the last one serves all that follow.

    A script is a list of messages to send, errors to raise and events to wait for.
    """

    def __init__(self, *scripts):
        self.scripts = list(scripts)
        self.requests = []
        self.metadata = []
        self.time_left_s = []
        self.cancelled = asyncio.Event()
        self.unary_errors = []
        self.status = fleet_pb2.GetStatusResponse()
        self.explanation = fleet_pb2.ExplainResponse()

    def _note(self, request, context):
        self.requests.append(request)  # gRPC makes a new message for each call
        self.metadata.append(dict(context.invocation_metadata()))
        self.time_left_s.append(context.time_remaining())

    async def Generate(self, request, context):
        self._note(request, context)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        try:
            for step in script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield step
        except (asyncio.CancelledError, GeneratorExit):  # the latter while gRPC still sends
            self.cancelled.set()
            raise

    async def Tokenize(self, request, context):
        self._note(request, context)
        if self.unary_errors:
            raise self.unary_errors.pop(0)
        return inference_pb2.TokenizeResponse(token_ids=[7, 8], max_context=100)

    async def ListModels(self, request, context):
        model = inference_pb2.Model(name="demo", max_context=100, vocab_size=50, chat=True)
        return inference_pb2.ListModelsResponse(models=[model])

    async def GetStatus(self, request, context):
        return self.status

    async def Explain(self, request, context):
        self._note(request, context)
        return self.explanation


@contextlib.asynccontextmanager
async def serving(router, credentials=None, address="127.0.0.1:0"):
    """Serves `router`; gives "host:port"."""
    server = rpc.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(router, server)
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(router, server)
    if credentials is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
