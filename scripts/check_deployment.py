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
        *tools(),
    ]
    print("\n".join(found) if found else "deployment: compose files, dashboards, alerts are good")
    return 1 if found else 0


def load(file: Path) -> Any:
    """A YAML file with the defaults of compose's variables put in."""
    return yaml.safe_load(_VARIABLE.sub(lambda match: match["default"] or "", file.read_text()))


# --- compose files --------------------------------------------------------------------------------


def schema_errors(*files: Path) -> Iterator[str]:
    """What the compose specification's schema says of compose files."""
    schema = ("-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec")
    yield from _run(sys.executable, *schema, *map(str, files))


def compose_errors(base: Path, overlays: Sequence[Path]) -> Iterator[str]:
    """What is wrong with a compose file and its overlays, each by itself and all together."""
    under = together = load(base)
    wholes = [(base.name, under)]
    for overlay in overlays:
        wholes.append((overlay.name, merge(under, load(overlay))))
        together = merge(together, load(overlay))
    for name, whole in [*wholes, ("all together", together)]:
        for service, settings in whole["services"].items():
            yield from (
                f"{name}: {service}: {e}" for e in _service_errors(service, settings, whole)
            )


def _service_errors(
    name: str, settings: Mapping[str, Any], whole: Mapping[str, Any]
) -> Iterator[str]:
    if not settings.get("image"):
        yield "has no image"
    if settings.get("container_name"):
        yield "a fixed name prevents --scale"
    if name in ("prefill", "decode") and settings.get("ports"):
        yield "several cannot share a published port"
    for secret in set(settings.get("secrets", ())) - whole.get("secrets", {}).keys():
        yield f"secret {secret} is not declared"
    for other in set(settings.get("depends_on", ())) - whole["services"].keys():
        yield f"depends on {other}, which is not there"
    for source in (volume.partition(":")[0] for volume in settings.get("volumes", ())):
        if source.startswith("./") and not (COMPOSE / source).exists():
            yield f"mounts {source}, which is not there"
    yield from _option_errors(settings)


def _option_errors(settings: Mapping[str, Any]) -> Iterator[str]:
    """What the program says of the options that the environment names."""
    command = settings.get("command") or [""]
    if command[0] not in ("router", "prefill-worker", "decode-worker"):
        return
    argv = [*command, "--host", "0.0.0.0", "--port", "7700"]
    for name, value in settings.get("environment", {}).items():
        if name.startswith(_OPTION) and value not in (None, ""):
            flag = "--" + name.removeprefix(_OPTION).lower().replace("_", "-")
            argv += [flag] if value == "yes" else [flag, str(value)]
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
        expr = f"sum by ({listed['label']}) ({listed['selector']})"
    try:
        tree = promql_parser.parse(expr)
    except ValueError as error:
        yield f"is not PromQL: {error}"
        return
    yield from _tree_errors(tree, known, set())


def _tree_errors(tree: Any, known: Mapping[str, frozenset[str]], wanted: set[str]) -> Iterator[str]:
    """`wanted` are the labels that the surrounding expression needs."""
    inner: Sequence[Any] = ()
    match tree:
        case promql_parser.VectorSelector():
            used = wanted | {matcher.name for matcher in tree.matchers.matchers}
            if (labels := known.get(tree.name or "")) is None:
                yield f"queries {tree.name}, which is not exported"
            elif unknown := sorted(used - labels):
                yield f"queries {tree.name} by {', '.join(unknown)}, which it does not have"
        case promql_parser.AggregateExpr():
            grouped = set(tree.modifier.labels) if tree.modifier else set()
            if lost := sorted(wanted - grouped):
                yield f"needs {', '.join(lost)} of what is summed up without it"
            inner, wanted = [tree.expr], grouped
        case promql_parser.BinaryExpr():
            inner = [tree.lhs, tree.rhs]
        case promql_parser.Call():
            inner = tree.args
            wanted = wanted | {"le"} if tree.func.name == "histogram_quantile" else wanted
        case promql_parser.MatrixSelector():
            inner = [tree.vector_selector]
        case promql_parser.ParenExpr() | promql_parser.UnaryExpr() | promql_parser.SubqueryExpr():
            inner = [tree.expr]
    for one in inner:
        yield from _tree_errors(one, known, wanted)


def dashboards() -> Iterator[str]:
    """What is wrong with the dashboards' queries and data sources."""
    known = samples()
    sources = load(OBSERVABILITY / "grafana/provisioning/datasources/datasources.yaml")
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
    for group in yaml.safe_load((OBSERVABILITY / "alerts.yaml").read_text())["groups"]:
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
    """What Prometheus scrapes and is not there, and parts that the collector does not define."""
    ours = load(BASE)["services"]
    services = {name for file in (BASE, *OVERLAYS) for name in load(file)["services"]}
    for job in load(OBSERVABILITY / "prometheus.yaml")["scrape_configs"]:
        for found in job.get("dns_sd_configs", ()):
            for name in found["names"]:
                environment = ours.get(name, {}).get("environment", {})
                if str(found["port"]) != environment.get("BATON_OPT_METRICS_PORT"):
                    yield f"prometheus.yaml: {name} serves no metrics at {found['port']}"
        for group in job.get("static_configs", ()):
            for host in (target.partition(":")[0] for target in group["targets"]):
                if host not in {*services, "localhost"}:
                    yield f"prometheus.yaml: there is no service {host}"
    config = load(OBSERVABILITY / "collector.yaml")
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


if __name__ == "__main__":
    sys.exit(main())
