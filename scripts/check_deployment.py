"""Checks compose/ without starting anything: `make lint` runs it.

Compose files obey the specification and name options that the program has; dashboards are what
scripts/dashboards.py writes; each query and alert is PromQL over metrics and labels of our table;
Prometheus scrapes services that are there; the collector's pipelines are made of what it defines.
Where `promtool` or a compose command is installed, they are asked as well.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from deployment import composition, queries
from deployment.grafana import queries as queries_of
from deployment.grafana import written
from deployment.panels import DASHBOARDS

COMPOSE = Path(__file__).parents[1] / "compose"
OBSERVABILITY = COMPOSE / "observability"
BASE = COMPOSE / "compose.yaml"
OVERLAYS = sorted(COMPOSE.glob("compose.*.yaml"))


def main() -> int:
    """0 when nothing is wrong; else tells what is, and 1."""
    found = [
        *composition.complaints(BASE, OVERLAYS),
        *dashboards(),
        *alerts(),
        *scraping(),
        *collecting(),
        *tools(),
    ]
    print("\n".join(found) if found else "deployment: compose files, dashboards, alerts are good")
    return 1 if found else 0


def dashboards() -> Iterator[str]:
    """What is wrong with the dashboards' files."""
    known = queries.samples()
    folder = OBSERVABILITY / "grafana" / "dashboards"
    sources = _yaml(OBSERVABILITY / "grafana/provisioning/datasources/datasources.yaml")
    uids = {source["uid"] for source in sources["datasources"]}
    for name in sorted({file.stem for file in folder.glob("*.json")} | DASHBOARDS.keys()):
        file = folder / f"{name}.json"
        if name not in DASHBOARDS or not file.exists():
            yield f"{file.name}: run scripts/dashboards.py, or remove it"
            continue
        if file.read_text() != written(DASHBOARDS[name]):
            yield f"{file.name}: is not what scripts/dashboards.py writes"
        page = json.loads(file.read_text())
        for title, expr in queries_of(page):
            yield from (f"{name}: {title}: {wrong}" for wrong in queries.complaints(expr, known))
        used = {panel["datasource"]["uid"] for panel in page["panels"] if "datasource" in panel}
        yield from (f"{name}: no datasource has the uid {uid}" for uid in used - uids)


def alerts() -> Iterator[str]:
    """What is wrong with the alert rules."""
    known, names = queries.samples(), set()
    for group in _yaml(OBSERVABILITY / "alerts.yaml")["groups"]:
        for rule in group["rules"]:
            name = rule["alert"]
            yield from (f"{name}: {wrong}" for wrong in queries.complaints(rule["expr"], known))
            if name in names:
                yield f"{name}: there are two of that name"
            names.add(name)
            if rule["labels"].get("severity") not in ("page", "ticket"):
                yield f"{name}: needs the severity page or ticket"
            if not {"summary", "description"} <= rule["annotations"].keys():
                yield f"{name}: needs a summary and a description"


def scraping() -> Iterator[str]:
    """Services that Prometheus looks for and that nobody starts, and ports that are not theirs."""
    services = dict(composition.loaded(BASE)["services"])
    for overlay in OVERLAYS:
        services |= composition.loaded(overlay)["services"]
    ours = composition.loaded(BASE)["services"]
    for job in _yaml(OBSERVABILITY / "prometheus.yaml")["scrape_configs"]:
        for found in job.get("dns_sd_configs", ()):
            for name in found["names"]:
                environment = ours.get(name, {}).get("environment", {})
                if str(found["port"]) != environment.get("BATON_OPT_METRICS_PORT"):
                    yield f"prometheus.yaml: {name} serves no metrics at {found['port']}"
        for group in job.get("static_configs", ()):
            for host in (target.partition(":")[0] for target in group["targets"]):
                if host not in {*services, "localhost"}:
                    yield f"prometheus.yaml: there is no service {host}"


def collecting() -> Iterator[str]:
    """Parts of the collector's pipelines that it does not define."""
    config = _yaml(OBSERVABILITY / "collector.yaml")
    for name, pipeline in config["service"]["pipelines"].items():
        for kind in ("receivers", "processors", "exporters"):
            for part in set(pipeline[kind]) - config[kind].keys():
                yield f"collector.yaml: {name} uses {part}, which is not among its {kind}"


def tools() -> Iterator[str]:
    """What those who read the files in earnest say of them, where they are installed."""
    if shutil.which("promtool"):
        yield from _said("promtool", "check", "config", str(OBSERVABILITY / "prometheus.yaml"))
    if shutil.which("docker-compose"):
        for overlay in (BASE, *OVERLAYS):
            files = ["--file", str(BASE), "--file", str(overlay)]
            yield from _said("docker-compose", *files, "config", "--quiet")


def _said(*argv: str) -> Iterator[str]:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        yield f"{' '.join(argv)}: {done.stdout}{done.stderr}"


def _yaml(file: Path) -> Any:
    return yaml.safe_load(file.read_text())


if __name__ == "__main__":
    sys.exit(main())
