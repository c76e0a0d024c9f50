"""The Helm chart: what it renders is valid, and says what the program understands."""

import asyncio
import copy
import functools
import itertools
import json
import re
import shlex
import tarfile
from urllib.parse import urlsplit

import pytest

from baton.cli import options
from baton.cli.main import parser
from baton.config import PlannerConfig, RouterConfig, WorkerConfig
from tests.helm.chart import CHART, api_server, install, installed
from tests.helm.pod import ENTRYPOINT, Pod, templates
from tests.unit.deployment.files import BASE, COMPOSE, load

ALERTS = COMPOSE / "observability/alerts.yaml"
DASHBOARDS = COMPOSE / "observability/grafana/dashboards"
DEVELOPMENT = {"etcd": {"development": {"enabled": True}}}
SECRETS = {"router": "router-tls", "worker": "worker-tls", "admin": "admin-tls"}
EVERYTHING = {
    "etcd": {
        "endpoints": ["https://etcd-0.etcd:2379", "https://etcd-1.etcd:2379"],
        "tlsSecret": "etcd-tls", "user": "root", "passwordSecret": "etcd-password",
    },
    "image": {"pullSecrets": ["registry"]},
    "model": {
        "path": "/models/large", "name": "large",
        "volume": {"persistentVolumeClaim": {"claimName": "models"}},
    },
    "options": {"otlp": "http://collector:4317", "trace-sample": 0.1},
    "tls": {"enabled": True, "certManager": {"enabled": True, "issuerRef": {"name": "ca"}}},
    "router": {"replicas": 1, "tenantsSecret": "tenants", "batchClaim": "batches"},
    "planner": {"enabled": True, "apply": True, "apiKeySecret": "operator"},
    "workers": {
        "prefill": {"autoscaling": {"enabled": True}},
        "decode": {
            "hosts": 2, "options": {"tp": 16}, "autoscaling": {"enabled": True},
            "exclusiveTopologyKey": "nvidia.com/gpu.clique", "runtimeClassName": "nvidia",
        },
        "spare": {"role": "mixed", "nodeSelector": {"pool": "spare"}},
    },
    "monitoring": {
        "podMonitors": True, "rules": True, "dashboards": True, "labels": {"release": "prometheus"},
    },
}  # fmt: skip
OPERATORS = {  # module of cloudcoil.models: kinds
    "cert_manager.v1": ("Certificate",),
    "keda.v1alpha1": ("ScaledObject", "TriggerAuthentication"),
    "prometheus_operator.v1": ("PodMonitor", "PrometheusRule"),
}
# The fields of leaderworkerset.x-k8s.io/v1 but those of pods, claims and metadata: written by hand
# after its API's documentation, as no package has its models.
COUNT, ANYTHING = {"type": "integer", "minimum": 0}, {"type": "object"}
COUNT_OR_SHARE = {"anyOf": [COUNT, {"type": "string", "pattern": "^[0-9]+%$"}]}


def fields(required=(), **properties):
    """A schema of an object that has no other fields."""
    return {
        "type": "object", "properties": properties, "required": list(required),
        "additionalProperties": False,
    }  # fmt: skip


LEADER_WORKER_SET = fields(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "leaderworkerset.x-k8s.io/v1"},
    kind={"const": "LeaderWorkerSet"},
    metadata=ANYTHING,
    spec=fields(
        ("leaderWorkerTemplate",),
        replicas=COUNT,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        networkConfig=fields(
            ("subdomainPolicy",), subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}
        ),
        rolloutStrategy=fields(
            ("type",),
            type={"enum": ["RollingUpdate"]},
            rollingUpdateConfiguration=fields(
                partition=COUNT, maxUnavailable=COUNT_OR_SHARE, maxSurge=COUNT_OR_SHARE
            ),
        ),
        leaderWorkerTemplate=fields(
            ("workerTemplate",),
            leaderTemplate=ANYTHING,
            workerTemplate=ANYTHING,
            size={"type": "integer", "minimum": 1},
            restartPolicy={
                "enum": [
                    "Default",
                    "RecreateGroupOnPodRestart",
                    "RecreateGroupAfterStart",
                    "None",
                ]
            },
            subGroupPolicy=fields(
                subGroupPolicyType={"enum": ["LeaderWorker", "LeaderExcluded"]},
                subGroupSize={"type": "integer", "minimum": 1},
            ),
            volumeClaimTemplates={"type": "array", "items": ANYTHING},
            persistentVolumeClaimRetentionPolicy=ANYTHING,
        ),
    ),
)
CONFIGS = {"router": RouterConfig, "worker": WorkerConfig, "planner": PlannerConfig}
CASES = {
    "defaults": ((), DEVELOPMENT),
    "chat": (("chat",), DEVELOPMENT),
    "batch": (("batch",), {**DEVELOPMENT, "router": {"batchClaim": "batches"}}),
    "agent": (("agent",), DEVELOPMENT),
    "gpu": (("gpu",), DEVELOPMENT),
    "gpu chat": (("gpu", "chat"), DEVELOPMENT),
    "storage": ((), {"etcd": {"development": {"enabled": True, "storage": "1Gi"}}}),
    "TLS": ((), {**DEVELOPMENT, "tls": {"enabled": True, "secrets": SECRETS}}),
    "router processes": (
        (),
        {
            **DEVELOPMENT, "router": {"options": {"router-processes": 4}},
            "planner": {"enabled": True}, "monitoring": {"podMonitors": True},
        },
    ),
    "everything": (("gpu", "agent"), EVERYTHING),
}  # fmt: skip


@pytest.fixture(scope="module")
def rendered():
    return {name: install(*profiles, **values) for name, (profiles, values) in CASES.items()}


@pytest.fixture(scope="module")
def validate():
    """`kubernetes_validate.validate`, which reads each file of schemas once."""
    utils = pytest.importorskip("kubernetes_validate.utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield utils.validate


def kinds(created, kind):
    return {one["metadata"]["name"]: one for one in created if one["kind"] == kind}


@pytest.mark.parametrize("version", ["1.33", "1.34", "1.35", "1.36", "1.37"])
def test_objects_follow_the_schemas_of_kubernetes(rendered, validate, version):
    own = ("v1", "apps/v1", "policy/v1", "networking.k8s.io/v1")
    for created in rendered.values():
        for one in created:
            if one["apiVersion"] in own:
                validate(one, version, strict=True)


def test_objects_follow_the_schemas_of_operators(rendered):
    models = {
        kind: getattr(pytest.importorskip(f"cloudcoil.models.{module}"), kind)
        for module, kinds in OPERATORS.items()
        for kind in kinds
    }
    seen = set()
    for one in rendered["everything"]:
        if model := models.get(one["kind"]):
            understood = model.model_validate(one).model_dump(
                mode="json", by_alias=True, exclude_unset=True
            )
            assert understood["spec"] == one["spec"]  # models drop what they do not know
            seen.add(one["kind"])
    assert seen == models.keys()


@pytest.mark.parametrize("version", ["1.33", "1.37"])
def test_a_worker_on_several_hosts_follows_the_schemas_of_its_set_and_of_pods(
    rendered, validate, version
):
    jsonschema = pytest.importorskip("jsonschema")
    (one,) = kinds(rendered["everything"], "LeaderWorkerSet").values()
    jsonschema.validate(one, LEADER_WORKER_SET)
    group = one["spec"]["leaderWorkerTemplate"]
    for name in ("leaderTemplate", "workerTemplate"):
        head = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}}
        validate({**head, "template": group[name]}, version, strict=True)


def configured(pod, monkeypatch):
    """What the program makes of a pod's arguments and variables. Raises SystemExit, BatonError."""
    with monkeypatch.context() as patched:
        for name, value in pod.environment({}).items():
            patched.setenv(name, value)
        args = parser().parse_args(pod.argv({})[len(ENTRYPOINT) :])
        return options.settings(CONFIGS[args.command], args.command, args)


def metrics_ports(config):
    """Names of the ports at which a pod's processes serve metrics."""
    count = getattr(config, "router_processes", 1)
    return ["metrics", *(f"metrics-{number}" for number in range(2, count + 1))]


@pytest.mark.parametrize("case", CASES)
def test_the_program_takes_every_option(rendered, case, monkeypatch, tmp_path):
    injected = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
    for name, template in templates(rendered[case]).items():
        pod = Pod(name, template, tmp_path, "127.0.0.1", injected=injected)
        if pod.container["name"] == "etcd":
            continue
        config = configured(pod, monkeypatch)
        named = {one["name"]: one["containerPort"] for one in pod.container["ports"]}
        assert len(set(named.values())) == len(named)
        assert named.pop("grpc") == config.port
        for number, metrics in enumerate(metrics_ports(config)):
            assert named.pop(metrics) == config.metrics_port + number
        assert named.pop("health") == config.health_port
        assert named.pop("http", None) == getattr(config, "http_port", None)
        assert not named
        preparing = pod.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {})
        stopping = preparing.get("seconds", 0) + getattr(config, "drain_s", 0)
        assert stopping + 10 <= pod.spec["terminationGracePeriodSeconds"]


def selected(selector, labels):
    """Whether a selector of Kubernetes matches labels."""
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        one["operator"] == "In" and labels.get(one["key"]) in one["values"]
        for one in selector.get("matchExpressions", ())
    )


def selectors(one):
    """The selectors of an object that have to find pods of this release."""
    spec = one.get("spec", {})
    if one["kind"] == "Service":
        yield {"matchLabels": spec["selector"]}
    for name in ("selector", "podSelector"):
        if one["kind"] != "Service" and name in spec:
            yield spec[name]
    pod = spec.get("template", {}).get("spec", {})
    for term in pod.get("topologySpreadConstraints", ()):
        yield term["labelSelector"]
    affinity = pod.get("affinity", {}).get("podAffinity", {})
    for term in affinity.get("preferredDuringSchedulingIgnoredDuringExecution", ()):
        yield term["podAffinityTerm"]["labelSelector"]


@pytest.mark.parametrize("case", CASES)
def test_what_selects_pods_finds_some_and_names_ports_that_they_have(rendered, case):
    pods = list(templates(rendered[case]).values())
    for one in rendered[case]:
        for selector in selectors(one):
            found = [pod for pod in pods if selected(selector, pod["metadata"]["labels"])]
            monitors_nothing = one["kind"] == "PodMonitor" and case == "everything"
            assert found or (monitors_nothing and one["metadata"]["name"].endswith("-etcd")), one
            named = set()
            for pod in found:
                named |= {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
            spec = one["spec"]
            wanted = {port["targetPort"] for port in spec.get("ports", ())}
            wanted |= {end["port"] for end in spec.get("podMetricsEndpoints", ())}
            wanted |= {
                port["port"] for rule in spec.get("ingress", ()) for port in rule.get("ports", ())
            }
            assert not found or wanted <= named, one


@pytest.mark.parametrize("case", ["router processes", "everything"])
def test_all_ports_of_metrics_are_scraped_and_open_to_prometheus(rendered, case):
    for name, template in templates(rendered[case]).items():
        (container,) = template["spec"]["containers"]
        names = {one["name"] for one in container["ports"] if one["name"].startswith("metrics")}

        def matching(kind, labels=template["metadata"]["labels"]):
            specs = [one["spec"] for one in kinds(rendered[case], kind).values()]
            return [
                spec for spec in specs
                if selected(spec.get("selector") or spec["podSelector"], labels)
            ]  # fmt: skip

        if "/rank" not in name:  # ranks serve no metrics
            (monitor,) = matching("PodMonitor")
            assert [one["port"] for one in monitor["podMetricsEndpoints"]] == sorted(names)
        (policy,) = matching("NetworkPolicy")
        assert names <= {
            port["port"] for rule in policy["ingress"] for port in rule.get("ports", ())
        }


@pytest.mark.parametrize("case", CASES)
def test_pods_have_no_privileges_and_are_probed_without_tls(rendered, case):
    for name, template in templates(rendered[case]).items():
        pod, (container,) = template["spec"], template["spec"]["containers"]
        assert pod["automountServiceAccountToken"] is False
        assert (
            pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001
        )
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"] and container["resources"]["limits"]["memory"]
        probes = [container[key] for key in container if key.endswith("Probe")]
        assert bool(probes) != name.endswith("/rank")  # ranks listen only for their first host
        for probe in probes:
            assert probe["httpGet"]["port"] == ("metrics" if "etcd" in name else "health")
            assert "scheme" not in probe["httpGet"]
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        if template["metadata"]["labels"]["app.kubernetes.io/component"] in ("prefill", "decode"):
            assert pod.get("hostIPC", False) != ("/dev/shm" in mounts)


def test_values_of_profiles_take_the_place_of_defaults(rendered):
    """Also empty ones and zero."""
    gpu = kinds(rendered["gpu"], "Deployment")["chat-baton-decode"]["spec"]
    names = {one["name"] for one in gpu["template"]["spec"]["containers"][0]["env"]}
    assert "BATON_OPT_KV_CACHE" not in names and {"BATON_OPT_GPU_MEMORY", "NCCL_HOSTID"} <= names
    assert gpu["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert kinds(rendered["chat"], "Deployment")["chat-baton-decode"]["spec"]["replicas"] == 3
    gone = install(**DEVELOPMENT, workers={"prefill": {"replicas": 0}})
    assert "chat-baton-prefill" not in kinds(gone, "Deployment")


def test_alerts_and_dashboards_are_those_of_compose(rendered):
    files = {file.name: file.read_text() for file in DASHBOARDS.glob("*.json")}
    maps = kinds(rendered["everything"], "ConfigMap").values()
    shown = {name: text for one in maps for name, text in one["data"].items()}
    assert {name: json.loads(text) for name, text in shown.items()} == {
        name: json.loads(text) for name, text in files.items()
    }
    assert groups_of(rendered["everything"]) == [
        group for group in load(ALERTS)["groups"] if group["name"] != "baton-registry"
    ]
    scraped = install(**DEVELOPMENT, monitoring={"rules": True})
    assert groups_of(scraped) == load(ALERTS)["groups"]


def groups_of(objects):
    """The groups of alerts without the namespace that each of their metrics has."""
    (rules,) = kinds(objects, "PrometheusRule").values()
    own = f'{{namespace="{rules["metadata"].get("namespace", "default")}", '
    groups = copy.deepcopy(rules["spec"]["groups"])
    for rule in (rule for group in groups for rule in group["rules"]):
        metrics = r"\b(?:up|(?:baton_(?!model_version)|gen_ai_server_|etcd_server_)\w+)\b"
        assert re.findall(metrics, rule["expr"]), rule["alert"]
        assert re.findall(f"{metrics}(?!{re.escape(own)})", rule["expr"]) == [], rule["alert"]
        rule["expr"] = rule["expr"].replace(own, "{")
    return groups


def test_jobs_of_queries_are_components_that_are_scraped(rendered):
    """PodMonitors name a job by the component, and rules and dashboards query these names.

    A query of several jobs is of all workers, or of all that is Baton's, perhaps but workers: it
    leaves none out.
    """
    texts = [ALERTS.read_text(), *(file.read_text() for file in DASHBOARDS.glob("*.json"))]
    queried = [
        set(jobs.split("|")) for text in texts for jobs in re.findall(r'job=~?\\?"([^"$\\]+)', text)
    ]
    scraped = {}
    for name, monitor in kinds(rendered["everything"], "PodMonitor").items():
        assert monitor["spec"]["jobLabel"] == "app.kubernetes.io/component"
        (one,) = monitor["spec"]["selector"]["matchExpressions"]
        scraped[name.removeprefix("chat-baton-")] = set(one["values"])
    everything = set().union(*scraped.values())
    assert set().union(*queried) <= everything
    several = [jobs for jobs in queried if len(jobs) > 1]
    for jobs in several:
        assert jobs | scraped["worker"] in (scraped["worker"], everything - scraped["etcd"])
    assert several


def test_etcd_is_that_of_compose(rendered):
    (made,) = kinds(rendered["defaults"], "StatefulSet").values()
    (container,) = made["spec"]["template"]["spec"]["containers"]
    ours = load(BASE)["services"]["etcd"]
    assert container["image"] == ours["image"]

    def settings(argv):
        own = ("--advertise-client-urls", "--data-dir")  # of its host
        return [one for one in argv if not one.startswith(own)]

    assert settings(container["command"]) == settings(ours["command"])


def test_keda_asks_the_planner_for_workers_that_exist(rendered):
    created = rendered["everything"]
    scaled = kinds(created, "ScaledObject")
    for name, one in scaled.items():
        target = one["spec"]["scaleTargetRef"]
        owner = kinds(created, target.get("kind", "Deployment"))[target["name"]]
        assert target.get("apiVersion", "apps/v1") == owner["apiVersion"]
        assert "replicas" not in owner["spec"], name  # a new release would undo KEDA's number
        (trigger,) = one["spec"]["triggers"]
        host, port = trigger["metadata"]["scalerAddress"].split(":")
        service = kinds(created, "Service")[host.split(".")[0]]
        assert int(port) in [one["port"] for one in service["spec"]["ports"]]
        assert trigger["authenticationRef"]["name"] in kinds(created, "TriggerAuthentication")
    assert {one["spec"]["triggers"][0]["metadata"]["role"] for one in scaled.values()} == {
        "prefill", "decode"
    }  # fmt: skip


def test_certificates_have_the_names_that_callers_check(rendered):
    names = {
        one["spec"]["secretName"]: set(one["spec"]["dnsNames"])
        for one in kinds(rendered["everything"], "Certificate").values()
    }
    assert {"router.baton", "chat-baton-router", "chat-baton-routers"} <= names[
        "chat-baton-router-tls"
    ]
    assert names["chat-baton-worker-tls"] == {"worker.baton"}
    assert {"admin.baton", "chat-baton-planner.serving"} <= names["chat-baton-admin-tls"]
    mounted = {
        volume["secret"]["secretName"]
        for pod in templates(rendered["everything"]).values()
        for volume in pod["spec"]["volumes"]
        if volume["name"] == "tls"
    }
    assert mounted == names.keys()


def test_the_documented_certificates_have_the_names_that_callers_check(rendered):
    page = (COMPOSE.parent / "docs/kubernetes.md").read_text()
    (command,) = re.findall(r"^baton (certs (?:.*\\\n)*.*)$", page, re.M)
    args = parser().parse_args(shlex.split(command.replace("\\\n", " ")))
    assert {"chat-baton-routers", "chat-baton-router.serving.svc"} <= set(args.host)
    called = {
        trigger["metadata"]["scalerAddress"].partition(":")[0]
        for one in kinds(rendered["everything"], "ScaledObject").values()
        for trigger in one["spec"]["triggers"]
    }
    assert called <= set(args.planner_host)


MISTAKES = [
    ({}, "etcd.endpoints is empty"),
    ({**DEVELOPMENT, "etcd": {"endpoints": ["etcd"]}}, "/etcd/endpoints/0"),
    ({"etcd": {"endpoints": ["e:1"], "development": {"enabled": True}}}, "either etcd.endpoints"),
    ({"etcd": {"endpoints": ["e:1"], "user": "root"}}, "etcd.user needs etcd.passwordSecret"),
    (
        {"etcd": {"endpoints": ["e:1"], "passwordSecret": "p"}},
        "etcd.passwordSecret needs etcd.user",
    ),
    ({**DEVELOPMENT, "routers": {}}, "'routers' not allowed"),
    ({**DEVELOPMENT, "router": {"replicas": 0}}, "/router/replicas"),
    ({**DEVELOPMENT, "router": {"replicas": 2, "batchClaim": "b"}}, "router.replicas 1"),
    ({**DEVELOPMENT, "router": {"options": {"--slo": "x"}}}, "'--slo'"),
    ({**DEVELOPMENT, "options": {"drain-timeout": 600}}, "drain-timeout out: set drainSeconds"),
    *(
        ({**DEVELOPMENT, "router": {"options": {name: 1}}}, f"leave {name} out: the chart's")
        for name in ("host", "port", "http-port", "health-port", "metrics-port", "advertise")
    ),
    (
        {**DEVELOPMENT, "planner": {"enabled": True, "options": {"etcd": "e:1"}}},
        "leave etcd out: set etcd.endpoints",
    ),
    (
        {**DEVELOPMENT, "workers": {"decode": {"options": {"cluster": "x"}}}},
        "leave cluster out: set cluster",
    ),
    *(
        ({**DEVELOPMENT, "workerDefaults": {"options": {name: 1}}}, f"{name} out: set workers.")
        for name in ("role", "nnodes", "node-rank")
    ),
    ({**DEVELOPMENT, "model": {"path": "llama"}}, "/model/path"),
    ({**DEVELOPMENT, "workers": {"decode": {"role": "decoder"}}}, "'prefill', 'decode', 'mixed'"),
    ({**DEVELOPMENT, "workers": {"Decode_1": {}}}, "Decode_1"),
    ({**DEVELOPMENT, "workers": {"decode": {"autoscaling": {"enabled": True}}}}, "planner.enabled"),
    (
        {
            **DEVELOPMENT, "planner": {"enabled": True},
            "workerDefaults": {"role": "decode", "autoscaling": {"enabled": True}},
            "workers": {"more": {}},
        },
        "another group of role decode",
    ),
    (
        {
            **DEVELOPMENT, "planner": {"enabled": True},
            "workers": {"decode": {"autoscaling": {"enabled": True, "minReplicas": 10}}},
        },
        "workers.decode.autoscaling: minReplicas 10 is above maxReplicas 8",
    ),
    *(
        ({**DEVELOPMENT, "workers": {name: {}}}, f"workers.{name}: the chart's own")
        for name in ("router", "routers", "planner", "etcd")
    ),
    (
        {**DEVELOPMENT, "router": {"tenantsSecret": "t"}, "planner": {"enabled": True}},
        "planner.apiKeySecret",
    ),
    ({**DEVELOPMENT, "tls": {"enabled": True}}, "tls.secrets.router"),
    (
        {
            **DEVELOPMENT, "tls": {"enabled": True, "secrets": {**SECRETS, "admin": ""}},
            "monitoring": {"podMonitors": True},
        },
        "tls.secrets.admin",
    ),
    (
        {
            **DEVELOPMENT,
            "tls": {"certManager": {"enabled": True, "issuerRef": {"name": "ca"}}},
        },
        "tls.certManager.enabled needs tls.enabled",
    ),
    (
        {**DEVELOPMENT, "tls": {"clientCertificates": True}},
        "tls.clientCertificates needs tls.enabled",
    ),
    (
        {**DEVELOPMENT, "tls": {"enabled": True, "certManager": {"enabled": True}}},
        "issuerRef.name",
    ),
    ({**DEVELOPMENT, "workerDefaults": {"sharedMemory": {"size": "1 GB"}}}, "sharedMemory/size"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "error"), MISTAKES, ids=[error for _, error in MISTAKES])
def test_a_mistake_is_an_error_that_names_the_value(values, error):
    with pytest.raises(Exception, match=re.escape(error)) as caught:
        install(**values)
    assert type(caught.value).__name__ == "InstallError"


@pytest.mark.parametrize(
    ("most", "values"),
    [
        (63 - len("-baton-routers"), {}),
        (52 - len("-baton-etcd"), DEVELOPMENT),
        (48 - len("-baton-decode"), {"workers": {"decode": {"hosts": 2}}}),
    ],
    ids=["services", "etcd", "several hosts"],
)
def test_a_release_has_names_that_kubernetes_takes(most, values):
    """63 characters for a Service; fewer for a StatefulSet, whose pods have labels with a hash."""
    given = {"etcd": {"endpoints": ["e:1"]}, **values}
    created, _ = installed(release="r" * most, **given)
    assert all(len(name) <= 63 for name in kinds(created, "Service"))
    with pytest.raises(Exception, match="choose a shorter name for the release or the group"):
        installed(release="r" * (most + 1), **given)


@pytest.mark.parametrize("case", CASES)
def test_every_pod_has_one_budget_and_a_group_its_own(rendered, case):
    """Also a rank, whose end restarts its whole group; a pod of two budgets cannot be evicted."""
    budgets = kinds(rendered[case], "PodDisruptionBudget")
    for name, template in templates(rendered[case]).items():
        labels = template["metadata"]["labels"]
        found = [
            budget for budget, one in budgets.items()
            if selected(one["spec"]["selector"], labels)
        ]  # fmt: skip
        assert found == ([] if name.endswith("-etcd") else [name.removesuffix("/rank")])


@pytest.mark.parametrize("keys", [False, True], ids=["", "keys"])
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
def test_commands_of_the_notes_have_the_names_and_keys_that_a_release_needs(rendered, tls, keys):
    everything = EVERYTHING if tls else DEVELOPMENT
    values = {
        **everything,
        "router": {"replicas": 1, "tenantsSecret": "tenants" if keys else ""},
        "planner": {"enabled": True, "apiKeySecret": "operator"},
        "tls": {**everything.get("tls", {}), "clientCertificates": tls},
    }
    _, notes = installed(**values)
    lines = notes.replace("\\\n", " ").splitlines()
    curl, status = (
        shlex.split(next(line for line in lines if line.strip().startswith(program)))
        for program in ("curl", "baton status")
    )
    url = urlsplit(curl[1])
    asked = parser().parse_args(status[1:])
    assert ("Authorization: Bearer $API_KEY" in curl) == keys
    assert any("BATON_API_KEY" in line for line in lines) == keys
    if not tls:
        assert url.netloc == "127.0.0.1:7780" and url.scheme == "http" and not asked.tls_ca
        return
    certificate = kinds(rendered["everything"], "Certificate")["chat-baton-router"]["spec"]
    assert {url.hostname, asked.tls_name} <= set(certificate["dnsNames"])
    given = dict(itertools.pairwise(curl))
    assert given["--resolve"] == f"{url.netloc}:127.0.0.1" and url.scheme == "https"
    assert given["--cacert"] == str(asked.tls_ca) == "ca.crt"
    assert (given["--cert"], given["--key"]) == (str(asked.tls_cert), str(asked.tls_key))
    assert any(certificate["secretName"] in line and "> ca.crt" in line for line in lines)


def test_a_planner_with_tenants_may_have_its_key_from_elsewhere():
    key = {"name": "BATON_API_KEY", "valueFrom": {"secretKeyRef": {"name": "k", "key": "planner"}}}
    planner = {"enabled": True, "env": [key]}
    assert install(**DEVELOPMENT, router={"tenantsSecret": "t"}, planner=planner)


def test_the_image_of_a_chart_from_a_package_has_all_files(tmp_path):
    """`helm package` follows the links to compose's files."""
    helm_sdkpy = pytest.importorskip("helm_sdkpy")
    with api_server() as (kubeconfig, _), helm_sdkpy.Configuration("x", kubeconfig) as known:
        path = asyncio.run(helm_sdkpy.Package(known).run(str(CHART), str(tmp_path)))
    with tarfile.open(path) as archive:
        names = set(archive.getnames())
    assert {"baton/alerts.yaml", "baton/dashboards/overview.json"} <= names
