"""Outcomes with times that a test can compute with, and a server that a test writes."""

from array import array

from baton.bench.request import Outcome, RequestOptions
from baton.bench.servers import Server
from baton.v1.common_pb2 import Route, Timing
from baton.v1.inference_pb2 import Finish

NO_SERVER = "127.0.0.1:1"  # an address at which nothing listens


def outcome(*token_times_s, sent_s=0.0, **fields):
    """One that ended OK with a token at each time."""
    defaults = {
        "at_s": sent_s,
        "planned_output_tokens": len(token_times_s),
        "output_tokens": len(token_times_s),
        "prompt_tokens": 10,
        "ended_s": max(token_times_s, default=0.0) + 0.01,
        "token_times_s": array("d", token_times_s),
        "token_counts": array("I", [1] * len(token_times_s)),
    }
    return Outcome(**{**defaults, "sent_s": sent_s, **fields})


def failed(status, message="no", **fields):
    """One that brought nothing."""
    defaults = {"status": status, "message": message, "ended_s": 0.1, "prompt_tokens": 0}
    return outcome(**{**defaults, **fields})


def finish(*, prefill="p", attempts=1, **timing):
    """A Baton router's last message."""
    return Finish(timing=Timing(**timing), route=Route(prefill=prefill, attempts=attempts))


class FakeServer(Server):
    """Hands each request to `answer`; `demands` are those that were sent, in order."""

    def __init__(self):
        super().__init__("fake://", RequestOptions())
        self._bodies = []
        self.demands = []

    async def connect(self): ...

    def body(self, demand):
        self._bodies.append(demand)
        return str(len(self._bodies) - 1).encode()

    async def send(self, body, outcome, began):
        self.demands.append(self._bodies[int(body)])
        await self.answer(self.demands[-1], outcome)

    async def close(self): ...
