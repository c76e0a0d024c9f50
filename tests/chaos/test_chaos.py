"""A short set of seeds: real clusters under load and faults keep the promise.

`make chaos MINUTES=10` is the long form.
"""

from __future__ import annotations

import pytest

from tests.chaos.harness import Harness, HarnessConfig, logs
from tests.chaos.requests import Run, oracle_runs

SECONDS = 15.0
NEW_TOKENS = 60


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    """What every request must get."""
    return oracle_runs(NEW_TOKENS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("seed", "config"),
    [
        (11, HarnessConfig(transport="shm", callers=6)),
        (12, HarnessConfig(transport="gloo", callers=6, routers=1)),
    ],
    ids=["shm", "gloo-1-router"],
)
async def test_every_request_ends_right_and_nothing_is_kept(
    runs: list[Run], seed: int, config: HarnessConfig
) -> None:
    said: list[str] = []
    harness = Harness(config, said.append)
    async with harness:
        await harness.warm_up(runs)
        stats = await harness.round(runs, seed, SECONDS)
        story = "\n".join((*said, stats.render(), *stats.violations))
        print(story, logs(harness) if stats.violations else "", sep="\n\n")
    assert not stats.violations
    assert stats.outcomes["complete"] and stats.faults  # however busy the machine is
    assert not harness.leftovers()
