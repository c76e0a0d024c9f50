"""The SDK: `Client` and `AsyncClient` talk to routers over gRPC; torch-free."""

from baton.client.aio import AsyncClient, AsyncStream
from baton.client.request import Options, Prompt
from baton.client.results import (
    Completion,
    Delta,
    Model,
    Route,
    Timing,
    TokenLogprobs,
    ToolCall,
    ToolCallDelta,
    Usage,
)
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
    "ToolCall",
    "ToolCallDelta",
    "Usage",
]
