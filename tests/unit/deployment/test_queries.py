"""Queries that Prometheus would answer with nothing; alerts; what is scraped and collected."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import promql_parser
import pytest

from baton.telemetry.metrics import instruments
from tests.unit.deployment.files import BASE, COMPOSE, OVERLAYS, load, merge

OBSERVABILITY = COMPOSE / "observability"
FOREIGN_PORTS = {"dcgm-exporter": "9400", "haproxy": "8404"}
SCRAPED = {"job", "instance"}  # the labels of every scraped sample
FOREIGN = ("up", "etcd_server_has_leader", "etcd_mvcc_db_total_size_in_bytes")
# What Grafana substitutes before it sends a query.
GRAFANA = {"$__rate_interval": "5m", "$job": "prefill", "$instance": ".*"}
LIST = re.compile(r"label_values\((?P<selector>.+), (?P<label>\w+)\)")
TTFT = "gen_ai_server_time_to_first_token_seconds"
DURATION = "gen_ai_server_request_duration_seconds_count"


def samples():
    """The labels of each name that a query may use."""
    known = dict.fromkeys(FOREIGN, SCRAPED)
    for instrument in instruments.INSTRUMENTS:
        labels = SCRAPED | {name.replace(".", "_") for name in instrument.attributes}
        for name in instrument.samples:
            known[name] = labels | {"le"} if name.endswith("_bucket") else labels
    return known


KNOWN = samples()


def query_errors(expr):
    """What is wrong with an expression, a dashboard's variables and lists included."""
    for variable, value in GRAFANA.items():
        expr = expr.replace(variable, value)
    if listed := LIST.fullmatch(expr):
        expr = f"sum by ({listed['label']}) ({listed['selector']})"
    try:
        return list(tree_errors(promql_parser.parse(expr), set()))
    except ValueError as error:
        return [f"is not PromQL: {error}"]


def tree_errors(tree, wanted):
    """`wanted` are the labels that the surrounding expression needs."""
    inner = ()
    match tree:
        case promql_parser.VectorSelector():
            used = wanted | {matcher.name for matcher in tree.matchers.matchers}
            if (labels := KNOWN.get(tree.name or "")) is None:
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
        yield from tree_errors(one, wanted)


def test_dashboards_query_what_is_exported_from_sources_that_exist():
    sources = load(OBSERVABILITY / "grafana/provisioning/datasources/datasources.yaml")
    uids = {source["uid"] for source in sources["datasources"]}
    files = sorted((OBSERVABILITY / "grafana/dashboards").glob("*.json"))
    assert files
    for file in files:
        page = json.loads(file.read_text())
        queries = [(item["name"], item["definition"]) for item in page["templating"]["list"]]
        for panel in page["panels"]:
            queries += [(panel["title"], target["expr"]) for target in panel.get("targets", ())]
            assert "datasource" not in panel or panel["datasource"]["uid"] in uids, panel["title"]
        for title, expr in queries:
            assert not query_errors(expr), (file.name, title)


def test_alerts_are_good():
    groups = load(OBSERVABILITY / "alerts.yaml")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert not query_errors(rule["expr"]), rule["alert"]
        assert rule["labels"].get("severity") in ("page", "ticket"), rule["alert"]
        assert {"summary", "description"} <= rule["annotations"].keys(), rule["alert"]


def test_prometheus_scrapes_services_that_exist():
    services = {}
    for file in (BASE, *OVERLAYS):
        services = merge(services, load(file)["services"])
    for job in load(OBSERVABILITY / "prometheus.yaml")["scrape_configs"]:
        for found in job.get("dns_sd_configs", ()):
            for name in found["names"]:
                variables = services[name].get("environment", {})
                assert variables.get("BATON_OPT_METRICS_PORT", FOREIGN_PORTS.get(name)) == str(
                    found["port"]
                )
        for group in job.get("static_configs", ()):
            hosts = {target.partition(":")[0] for target in group["targets"]}
            assert hosts <= {*services, "localhost"}


def test_the_collectors_pipelines_use_parts_that_it_defines():
    config = load(OBSERVABILITY / "collector.yaml")
    for pipeline in config["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= config[kind].keys()


@pytest.mark.parametrize(
    ("expr", "error"),
    [
        (f"histogram_quantile(0.9, sum by (le) (rate({TTFT}_bucket[5m])))", None),
        (f"rate({TTFT}[5m])", "not exported"),  # a histogram has no sample of its own name
        ("1 + (sum by (tenant) (baton_requests_queued))", "tenant"),
        (f"histogram_quantile(0.9, sum(rate({TTFT}_bucket[5m])))", "summed up without it"),
        ("rate(up)", "is not PromQL"),
    ],
)
def test_a_query_that_cannot_be_answered_is_an_error(expr, error):
    found = query_errors(expr)
    assert len(found) == (error is not None) and (error or "") in "".join(found)


needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="needs promtool, of Prometheus"
)


@needs_promtool
@pytest.mark.parametrize(
    ("file", "title", "failure", "shown"),
    [
        ("overview", "Requests that failed", f'{DURATION}{{error_type="X"}}', [0, 0.5]),
        ("kv-transfer", "Failures", 'baton_kv_transfer_failures_total{reason="X"}', [0, 1 / 60]),
    ],
)
def test_failures_are_shown_as_0_before_the_first(tmp_path, file, title, failure, shown):
    """Their series begin with it."""
    page = json.loads((OBSERVABILITY / f"grafana/dashboards/{file}.json").read_text())
    (panel,) = (one for one in page["panels"] if one["title"] == title)
    expr = panel["targets"][0]["expr"].replace("$__rate_interval", "5m")
    series = {f'{DURATION}{{error_type=""}}': "0+1x40", 'baton_kv_blocks{state="free"}': "8x40"}
    series[failure] = "_x20 0+1x20"
    tests = [
        {"expr": f"sum({expr})", "eval_time": time, "exp_samples": [{"labels": "{}", "value": one}]}
        for time, one in zip(("10m", "35m"), shown, strict=True)
    ]
    tests += [
        {"expr": f"count({expr})", "eval_time": time, "exp_samples": [{"labels": "{}", "value": 1}]}
        for time in ("10m", "35m")
    ]
    given = [{"series": name, "values": values} for name, values in series.items()]
    asked = {"interval": "1m", "input_series": given, "promql_expr_test": tests}
    (tmp_path / "tests.yaml").write_text(json.dumps({"tests": [asked]}))
    argv = ["promtool", "test", "rules", tmp_path / "tests.yaml"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize(
    "argv",
    [
        ("check", "config", OBSERVABILITY / "prometheus.yaml"),
        ("test", "rules", Path(__file__).parent / "alerts.yaml"),
    ],
)
def test_prometheus_takes_its_files_and_alerts_fire_when_they_should_and_not_before(argv):
    done = subprocess.run(["promtool", *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
