"""OpenAI's HTTP API over the same service as gRPC: `frontend` is given to `router.main.run`.

    server (uvicorn, one socket) -> app (routes) -> endpoint -> request -> GenerationService
    -> shapes -> client

It knows HTTP and JSON, and nothing of workers; whatever it answers, the service has decided.
"""

from __future__ import annotations

from baton.gateway.server import frontend

__all__ = ["frontend"]
