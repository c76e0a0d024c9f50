"""Runs all choices of one HTTP request, each a request of its own to the door.

Choices of one prompt begin when the first of them has its first token: by then its prompt is
cached, so that it is computed once. If one fails, all end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from baton.v1 import inference_pb2
from router.door import Caller, Door

_MOST_AHEAD = 64  # responses that wait for a client that reads slowly

Response = inference_pb2.GenerateResponse
_Item = tuple[int, Response | BaseException | None]  # None: that choice has ended


async def responses(
    door: Door, requests: Sequence[inference_pb2.GenerateRequest], n: int, caller: Caller
) -> AsyncGenerator[tuple[int, Response], None]:
    """(choice, response) as they come. Closing it cancels all of them everywhere."""
    if len(requests) == 1:
        async with contextlib.aclosing(door.generate(requests[0], caller)) as generating:
            async for response in generating:
                yield 0, response
        return
    news: asyncio.Queue[_Item] = asyncio.Queue(_MOST_AHEAD)
    running = _begin(door, requests, n, caller, news)
    left = len(running)
    try:
        while left:
            choice, item = await news.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield choice, item
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _begin(
    door: Door,
    requests: Sequence[inference_pb2.GenerateRequest],
    n: int,
    caller: Caller,
    news: asyncio.Queue[_Item],
) -> list[asyncio.Task[None]]:
    computed = [asyncio.Event() for _ in range(len(requests) // n)]

    async def run(choice: int, request: inference_pb2.GenerateRequest) -> None:
        prompt = computed[choice // n]
        if choice % n:
            await prompt.wait()
        try:
            async with contextlib.aclosing(door.generate(request, caller)) as generating:
                async for response in generating:
                    if response.HasField("delta"):
                        prompt.set()
                    await news.put((choice, response))
            await news.put((choice, None))
        except Exception as error:
            await news.put((choice, error))
        finally:
            prompt.set()

    return [asyncio.create_task(run(*numbered)) for numbered in enumerate(requests)]
