"""Two versions of a model and a LoRA adapter under chaos: what they are, and what changes them.

    "chat@v1"  the demo model            "chat"  a route to both, with weights or a canary
    "chat@v2"  it with other weights     "sql"   an adapter of chat@v1

The oracle of the adapter is the model with the adapter merged into its weights, so that it shares
no LoRA code with the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from baton.client import AsyncClient
from baton.config import DEMO_MODEL
from baton.errors import BatonError
from baton.local.child import tied
from baton.local.cluster import LocalCluster
from baton.local.commands import PROGRAM
from baton.local.process import ChildProcess
from tests.chaos.load import SAMPLING, Run
from tests.cluster.oracle import ENGINE, Oracle
from tests.perturbed import perturbed_model, random_adapter
from tests.waiting import WAIT_S, eventually

NAME, FIRST, SECOND, ADAPTER = "chat", "chat@v1", "chat@v2", "sql"
LENGTHS = (15, 40, 200, 450)
PLANNERS = 2
_STOP_S = 5.0
_PLANNING = (
    *("--apply", "--interval", "1", "--window", "5", "--cooldown", "3"),
    *("--lease-ttl", "2", "--port", "0"),
)
_CALL_S = 10.0  # for a call to operators' services, while workers may not answer


@dataclass(frozen=True)
class Versions:
    """The checkpoints, in a folder that the caller removes."""

    directory: Path

    @property
    def models(self) -> tuple[str, ...]:
        """For `--model`."""
        return (f"{FIRST}={DEMO_MODEL}", f"{SECOND}={self._second}")

    @property
    def adapter(self) -> str:
        """The adapter's folder."""
        return str(self._adapter)

    def runs(self, new_tokens: int) -> list[Run]:
        """Writes the checkpoints; runs of each version, of the adapter, and of the shared name."""
        perturbed_model(self._second)
        random_adapter(self._adapter, self._merged)
        asked = {"max_tokens": new_tokens, "ignore_eos": True, "logprobs": 1}
        of = {}
        directories = {FIRST: DEMO_MODEL, SECOND: self._second, ADAPTER: self._merged}
        for name, directory in directories.items():
            with Oracle(ENGINE, model=str(directory)) as oracle:
                of[name] = [
                    Run(prompt, given, oracle.generate(prompt, **given, **asked), oracle.text, name)
                    for prompt, given in _asked(oracle)
                ]
        shared = [
            replace(first, model=NAME, others=(second.whole,))
            for first, second in zip(of[FIRST], of[SECOND], strict=True)
        ]
        for one, *others in zip(*of.values(), strict=True):
            tokens = {run.whole.token_ids for run in (one, *others)}
            assert len(tokens) == len(of), "two versions say the same"
        return [*(run for runs in of.values() for run in runs), *shared]

    @property
    def _second(self) -> Path:
        return self.directory / "second"

    @property
    def _adapter(self) -> Path:
        return self.directory / ADAPTER

    @property
    def _merged(self) -> Path:
        return self.directory / "merged"


def _asked(oracle: Oracle) -> Sequence[tuple[tuple[int, ...], dict[str, object]]]:
    return [
        (oracle.prompt(length), dict(SAMPLING[i % len(SAMPLING)]))
        for i, length in enumerate(LENGTHS)
    ]


@dataclass
class Changes:
    """Changes adapters, routes and planners of a running cluster; `async with` runs planners."""

    cluster: LocalCluster
    adapter: str  # its folder
    _planners: list[ChildProcess] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        at = ("--target", self.cluster.targets, "--etcd", self.cluster.etcd_address)
        try:
            for number in range(PLANNERS):
                argv = [*PROGRAM, "planner", *at, *_PLANNING, "--name", f"planner-{number}"]
                planner = ChildProcess(f"planner-{number}", "planner", tied(argv))
                await planner.start()
                self._planners.append(planner)
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Ends the planners."""
        await asyncio.gather(*(planner.stop(_STOP_S) for planner in self._planners))

    async def kill_planner(self) -> None:
        """Kills the one that leads, and starts it again."""
        led = [one for one in self._planners if any(" leads" in line for line in one.log)]
        planner = max(led or self._planners, key=lambda one: one.started_at)
        planner.kill()
        await planner.wait()
        planner.log.clear()
        await planner.start()

    async def load(self) -> None:
        """Returns once all workers of its version that a router can use have it."""
        what = "the adapter is not loaded"
        await eventually(self._without_adapter, lambda found: not found, what, WAIT_S)

    async def _without_adapter(self) -> list[str]:
        """Loads it, and returns the routers and workers that do not know it."""
        await self._done(
            lambda one: one.load_adapter(ADAPTER, self.adapter, model=FIRST, timeout=_CALL_S)
        )
        found = []
        for address in self.cluster.addresses:
            try:
                async with AsyncClient(address) as client:
                    workers = (await client.status())["workers"]
            except BatonError as error:
                found.append(f"router {address}: {error}")
                continue
            ready = [one for one in workers if (one["version"], one["state"]) == ("v1", "READY")]
            found += [one["incarnation"] for one in ready if not one["adapters"]]
            found += [] if ready else [f"router {address} has no worker of {FIRST}"]
        return found

    async def unload(self) -> bool:
        """From all workers that answer; whether it was done."""
        return await self._done(lambda client: client.unload_adapter(ADAPTER, timeout=_CALL_S))

    async def set_route(self, share: float) -> bool:
        """Gives the second version this share of the requests, from 0 to 1; whether it was done."""
        weights = {name: w for name, w in ((FIRST, 1 - share), (SECOND, share)) if w}
        return await self._done(lambda client: client.set_route(NAME, weights))

    async def start_canary(self) -> bool:
        """Of the second version; the next change of the route ends it where it does not itself.
        Returns whether it was done."""
        await self.set_route(0.0)
        steps: dict[str, Any] = {"steps": (20.0, 60.0, 100.0), "step_s": 2.0, "min_requests": 5}
        return await self._done(lambda client: client.start_canary(NAME, SECOND, **steps))

    async def _done(self, call: Callable[[AsyncClient], Awaitable[object]]) -> bool:
        """Makes a call; returns whether it succeeded, for etcd, workers or routers may be gone."""
        with contextlib.suppress(BatonError):
            async with AsyncClient(self.cluster.targets) as client:
                await call(client)
                return True
        return False
