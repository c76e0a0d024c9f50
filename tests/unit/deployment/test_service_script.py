"""compose/service.sh gives containers their defaults; a stand-in for `baton` shows which."""

from __future__ import annotations

import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "compose" / "service.sh"


def test_containers_have_defaults_that_variables_and_options_overrule(tmp_path: Path) -> None:
    program = tmp_path / "baton"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nenv | grep "^BATON_OPT_" | sort\n')
    program.chmod(0o755)

    def started(*arguments: str, **environment: str) -> list[str]:
        known = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOSTNAME": "box", **environment}
        argv = ["/bin/sh", str(SCRIPT), *arguments]
        return subprocess.check_output(argv, env=known, text=True).splitlines()

    defaults = ["BATON_OPT_HOST=0.0.0.0", "BATON_OPT_PORT=7700"]
    assert started("decode-worker", "--nice", "1 2") == [
        "decode-worker", "--nice", "1 2", "BATON_OPT_ADVERTISE=box:7700", *defaults
    ]  # fmt: skip
    assert started("router", BATON_OPT_ADVERTISE="h:1", BATON_OPT_PORT="7701", BATON_OPT_X="") == [
        "router", "BATON_OPT_ADVERTISE=h:1", defaults[0], "BATON_OPT_PORT=7701", "BATON_OPT_X="
    ]  # fmt: skip
