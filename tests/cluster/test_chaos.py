"""A short set of seeds: real clusters under load and faults keep the promise.

`make chaos MINUTES=10` is the long form.
"""

import signal
import sys
from collections import Counter

import psutil
import pytest

from tests.chaos.harness import Harness
from tests.chaos.load import COMPLETE, oracle_runs
from tests.chaos.versions import Versions
from tests.processes import running

SECONDS = 5.0
NEW_TOKENS = 60


@pytest.fixture(scope="module")
def runs():
    """What every request must get."""
    return oracle_runs(NEW_TOKENS)


async def test_versions_adapters_and_routes_change_and_no_token_is_anothers(forked, tmp_path):
    versions = Versions(tmp_path)
    runs = versions.runs(NEW_TOKENS)
    await keeps_the_promise(runs, 21, SECONDS, workers=1, versions=versions)


@pytest.mark.parametrize(
    ("seed", "routers", "transport", "tp"),
    [(11, 2, "shm", (1, 1)), (12, 1, "gloo", (2, 1))],
)
async def test_every_request_ends_right_and_nothing_is_kept(
    forked, runs, seed, routers, transport, tp
):
    await keeps_the_promise(runs, seed, SECONDS, routers=routers, transport=transport, tp=tp)


async def test_an_interrupted_run_leaves_no_process(forked):
    async with running(sys.executable, "-m", "tests.chaos", "--versions") as program:
        await program.says("round with seed")
        children = psutil.Process(program.pid).children(recursive=True)
        names = Counter(child.name() for child in children)
        assert (names["etcd"], names["process"]) == (3, 6), names  # two routers, four workers
        assert sum("planner" in child.cmdline() for child in children) == 2
        assert await program.end(signal.SIGTERM) == 130
    assert not [child for child in children if child.is_running()]


async def keeps_the_promise(runs, seed, seconds, **settings):
    """A round of chaos on a cluster of its own."""
    said: list[str] = []
    harness = Harness(said.append, callers=6, mean_pause_s=1.0, **settings)
    async with harness:
        try:
            stats = await harness.round(runs, seed, seconds)
            assert not stats.violations
        except BaseException:
            print(*said, harness.logs(), sep="\n")
            raise
    print(stats.render())
    assert stats.counts["requests"][COMPLETE] and stats.counts["faults"]  # on any machine
