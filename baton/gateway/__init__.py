"""OpenAI's HTTP API over the same service as gRPC: `frontend` is given to `router.main.run`.

    baton.net.http_server -> routes -> generation -> GenerationService
    -> output -> client

It knows HTTP and JSON, and nothing of workers; admission is the service's.
"""

from __future__ import annotations

from baton.gateway.routes import frontend

__all__ = ["frontend"]
