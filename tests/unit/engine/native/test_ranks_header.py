"""The exchange of ranks in shared memory: how long a rank waits for another."""

import subprocess
from pathlib import Path

import torch

from baton.engine.kernels.native import library
from tests.waiting import WAIT_S

PROGRAM = """
#include <signal.h>
#include <sys/time.h>
#include <cstdio>
#include <ctime>
#include "ranks.h"

using namespace baton;
static int naps_ended = 0;

int main() {
    Exchange exchange{};
    exchange.timeout_ms = 500;
    signal(SIGALRM, [](int) { naps_ended++; });
    const itimerval often{{0, 1000}, {0, 1000}};
    setitimer(ITIMER_REAL, &often, nullptr);
    timespec began, ended;
    clock_gettime(CLOCK_MONOTONIC, &began);
    Team::Shared shared;
    Team team(shared, 0, 1);
    Exchanges(team, Ranks{&exchange, 0, 2}).finish();  // the other rank never comes
    clock_gettime(CLOCK_MONOTONIC, &ended);
    const double ms = (ended.tv_sec - began.tv_sec) * 1e3 + (ended.tv_nsec - began.tv_nsec) / 1e6;
    std::printf("%d %d %f", exchange.aborted.load(), naps_ended, ms);
}
"""


def test_signals_do_not_shorten_the_wait_for_a_rank(tmp_path: Path) -> None:
    source, program = tmp_path / "waits.cpp", tmp_path / "waits"
    source.write_text(PROGRAM)
    flags = (*library.FLAGS, *library.best_target().flags, *library.DEFINES[torch.float32])
    command = [library.COMPILER, *flags, "-O1", f"-I{library.SOURCES}", str(source)]
    subprocess.run([*command, "-o", str(program)], check=True)
    aborted, naps_ended, ms = subprocess.check_output([program], text=True, timeout=WAIT_S).split()
    assert aborted == "1" and int(naps_ended) > 25
    assert float(ms) >= 500
