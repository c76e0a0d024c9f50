"""Dashboards' and alerts' queries on a real Prometheus that scrapes a real cluster."""

import asyncio
import contextlib
import json
import shutil
import signal

import httpx
import pytest
import yaml

from baton.config import RouterLimits
from baton.local import ports
from tests.cluster.oracle import SIMULATED
from tests.processes import running
from tests.unit.deployment.files import COMPOSE, load
from tests.waiting import WAIT_S, eventually

pytestmark = pytest.mark.skipif(
    not shutil.which("prometheus"), reason="needs prometheus, of Debian's package of this name"
)
OBSERVABILITY = COMPOSE / "observability"
ALERTS = OBSERVABILITY / "alerts.yaml"
GRAFANA = {"$__rate_interval": "30s", "$job": "prefill|decode", "$instance": ".*"}
# In queries of panels that are empty while nothing fails, and without routes and canaries.
MAY_BE_EMPTY = (
    "baton_kv_transfer_failures_total",
    'error_type!=""',
    "baton_route_share_ratio",
    "baton_canary_",
)


def configured(jobs):
    """Compose's configuration with this cluster's addresses."""
    config = load(OBSERVABILITY / "prometheus.yaml")
    config["global"] = {
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "evaluation_interval": "1s",
    }
    config["rule_files"] = [str(ALERTS)]
    known = {job["job_name"] for job in config["scrape_configs"]}
    assert jobs.keys() <= known
    config["scrape_configs"] = [
        {"job_name": name, "static_configs": [{"targets": targets}]}
        for name, targets in jobs.items()
    ]
    return yaml.safe_dump(config)


@contextlib.asynccontextmanager
async def prometheus(folder, config):
    """A running Prometheus; the URL of its API."""
    (folder / "prometheus.yaml").write_text(config)
    address = f"127.0.0.1:{ports.free()}"
    async with running(
        "prometheus", f"--config.file={folder}/prometheus.yaml",
        f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}",
        "--enable-feature=exemplar-storage", stderr=asyncio.subprocess.DEVNULL,
    ) as program:  # fmt: skip
        yield f"http://{address}/api/v1"
        assert await program.end(signal.SIGTERM) == 0


def queries():
    """(where, query) of every panel and variable of the dashboards."""
    for file in sorted((OBSERVABILITY / "grafana/dashboards").glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel.get("targets", ()):
                query = target["expr"]
                for variable, value in GRAFANA.items():
                    query = query.replace(variable, value)
                yield f"{file.name}: {panel['title']}", query.replace('="prefill|', '=~"prefill|')


async def test_queries_have_answers_and_no_alert_fires(clusters, simulated, tmp_path):
    # Every prompt is handed over, short as it is: else an alert says that none is.
    limits = RouterLimits(slos=("ttft=60,tpot=60",), local_prefill_max_tokens=0)
    cluster, client = await clusters(alone=True, engine=SIMULATED, metrics_port=0, limits=limits)
    jobs = {
        role: [address for name, address in cluster.metrics.items() if name.startswith(role)]
        for role in ("router", "prefill", "decode")
    }
    jobs["etcd"] = [cluster.etcd_address]
    async with (
        prometheus(tmp_path, configured(jobs)) as url,
        httpx.AsyncClient(timeout=WAIT_S, trust_env=False) as http,
    ):

        async def asked(query):
            answer = (await http.get(f"{url}/query", params={"query": query})).json()
            assert answer["status"] == "success", (query, answer)
            return answer["data"]["result"]

        async def unanswered():
            """Panels without data; a few more requests first."""
            for number in range(3):
                case = simulated.case(60 + number, number, "greedy", 8)
                await client.generate(case.prompt, **case.options)
            try:
                return [
                    (where, query)
                    for where, query in queries()
                    if not await asked(query) and not any(part in query for part in MAY_BE_EMPTY)
                ]
            except httpx.HTTPError:
                return ["it starts"]

        await eventually(unanswered, lambda left: not left, "panels are empty")

        async def rules():
            groups = (await http.get(f"{url}/rules")).json()["data"]["groups"]
            return [rule for group in groups for rule in group["rules"]]

        written = [rule for group in load(ALERTS)["groups"] for rule in group["rules"]]

        def quiet(found):
            """Before the first scrape some are pending."""
            assert {rule["name"] for rule in found} == {rule["alert"] for rule in written}
            return all((rule["health"], rule["state"]) == ("ok", "inactive") for rule in found)

        await eventually(rules, quiet, "alerts fire, or cannot be evaluated")
