"""Compose files: what would fail, or quietly do nothing, when they are used."""

import asyncio
import contextlib
import io
import json
import re
import shutil
import subprocess
import sys

import pytest

from baton.cli.main import parser
from baton.cli.router import router_config
from baton.cli.workers import worker_config
from baton.config.router import MAX_ROUTER_PROCESSES
from baton.errors import BatonError
from baton.net.server import Health
from tests.unit.deployment.files import BASE, COMPOSE, OVERLAYS, load, merge

OPTION = "BATON_OPT_"
WORKERS = ("prefill", "decode", "prefill-2", "decode-2")


def schema_errors(*files):
    """What the compose specification's schema says of compose files."""
    check = (sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec")
    done = subprocess.run([*check, *files], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


def errors_of(base, overlays):
    """What is wrong with a compose file and its overlays, each by itself and all together."""
    under = together = load(base)
    wholes = [under]
    for overlay in overlays:
        wholes.append(merge(under, load(overlay)))
        together = merge(together, load(overlay))
    return [
        f"{name}: {error}"
        for whole in (*wholes, together)
        for name, settings in whole["services"].items()
        for error in service_errors(name, settings, whole)
    ]


def service_errors(name, settings, whole):
    image = settings.get("image", "")
    if not image:
        yield "has no image"
    elif not re.fullmatch(r"baton:\w+|.+:[\w.-]+@sha256:[0-9a-f]{64}", image):
        yield f"{image} is not pinned by digest"
    if settings.get("container_name"):
        yield "a fixed name prevents --scale"
    if name in WORKERS and settings.get("ports"):
        yield "several cannot share a published port"
    for secret in set(settings.get("secrets", ())) - whole.get("secrets", {}).keys():
        yield f"secret {secret} is not declared"
    for other in set(settings.get("depends_on", ())) - whole["services"].keys():
        yield f"depends on {other}, which is not there"
    for source in (volume.partition(":")[0] for volume in settings.get("volumes", ())):
        if source.startswith("./") and not (COMPOSE / source).exists():
            yield f"mounts {source}, which is not there"
    yield from option_errors(settings)


def option_errors(settings):
    """What the program says of the options that the environment names."""
    command = settings.get("command") or [""]
    if command[0] not in ("router", "prefill-worker", "decode-worker"):
        return
    argv = [*command, "--host", "0.0.0.0", "--port", "7700"]
    for name, value in settings.get("environment", {}).items():
        if name.startswith(OPTION) and value not in (None, ""):
            flag = "--" + name.removeprefix(OPTION).lower().replace("_", "-")
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


def test_our_files_are_good():
    assert len(OVERLAYS) == 4
    assert not schema_errors(BASE, *OVERLAYS) and not errors_of(BASE, OVERLAYS)


@pytest.mark.skipif(not shutil.which("docker-compose"), reason="needs docker-compose")
@pytest.mark.parametrize("overlay", [BASE, *OVERLAYS], ids=lambda file: file.name)
def test_docker_compose_takes_them(overlay):
    files = ("--file", BASE, "--file", overlay)
    subprocess.run(["docker-compose", *files, "config", "--quiet"], check=True)


@pytest.mark.parametrize(
    ("overlay", "error"),
    [
        ("services: {prefil: {environment: {}}}", "prefil: has no image"),
        ("services: {decode: {environment: {BATON_OPT_KVCACHE: 1GiB}}}", "--kvcache"),
        ("services: {router-1: {environment: {BATON_OPT_SLO: 'ttft=soon'}}}", "soon"),
        ("services: {decode: {environment: {BATON_OPT_PREFIX_CACHE: 'yes'}}}", None),  # a switch
        ("services: {prefill: {imagine: x}}", "imagine"),
    ],
)
def test_a_mistake_in_an_overlay_is_an_error(tmp_path, overlay, error):
    file = tmp_path / "compose.over.yaml"
    file.write_text(overlay)
    found = schema_errors(file) if error == "imagine" else "\n".join(errors_of(BASE, [file]))
    assert bool(found) == (error is not None) and (error or "") in found


def test_the_documentation_lists_all_variables_and_no_others():
    page = (COMPOSE.parent / "docs/deploy.md").read_text()
    table = page.partition("| variable |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`[^|]*)\|", table, re.M)
    used = re.findall(r"\$\{(\w+)", "".join(file.read_text() for file in (BASE, *OVERLAYS)))
    assert set(re.findall(r"`(\w+)`", "".join(rows))) == set(used)


def whole(*overlays, **variables):
    """Services of the base file under overlays, as compose merges them."""
    merged = load(BASE)
    for overlay in overlays:
        merged = merge(merged, load(COMPOSE / f"compose.{overlay}.yaml", **variables))
    return merged["services"]


def test_further_workers_have_every_overlay():
    """prefill-2 and decode-2 differ from the first of their role in name and GPU alone."""
    services = whole("gpu", "observability", "secure")
    for name in ("prefill", "decode"):
        first, further = services[name], services[f"{name}-2"]
        assert further.pop("profiles")
        assert further.pop("networks") == {"default": {"aliases": [name]}}
        assert first["environment"].pop("BATON_OPT_DEVICE")
        assert further["environment"].pop("BATON_OPT_DEVICE")
        assert further == first


def test_gpu_workers_share_memory():
    """What cuda_ipc and NCCL need of containers, so that KV never falls to sockets unsaid."""
    services = whole("gpu")
    for name in WORKERS:
        settings = services[name]
        (asked,) = settings["deploy"]["resources"]["reservations"]["devices"]
        assert asked["count"] == "all" and asked["capabilities"] == ["gpu"]
        assert settings["ipc"] == "host" and "pid" not in settings
        assert settings["ulimits"] == {"memlock": -1, "stack": 67108864, "nofile": 65536}
        environment = settings["environment"]
        assert "CUDA_VISIBLE_DEVICES" not in environment and environment["NCCL_HOSTID"]
        assert not environment["BATON_OPT_KV_CACHE"]  # the base file's does not shine through
        assert environment["BATON_OPT_GPU_MEMORY"] == 0.9
        assert {volume.split(":")[1] for volume in settings["volumes"]} == {
            "/models", "/var/cache/baton"
        }  # fmt: skip


@pytest.mark.parametrize(
    ("profile", "gpus"), [(None, 2), ("four-gpus", 4), ("eight-gpus", 8)], ids=str
)
def test_workers_of_a_profile_share_out_the_gpus(profile, gpus):
    """Every GPU of the machine is one worker's; the eight-GPU settings are those of the file."""
    file = COMPOSE / "compose.gpu.yaml"
    variables = {}
    if profile == "eight-gpus":
        (line,) = re.findall(r"^#   (PREFILL_TP=.*) \\$", file.read_text(), re.M)
        variables = dict(pair.split("=") for pair in line.split())
    taken = []
    for name, settings in whole("gpu", **variables).items():
        if name in WORKERS and ("profiles" not in settings or profile in settings["profiles"]):
            first = int(settings["environment"]["BATON_OPT_DEVICE"].removeprefix("cuda:"))
            taken += range(first, first + int(settings["environment"]["BATON_OPT_TP"]))
    assert sorted(taken) == list(range(gpus))


def test_services_are_limited_and_have_no_privilege_no_public_port_and_no_secret():
    """Secrets are names of files: nothing that looks like a password's value."""
    services = load(BASE)["services"]
    for name in ("router-1", "router-2", *WORKERS):
        assert services[name]["read_only"] and services[name]["cap_drop"] == ["ALL"], name
        assert services[name]["mem_limit"] == "4gb", name
        assert services[name]["ulimits"]["nofile"] == 65536, name
    for file in (BASE, *OVERLAYS):
        for name, settings in load(file)["services"].items():
            for port in settings.get("ports", ()):
                assert port.startswith("127.0.0.1:"), (file.name, name)
            names = {name.upper() for name in settings.get("environment", {})}
            assert not {name for name in names if "PASSWORD" in name and not name.endswith("_FILE")}


def test_containers_have_defaults_that_variables_and_options_overrule(tmp_path):
    """compose/service.sh gives them; a stand-in for `baton` shows which."""
    program = tmp_path / "baton"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nenv | grep "^BATON_OPT_" | sort\n')
    program.chmod(0o755)

    def started(*arguments, **environment):
        known = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOSTNAME": "box", **environment}
        argv = ["/bin/sh", str(COMPOSE / "service.sh"), *arguments]
        return subprocess.check_output(argv, env=known, text=True).splitlines()

    defaults = ["BATON_OPT_HOST=0.0.0.0", "BATON_OPT_PORT=7700"]
    assert started("decode-worker", "--nice", "1 2") == [
        "decode-worker", "--nice", "1 2", "BATON_OPT_ADVERTISE=box:7700", *defaults
    ]  # fmt: skip
    assert started("router", BATON_OPT_ADVERTISE="h:1", BATON_OPT_PORT="7701", BATON_OPT_X="") == [
        "router", "BATON_OPT_ADVERTISE=h:1", defaults[0], "BATON_OPT_PORT=7701", "BATON_OPT_X="
    ]  # fmt: skip


def test_the_images_health_port_is_haproxys_and_leaves_room_for_metrics_of_any_processes():
    dockerfile, proxy = COMPOSE / "Dockerfile", COMPOSE / "haproxy/haproxy.cfg"
    health, exposed = re.findall(r"HEALTH_PORT=(\d+)|^EXPOSE (.*)", dockerfile.read_text(), re.M)
    assert re.findall(r"check port (\d+)", proxy.read_text()) == [health[0]]
    environment = whole()["router-1"]["environment"]
    metrics = int(environment["BATON_OPT_METRICS_PORT"])
    assert {health[0], str(metrics)} <= set(exposed[1].split())
    others = (7700, int(environment["BATON_OPT_HTTP_PORT"]), int(health[0]))
    assert not set(others) & set(range(metrics, metrics + MAX_ROUTER_PROCESSES))


async def test_the_image_asks_for_its_health():
    (line,) = re.findall(r"HEALTHCHECK .*\n *CMD (.*)", (COMPOSE / "Dockerfile").read_text())
    health = Health()
    async with health.probed("127.0.0.1", 0) as url:
        port = {"BATON_OPT_HEALTH_PORT": url.rpartition(":")[2]}

        async def status():
            asked = await asyncio.create_subprocess_exec(*json.loads(line), env=port)
            return await asked.wait()

        assert await status() == 1
        await health.set(True)
        assert await status() == 0
    assert await status() == 1


@pytest.mark.parametrize("command", ["router", "decode-worker"])
def test_a_service_starts_where_commands_have_their_options_too(command, monkeypatch):
    monkeypatch.setenv("BATON_OPT_TLS_NAME", "decode.baton")
    args = parser().parse_args([command])
    (router_config if command == "router" else worker_config)(args)
