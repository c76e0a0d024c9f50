"""The SDK: `Client` and `AsyncClient` call routers over gRPC."""

from baton.client.aio import AsyncClient, AsyncStream
from baton.client.request import Options, Prompt
from baton.client.results import (
    Completion,
    Delta,
    LabelScore,
    Model,
    Route,
    Timing,
    TokenLogprobs,
    ToolCall,
    Usage,
)
from baton.client.retry import RetryPolicy
from baton.client.sync import Client, Stream
from baton.generation.tool_call import ToolCallDelta

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Client",
    "Completion",
    "Delta",
    "LabelScore",
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
