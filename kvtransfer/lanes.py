"""Where a mover's work is queued: nowhere, on a CPU, or on a stream of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class Lane:
    """On a CPU everything is done at once."""

    pinned = False  # whether memory of the host that the lane copies from must not be paged out

    def entered(self) -> AbstractContextManager[None]:
        """What is called in it goes to the lane."""
        return nullcontext()

    def mark(self) -> torch.cuda.Event | None:
        """A point behind all that was queued so far."""
        return None

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """Returns when `mark` has been reached. Raises RuntimeError when the GPU failed."""
        return


class StreamLane(Lane):
    """A stream of the highest priority: copies fill gaps of the engine's work, not its end.

    Nothing here is on the default stream, on which a copy would wait for the engine's steps and
    they for it. Streams come from torch's, which are not ordered with the default one.
    """

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)

    @contextmanager
    def entered(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        event = torch.cuda.Event(blocking=True)  # who waits for it sleeps and does not spin
        event.record(self._stream)
        return event

    def wait(self, mark: torch.cuda.Event | None) -> None:
        if mark is not None:
            mark.synchronize()


def lane(device: torch.device) -> Lane:
    """A new lane for memory of `device`."""
    return StreamLane(device) if device.type == "cuda" else Lane()
