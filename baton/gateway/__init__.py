"""OpenAI's HTTP API over the router's door, as gRPC is: `frontend` is given to `router.main.run`.

    server (uvicorn, one socket) -> routes -> generation -> Door -> response_format -> client

It knows HTTP and JSON, and nothing of workers; admission is the door's.
"""

from __future__ import annotations

from baton.gateway.server import frontend

__all__ = ["frontend"]
