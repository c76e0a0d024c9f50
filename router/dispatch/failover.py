"""How long a request that was let in waits for workers that are not there (any more)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from baton.errors import Overloaded, Unavailable


class Recovery:
    """Around the wait for a place: nobody of a role may be there for at most `limit_s` in a row.

    Workers that are full are waited for without a limit: the request's own deadline ends that.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._timeout = asyncio.timeout(None)
        self._missing: Unavailable | None = None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            assert self._missing is not None, "only a missing worker starts the clock"
            raise self._missing from None

    @contextlib.contextmanager
    def waits_for_workers(self) -> Iterator[None]:
        """Around the choice of a place: turns Unavailable into Overloaded, which is waited for."""
        try:
            yield
        except Unavailable as error:
            if self._missing is None:
                self._timeout.reschedule(asyncio.get_running_loop().time() + self._limit_s)
            self._missing = error
            raise Overloaded(str(error), error.retry_after_s) from error
        except Overloaded:
            self._found()
            raise
        else:
            self._found()

    def _found(self) -> None:
        if self._missing is not None:
            self._timeout.reschedule(None)
            self._missing = None
