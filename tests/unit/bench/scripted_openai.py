"""A real HTTP server with OpenAI's completions API whose answers a test writes."""

import asyncio
import contextlib
import json

from aiohttp import web
from aiohttp.test_utils import TestServer


def event(**fields):
    """One server-sent event."""
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(token):
    """A chunk of a completion."""
    return event(choices=[{"text": token}])


def usage(prompt, completion, cached=None):
    """The last chunk before the end."""
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return event(choices=[], usage={**counts, **details})


DONE = b"data: [DONE]\n\n"
HELLO = [text("Hel"), text("lo"), usage(3, 2), DONE]


class ScriptedOpenAI:
    """Answers the n-th completion with the n-th script; the last one serves all that follow.

    A script is a list of bytes to write and events to wait for, or a status with a body.
    """

    def __init__(self, *scripts):
        self.scripts = list(scripts)
        self.bodies = []
        self.keys = []
        self.peers = []
        self.begun = asyncio.Event()

    async def models(self, request):
        return web.json_response({"data": [{"id": "scripted"}]})

    async def complete(self, request):
        assert request.transport is not None
        self.peers.append(request.transport.get_extra_info("peername"))
        self.keys.append(request.headers.get("Authorization"))
        self.bodies.append({"path": request.path, **await request.json()})
        self.begun.set()
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        if isinstance(script, tuple):
            return web.Response(status=script[0], text=script[1])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for step in script:
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif step == b"hang up":
                request.transport.close()
            else:
                await response.write(step)
        return response


@contextlib.asynccontextmanager
async def serving(server, context=None):
    """Serves it, with TLS where there is a context; gives the base URL."""
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    for kind in ("completions", "chat/completions"):
        app.router.add_post(f"/v1/{kind}", server.complete)
    test_server = TestServer(app)
    await test_server.start_server(shutdown_timeout=0.1, ssl=context)
    try:
        yield f"http{'s' if context else ''}://127.0.0.1:{test_server.port}"
    finally:
        await test_server.close()
