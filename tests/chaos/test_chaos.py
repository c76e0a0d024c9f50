"""A short set of seeds: real clusters under load and faults keep the promise.

`make chaos MINUTES=10` is the long form.
"""

from __future__ import annotations

import pytest

from tests.chaos.arena import Arena, ArenaConfig, logs
from tests.chaos.wishes import Run, oracle_runs

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
        (11, ArenaConfig(transport="shm", callers=6)),
        (12, ArenaConfig(transport="gloo", callers=6, routers=1)),
    ],
    ids=["shm", "gloo-1-router"],
)
async def test_every_request_ends_right_and_nothing_is_kept(
    runs: list[Run], seed: int, config: ArenaConfig
) -> None:
    said: list[str] = []
    arena = Arena(config, said.append)
    async with arena:
        await arena.warm_up(runs)
        tally = await arena.round(runs, seed, SECONDS)
        story = "\n".join((*said, tally.render(), *tally.violations))
        print(story, logs(arena) if tally.violations else "", sep="\n\n")
    assert not tally.violations
    assert tally.endings["complete"] and tally.faults  # however busy the machine is
    assert not arena.left_behind()
