"""Writes compose/observability/grafana/dashboards from scripts/deployment/panels.py."""

from __future__ import annotations

import sys
from pathlib import Path

from deployment.grafana import written
from deployment.panels import DASHBOARDS

FOLDER = Path(__file__).parents[1] / "compose" / "observability" / "grafana" / "dashboards"


def main() -> int:
    """Writes each; 0."""
    for name, dashboard in DASHBOARDS.items():
        (FOLDER / f"{name}.json").write_text(written(dashboard))
    return 0


if __name__ == "__main__":
    sys.exit(main())
