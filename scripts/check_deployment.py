"""Checks compose/ without starting anything: `make lint` runs it.

Compose files obey the compose specification and name options that the program has; each query of a
dashboard and of an alert is PromQL over metrics and labels of our table; Prometheus scrapes
services that exist; the collector's pipelines use parts that it defines. Where `promtool` or
docker-compose is installed, they check the files as well.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import promql_parser
import yaml

from baton.cli import parser
from baton.cli.services import router_config, worker_config
from baton.errors import BatonError
from baton.metrics import table

COMPOSE = Path(__file__).parents[1] / "compose"
OBSERVABILITY = COMPOSE / "observability"
BASE = COMPOSE / "compose.yaml"
OVERLAYS = sorted(COMPOSE.glob("compose.*.yaml"))
COMMANDS = ("router", "prefill-worker", "decode-worker")
_OPTION = "BATON_OPT_"
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::-(?P<default>[^}]*))?\}")

# Metrics that are not ours; every scraped sample has the labels job and instance.
_SCRAPED = frozenset({"job", "instance"})
_FOREIGN = ("up", "etcd_server_has_leader", "etcd_mvcc_db_total_size_in_bytes")
# What Grafana substitutes before it sends a query.
_GRAFANA = {"$__rate_interval": "5m", "$job": "prefill", "$instance": ".*"}
_LIST = re.compile(r"label_values\((?P<selector>.+), (?P<label>\w+)\)")


def main() -> int:
    """0 when nothing is wrong; else prints what is, and 1."""
    found = [
        *schema_errors(BASE, *OVERLAYS),
        *compose_errors(BASE, OVERLAYS),
        *dashboards(),
        *alerts(),
        *scraping(),
        *collecting(),
        *tools(),
    ]
    print("\n".join(found) if found else "deployment: compose files, dashboards, alerts are good")
    return 1 if found else 0


# --- compose files --------------------------------------------------------------------------------


def load(file: Path) -> dict[str, Any]:
    """A compose file with the defaults of its variables put in."""
    text = _VARIABLE.sub(lambda match: match["default"] or "", file.read_text())
    content: dict[str, Any] = yaml.safe_load(text)
    return content


def schema_errors(*files: Path) -> Iterator[str]:
    """What the compose specification's schema says of compose files."""
    schema = ("-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec")
    yield from _run(sys.executable, *schema, *map(str, files))


def compose_errors(base: Path, overlays: Sequence[Path]) -> Iterator[str]:
    """What is wrong with a compose file and its overlays, each by itself and all together."""
    under = together = load(base)
    yield from _service_errors(base.name, under, under)
    for overlay in overlays:
        over = load(overlay)
        yield from _service_errors(overlay.name, over, merge(under, over))
        together = merge(together, over)
    yield from _service_errors("all together", {"services": {}}, together)


def _service_errors(name: str, one: Mapping[str, Any], merged: Mapping[str, Any]) -> Iterator[str]:
    for service, settings in merged["services"].items():
        where = f"{name}: {service}"
        if not settings.get("image"):
            yield f"{where}: has no image"
        for secret in settings.get("secrets", ()):
            if secret not in merged.get("secrets", {}):
                yield f"{where}: secret {secret} is not declared"
        for other in settings.get("depends_on", ()):
            if other not in merged["services"]:
                yield f"{where}: depends on {other}, which is not there"
        if service in ("prefill", "decode") and settings.get("ports"):
            yield f"{where}: several cannot share a published port"
        if settings.get("container_name"):
            yield f"{where}: a fixed name prevents --scale"
        yield from (f"{where}: {wrong}" for wrong in _option_errors(settings))
    for service, settings in one["services"].items():
        for volume in settings.get("volumes", ()):
            source = volume.partition(":")[0]
            if source.startswith("./") and not (COMPOSE / source).exists():
                yield f"{name}: {service}: mounts {source}, which is not there"


def _option_errors(settings: Mapping[str, Any]) -> Iterator[str]:
    """What the program says of the options that the environment names."""
    command = settings.get("command") or [""]
    if command[0] not in COMMANDS:
        return
    argv = [*command, "--host", "0.0.0.0", "--port", "7700"]
    for name, value in settings.get("environment", {}).items():
        if name.startswith(_OPTION) and value not in (None, ""):
            argv += ["--" + name.removeprefix(_OPTION).lower().replace("_", "-"), str(value)]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = parser().parse_args(argv)
        (router_config if command[0] == "router" else worker_config)(args)
    except SystemExit:
        yield said.getvalue().splitlines()[-1]
    except BatonError as error:
        yield str(error)


def merge(under: Any, over: Any) -> Any:
    """As compose merges: mappings by key, most lists one after the other, other things replaced."""
    if isinstance(under, dict) and isinstance(over, dict):
        merged = {**under, **over}
        for key in (under.keys() & over.keys()) - {"command", "entrypoint"}:
            merged[key] = merge(under[key], over[key])
        return merged
    return [*under, *over] if isinstance(under, list) and isinstance(over, list) else over


# --- queries --------------------------------------------------------------------------------------


def samples() -> dict[str, frozenset[str]]:
    """The labels of each name that a query may use."""
    known = dict.fromkeys(_FOREIGN, _SCRAPED)
    for instrument in table.TABLE:
        labels = _SCRAPED | {name.replace(".", "_") for name in instrument.attributes}
        for name in instrument.samples:
            known[name] = labels | {"le"} if name.endswith("_bucket") else labels
    return known


def query_errors(expr: str, known: Mapping[str, frozenset[str]]) -> Iterator[str]:
    """What is wrong with an expression, a dashboard's variables and lists included."""
    for variable, value in _GRAFANA.items():
        expr = expr.replace(variable, value)
    if listed := _LIST.fullmatch(expr):
        yield from query_errors(f"sum by ({listed['label']}) ({listed['selector']})", known)
        return
    try:
        tree = promql_parser.parse(expr)
    except ValueError as error:
        yield f"is not PromQL: {error}"
        return
    yield from _tree_errors(tree, known, set())


def _tree_errors(tree: Any, known: Mapping[str, frozenset[str]], wanted: set[str]) -> Iterator[str]:
    """`wanted` are the labels that the surrounding expression needs."""
    match tree:
        case promql_parser.VectorSelector():
            labels = known.get(tree.name or "")
            if labels is None:
                yield f"queries {tree.name}, which is not exported"
                return
            used = wanted | {matcher.name for matcher in tree.matchers.matchers}
            if unknown := sorted(used - labels):
                yield f"queries {tree.name} by {', '.join(unknown)}, which it does not have"
        case promql_parser.AggregateExpr():
            grouped = set(tree.modifier.labels) if tree.modifier else set()
            if lost := sorted(wanted - grouped):
                yield f"needs {', '.join(lost)} of what is summed up without it"
            yield from _tree_errors(tree.expr, known, grouped)
        case promql_parser.BinaryExpr():
            yield from _tree_errors(tree.lhs, known, wanted)
            yield from _tree_errors(tree.rhs, known, wanted)
        case promql_parser.Call():
            inner = wanted | {"le"} if tree.func.name == "histogram_quantile" else wanted
            for argument in tree.args:
                yield from _tree_errors(argument, known, inner)
        case promql_parser.MatrixSelector():
            yield from _tree_errors(tree.vector_selector, known, wanted)
        case promql_parser.ParenExpr() | promql_parser.UnaryExpr() | promql_parser.SubqueryExpr():
            yield from _tree_errors(tree.expr, known, wanted)


def dashboards() -> Iterator[str]:
    """What is wrong with the dashboards' queries and data sources."""
    known = samples()
    sources = _yaml(OBSERVABILITY / "grafana/provisioning/datasources/datasources.yaml")
    uids = {source["uid"] for source in sources["datasources"]}
    for file in sorted((OBSERVABILITY / "grafana" / "dashboards").glob("*.json")):
        page = json.loads(file.read_text())
        queries = [(item["name"], item["definition"]) for item in page["templating"]["list"]]
        for panel in page["panels"]:
            queries += [(panel["title"], target["expr"]) for target in panel.get("targets", ())]
            if "datasource" in panel and panel["datasource"]["uid"] not in uids:
                yield f"{file.name}: {panel['title']}: unknown datasource {panel['datasource']}"
        for title, expr in queries:
            yield from (f"{file.name}: {title}: {wrong}" for wrong in query_errors(expr, known))


def alerts() -> Iterator[str]:
    """What is wrong with the alert rules."""
    known, names = samples(), set()
    for group in _yaml(OBSERVABILITY / "alerts.yaml")["groups"]:
        for rule in group["rules"]:
            name = rule["alert"]
            yield from (f"{name}: {wrong}" for wrong in query_errors(rule["expr"], known))
            if name in names:
                yield f"{name}: there are two of that name"
            names.add(name)
            if rule["labels"].get("severity") not in ("page", "ticket"):
                yield f"{name}: needs the severity page or ticket"
            if not {"summary", "description"} <= rule["annotations"].keys():
                yield f"{name}: needs a summary and a description"


# --- Prometheus, the collector, other tools -------------------------------------------------------


def scraping() -> Iterator[str]:
    """Services that Prometheus scrapes and that do not exist, and ports that are not theirs."""
    ours = load(BASE)["services"]
    services = set(ours)
    for overlay in OVERLAYS:
        services |= load(overlay)["services"].keys()
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
    """What other tools find, where they are installed."""
    if shutil.which("promtool"):
        yield from _run("promtool", "check", "config", str(OBSERVABILITY / "prometheus.yaml"))
    if shutil.which("docker-compose"):
        for overlay in (BASE, *OVERLAYS):
            files = ["--file", str(BASE), "--file", str(overlay)]
            yield from _run("docker-compose", *files, "config", "--quiet")


def _run(*argv: str) -> Iterator[str]:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        yield f"{' '.join(argv)}: {done.stdout}{done.stderr}"


def _yaml(file: Path) -> Any:
    return yaml.safe_load(file.read_text())


if __name__ == "__main__":
    sys.exit(main())
