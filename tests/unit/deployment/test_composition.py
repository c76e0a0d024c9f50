"""The check of compose files finds what would fail, or quietly do nothing, when they are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import requirements
import yaml
from check_deployment import BASE, COMPOSE, OVERLAYS, compose_errors, load, merge, schema_errors


def told(tmp_path: Path, overlay: str) -> str:
    """What is said of our base file with this laid over it."""
    file = tmp_path / "compose.over.yaml"
    file.write_text(overlay)
    return "\n".join(compose_errors(BASE, [file]))


def test_our_files_are_good() -> None:
    assert len(OVERLAYS) == 3
    assert not [*schema_errors(BASE, *OVERLAYS), *compose_errors(BASE, OVERLAYS)]


def test_a_key_that_compose_does_not_know_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text("services: {prefill: {imagine: x}}")
    assert "imagine" in "\n".join(schema_errors(file))


@pytest.mark.parametrize(
    ("overlay", "complaint"),
    [
        ("services: {prefil: {environment: {}}}", "prefil: has no image"),
        ("services: {decode: {ports: ['7700:7700']}}", "published port"),
        ("services: {decode: {container_name: decode}}", "prevents --scale"),
        ("services: {decode: {secrets: [key]}}", "secret key"),
        ("services: {decode: {depends_on: [ectd]}}", "ectd"),
        ("services: {etcd: {volumes: ['./nowhere:/x']}}", "./nowhere"),
        ("services: {decode: {environment: {BATON_OPT_KVCACHE: 1GiB}}}", "--kvcache"),
        ("services: {decode: {environment: {BATON_OPT_THREADS: many}}}", "--threads"),
        ("services: {router-1: {environment: {BATON_OPT_SLO: 'ttft=soon'}}}", "soon"),
        ("services: {prefill: {environment: {BATON_OPT_ETCD: nowhere}}}", "--etcd"),
    ],
)
def test_a_mistake_is_told(tmp_path: Path, overlay: str, complaint: str) -> None:
    assert complaint in told(tmp_path, overlay)


@pytest.fixture(scope="module")
def gpu_workers() -> dict[str, Any]:
    """The workers of the GPU overlay, by service, laid over ours."""
    over = load(COMPOSE / "compose.gpu.yaml")["services"]
    under = load(BASE)["services"]
    return {name: merge(under.get(name, {}), over[name]) for name in over}


def test_each_gpu_worker_sees_every_gpu_and_takes_one_of_its_own(
    gpu_workers: dict[str, Any],
) -> None:
    """What cuda_ipc and NCCL need of containers, so that KV never falls to sockets unsaid."""
    devices = []
    for settings in gpu_workers.values():
        (asked,) = settings["deploy"]["resources"]["reservations"]["devices"]
        assert asked["count"] == "all" and asked["capabilities"] == ["gpu"]
        assert (settings["pid"], settings["ipc"]) == ("host", "host")
        assert settings["ulimits"]["memlock"] == -1
        environment = settings["environment"]
        assert "CUDA_VISIBLE_DEVICES" not in environment and environment["NCCL_HOSTID"]
        devices.append(environment["BATON_OPT_DEVICE"])
    assert devices == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


def test_a_gpu_s_memory_is_shared_out_by_its_size(gpu_workers: dict[str, Any]) -> None:
    """The base file's fixed KV cache does not shine through."""
    for settings in gpu_workers.values():
        assert not settings["environment"]["BATON_OPT_KV_CACHE"]
        assert settings["environment"]["BATON_OPT_GPU_MEMORY"] == 0.9


def test_further_gpu_workers_have_what_the_first_ones_have(gpu_workers: dict[str, Any]) -> None:
    """They are written out in full: nothing of the base file may be missing or differ."""
    own = {"BATON_OPT_DEVICE"}
    for first, further in (("prefill", "prefill-2"), ("decode", "decode-2")):
        one, other = gpu_workers[first], gpu_workers[further]
        assert one.keys() | {"profiles", "networks"} == other.keys()
        assert other["networks"] == {"default": {"aliases": [first]}}
        same = one.keys() - {"environment", "volumes"}
        assert {key: one[key] for key in same} == {key: other[key] for key in same}
        assert set(one["volumes"]) == set(other["volumes"])
        environments = (one["environment"], other["environment"])
        ours, theirs = ({k: e[k] for k in e.keys() - own} for e in environments)
        assert ours == theirs


def test_an_empty_value_leaves_its_option_out(tmp_path: Path) -> None:
    overlay = "services: {decode: {environment: {BATON_OPT_NO_SUCH: ''}}}"
    assert not told(tmp_path, overlay)


def test_variables_have_their_defaults(tmp_path: Path) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text("a: ${ONE:-1}-${TWO:-}\nb: ${THREE}")
    assert load(file) == {"a": "1-", "b": None}


def test_the_image_gets_what_the_extras_need() -> None:
    project = {
        "name": "it",
        "dependencies": ["a>=1"],
        "optional-dependencies": {
            "x": ["it[y,z]", "b"],
            "y": ["c"],
            "z": ["a>=1", "d"],
            "no": ["e"],
        },
    }
    assert requirements.requirements(project, ["x"]) == ["a>=1", "b", "c", "d"]


def test_every_service_may_write_nothing_and_wants_no_privilege() -> None:
    services = load(BASE)["services"]
    for name in ("router-1", "router-2", "prefill", "decode"):
        assert services[name]["read_only"] and services[name]["cap_drop"] == ["ALL"], name


def test_published_ports_are_loopback_unless_somebody_says_so() -> None:
    for file in (BASE, *OVERLAYS):
        for name, settings in load(file)["services"].items():
            for port in settings.get("ports", ()):
                assert port.startswith("127.0.0.1:"), (file.name, name)


def test_no_secret_stands_in_a_compose_file() -> None:
    """Only names of files: nothing that looks like a password's value."""
    for file in (BASE, *OVERLAYS):
        content = yaml.safe_load(file.read_text())
        for settings in content["services"].values():
            names = {name.upper() for name in settings.get("environment", {})}
            assert not {name for name in names if "PASSWORD" in name and not name.endswith("_FILE")}
