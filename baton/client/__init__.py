"""The SDK: `Client` and `AsyncClient` talk to routers over gRPC; torch-free."""

from baton.client.aio import AsyncClient, AsyncStream
from baton.client.completion import Completion, Delta, Route, Timing, TokenLogprobs, Usage
from baton.client.fleet import Model
from baton.client.request import Options, Prompt
from baton.client.retry import RetryPolicy
from baton.client.sync import Client, Stream

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Client",
    "Completion",
    "Delta",
    "Model",
    "Options",
    "Prompt",
    "RetryPolicy",
    "Route",
    "Stream",
    "Timing",
    "TokenLogprobs",
    "Usage",
]
