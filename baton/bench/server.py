"""The seam between the generator and the servers it asks, and what they have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from baton.bench.demand import Demand, IdRange
from baton.bench.outcome import Outcome

PROMPT_FORMS = ("ids", "text", "chat")


@dataclass(frozen=True)
class Asking:
    """How requests are put to a server."""

    model: str = ""  # empty: the first one it names
    prompt_form: str = "ids"
    ids: IdRange = field(default_factory=IdRange)
    ignore_eos: bool = True
    timeout_s: float = 120.0  # of a request
    api_key: str | None = None
    keep_alive: bool = True  # of HTTP connections; False: one a request


class Server(Protocol):
    """One server under load."""

    @property
    def url(self) -> str:
        """Where it is."""

    @property
    def protocol(self) -> str:
        """What it speaks."""

    async def connect(self) -> str:
        """The name of the model it will be asked for; raises BatonError if nobody answers."""

    def body(self, demand: Demand) -> bytes:
        """The request as it is sent: made before its time, so that making it delays nothing."""

    async def send(self, body: bytes, outcome: Outcome) -> None:
        """Sends it and notes what comes back, errors too; only its own cancellation is raised."""

    async def close(self) -> None:
        """Closes the connections."""
