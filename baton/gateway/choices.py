"""Runs all choices of one HTTP request, each a request of its own to the service.

They enter one after another: the first is charged as a request to the tenant, and a hundred choices
of a long prompt must not hold the event loop. Choices of one prompt begin when the first of them
has its first token: by then its prompt is cached, so that it is computed once. If one fails, all
end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from baton.v1 import inference_pb2
from router.admission.admission import Choices
from router.frontend import Caller, GenerationService

Response = inference_pb2.GenerateResponse
Send = Callable[[int, Response], Awaitable[None]]  # the choice's number, and what it says


async def run(
    service: GenerationService,
    requests: Sequence[inference_pb2.GenerateRequest],
    n: int,
    caller: Caller,
    send: Send,
) -> None:
    """Sends what n choices of each request say, as it comes. Cancelling it cancels all of them."""
    if len(requests) * n == 1:
        await service.generate(requests[0], caller, partial(send, 0))
        return
    loop = asyncio.get_running_loop()
    left_s = service.default_timeout_s if caller.time_left_s is None else caller.time_left_s
    deadline = loop.time() + left_s  # one for all, also for those that begin later
    computed = [asyncio.Event() for _ in requests]
    shared = [Choices(len(requests) * n, first=i == 0) for i in range(len(requests))]
    entrance = asyncio.Lock()

    async def one(choice: int) -> None:
        index, number = divmod(choice, n)
        prompt = computed[index]
        if number:
            await prompt.wait()
        async with contextlib.AsyncExitStack() as entering:
            await entering.enter_async_context(entrance)

            async def send_on(response: Response) -> None:
                await entering.aclose()
                if response.HasField("delta"):
                    prompt.set()
                await send(choice, response)

            left = replace(caller, time_left_s=deadline - loop.time())
            await service.generate(requests[index], left, send_on, shared[index], number)
            prompt.set()

    try:
        async with asyncio.TaskGroup() as group:
            for choice in range(len(requests) * n):
                group.create_task(one(choice))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
