"""A short set of seeds: real clusters under load and faults keep the promise.

`make chaos MINUTES=10` is the long form.
"""

import pytest

from tests.chaos.harness import Harness
from tests.chaos.load import COMPLETE, oracle_runs

SECONDS = 7.0
NEW_TOKENS = 60


@pytest.fixture(scope="module")
def runs():
    """What every request must get."""
    return oracle_runs(NEW_TOKENS)


@pytest.mark.parametrize(
    ("seed", "routers", "transport", "tp"),
    [(11, 2, "shm", (1, 1)), (12, 1, "gloo", (2, 1))],
)
async def test_every_request_ends_right_and_nothing_is_kept(
    fork_server, runs, seed, routers, transport, tp
):
    said: list[str] = []
    harness = Harness(
        said.append, routers=routers, transport=transport, tp=tp, callers=6, mean_pause_s=1.5
    )
    async with harness:
        try:
            stats = await harness.round(runs, seed, SECONDS)
            assert not stats.violations
        except BaseException:
            print(*said, harness.logs(), sep="\n")
            raise
    print(stats.render())
    assert stats.counts["requests"][COMPLETE] and stats.counts["faults"]  # on any machine
    assert not harness.leftovers()
