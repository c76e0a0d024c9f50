"""Alert rules fire when they should and not before, as Prometheus' own tool evaluates them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "alerts.yaml"


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool, of Prometheus")
def test_alerts_fire_when_they_should() -> None:
    argv = ["promtool", "test", "rules", str(CASES)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
