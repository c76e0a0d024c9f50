"""compose/service.sh makes options of the environment; a stand-in for `baton` shows which."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "compose" / "service.sh"


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (
            ["router"],
            {"LOG_LEVEL": "debug", "MODEL": "/models/with space; $(id)", "OTLP": ""},
            ["--log-level", "debug", "--model", "/models/with space; $(id)"],
        ),
        (["decode-worker"], {}, ["--advertise", "box:7700"]),  # the container's name
        (
            ["decode-worker"],
            {"ADVERTISE": "10.0.0.7:7700"},  # the last one counts
            ["--advertise", "box:7700", "--advertise", "10.0.0.7:7700"],
        ),
        (
            ["router", "--max-queue", "9"],
            {"MAX_QUEUE": "5"},
            ["--max-queue", "5", "--max-queue", "9"],
        ),
    ],
)
def test_variables_become_options(
    tmp_path: Path, arguments: list[str], environment: dict[str, str], words: list[str]
) -> None:
    program = tmp_path / "baton"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOSTNAME": "box", "BATON_OTHER": "x"}
    env |= {"OTHER_BATON_OPT_X": "y"}
    env |= {f"BATON_OPT_{name}": value for name, value in environment.items()}
    argv = ["/bin/sh", str(SCRIPT), *arguments]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    found = done.stdout.splitlines()
    assert found[:5] == [arguments[0], "--host", "0.0.0.0", "--port", "7700"]
    # The environment has no order: what counts is the last of each.
    assert dict(batched(found[5:])) == dict(batched(words)) and len(found) == 5 + len(words)


def batched(words: list[str]) -> Iterator[tuple[str, str]]:
    return zip(words[::2], words[1::2], strict=True)
