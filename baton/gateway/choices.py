"""Runs all choices of one HTTP request, each a request of its own to the door.

Choices of one prompt begin when the first of them has its first token: by then its prompt is
cached, so that it is computed once. If one fails, all end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from baton.v1 import inference_pb2
from router.door import Caller, Door

Response = inference_pb2.GenerateResponse
Send = Callable[[int, Response], Awaitable[None]]  # the choice's number, and what it says


async def run(
    door: Door,
    requests: Sequence[inference_pb2.GenerateRequest],
    n: int,
    caller: Caller,
    send: Send,
) -> None:
    """Sends what all choices say, as it comes. Cancelling it cancels all of them everywhere."""
    if len(requests) == 1:
        await door.generate(requests[0], caller, partial(send, 0))
        return
    loop = asyncio.get_running_loop()
    left_s = door.default_timeout_s if caller.time_left_s is None else caller.time_left_s
    deadline = loop.time() + left_s  # one for all, also for those that begin later
    computed = [asyncio.Event() for _ in range(len(requests) // n)]

    async def one(choice: int) -> None:
        prompt = computed[choice // n]
        if choice % n:
            await prompt.wait()

        async def send_on(response: Response) -> None:
            if response.HasField("delta"):
                prompt.set()
            await send(choice, response)

        left = replace(caller, time_left_s=deadline - loop.time())
        await door.generate(requests[choice], left, send_on)
        prompt.set()

    try:
        async with asyncio.TaskGroup() as group:
            for choice in range(len(requests)):
                group.create_task(one(choice))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
