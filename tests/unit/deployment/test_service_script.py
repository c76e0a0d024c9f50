"""compose/service.sh makes options of the environment; a stand-in for `baton` shows which."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Start = Callable[..., list[str]]
SCRIPT = Path(__file__).parents[3] / "compose" / "service.sh"


@pytest.fixture
def started(tmp_path: Path) -> Start:
    """started("router", NAME="value") -> the words that `baton` was called with."""
    program = tmp_path / "baton"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)

    def start(*arguments: str, **environment: str) -> list[str]:
        known = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOSTNAME": "box", **environment}
        argv = ["/bin/sh", str(SCRIPT), *arguments]
        done = subprocess.run(argv, env=known, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    return start


def test_variables_become_options(started: Start) -> None:
    words = started(
        "router",
        BATON_OPT_LOG_LEVEL="debug",
        BATON_OPT_MODEL="/models/with space; $(id)",
        BATON_OPT_OTLP="",
        BATON_OTHER="x",
        OTHER_BATON_OPT_X="y",
    )
    assert words[:5] == ["router", "--host", "0.0.0.0", "--port", "7700"]
    options = dict(zip(words[5::2], words[6::2], strict=True))
    assert options == {"--log-level": "debug", "--model": "/models/with space; $(id)"}


def test_a_worker_is_advertised_under_its_containers_name(started: Start) -> None:
    assert started("decode-worker")[-2:] == ["--advertise", "box:7700"]
    # The last one counts.
    words = started("decode-worker", BATON_OPT_ADVERTISE="10.0.0.7:7700")
    assert words[-4:] == ["--advertise", "box:7700", "--advertise", "10.0.0.7:7700"]


def test_what_is_written_after_the_service_counts_last(started: Start) -> None:
    words = started("router", "--max-queue", "9", BATON_OPT_MAX_QUEUE="5")
    assert words[-4:] == ["--max-queue", "5", "--max-queue", "9"]
