"""Ports with TLS: who gets an answer, from whom, and what happens when files change."""

import asyncio
import contextlib
import ipaddress
import re
import shutil
import ssl
from functools import partial
from pathlib import Path

import grpc
import httpx
import pytest
import yaml
from cryptography import x509

from baton.cli import main as cli
from baton.config import TlsConfig
from baton.errors import ConfigError, InternalError, Unauthenticated, Unavailable
from baton.local import certs
from baton.net import rpc, tls
from baton.net.metrics_server import serving
from baton.net.server import Health, bind
from baton.net.tls import Credentials, is_loopback, why_refused
from baton.v1 import worker_pb2, worker_pb2_grpc
from baton.v1.dispatch_pb2 import RouterMessage, WorkerMessage
from baton.worker.dispatch_service import DispatchService
from tests.unit.worker.running import CONNECT
from tests.unit.worker.test_dispatch_service import Worker as Dispatching
from tests.waiting import WAIT_S

TIMEOUT_S = WAIT_S


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of certificates."""
    folder = tmp_path_factory.mktemp("certs")
    certs.write(folder, ["router.example", "10.0.0.9", "[fd00::9]"])
    return folder


@pytest.fixture
def folder(made, tmp_path):
    """The same, to be changed."""
    return shutil.copytree(made, tmp_path / "certs")


@pytest.fixture(autouse=True)
def restored():
    yield
    tls.use(Credentials())


def of(folder, role, **more):
    return Credentials(
        folder / f"{role}.pem", folder / f"{role}-key.pem", folder / "ca.pem", **more
    )


def renew(folder):
    """Another authority, and all certificates anew."""
    (folder / "ca-key.pem").unlink()
    certs.write(folder, [])


@contextlib.asynccontextmanager
async def served(credentials, add_to=lambda server: None):
    """The address of a port with these credentials, which the process has from now on."""
    tls.use(credentials)
    server, address = bind("127.0.0.1", 0)
    add_to(server)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    async def Describe(self, request, context):
        return worker_pb2.DescribeResponse()

    async def Drain(self, request, context):
        return worker_pb2.DrainResponse()

    def add_to(self, server):
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)


@pytest.fixture
async def worker(folder):
    """The address of a worker's port that wants certificates."""
    ours = of(folder, "worker", client_ca_file=folder / "ca.pem")
    async with served(ours, Worker().add_to) as address:
        yield address


@pytest.fixture
def strangers(folder, tmp_path):
    """Callers that no port with certificates may answer."""
    certs.write(tmp_path / "other", [])
    other = of(tmp_path / "other", "router")
    return {
        "plain": Credentials(),
        "without a certificate": Credentials(ca_file=folder / "ca.pem"),
        "of another authority": Credentials(other.cert_file, other.key_file, folder / "ca.pem"),
    }


async def call(address, credentials, method="Describe", role="worker"):
    """One call with these credentials; the port's own stay as they are."""
    served = tls.current()
    tls.use(credentials)
    channel = rpc.channel(address, role=role)
    tls.use(served)
    async with channel, asyncio.timeout(TIMEOUT_S):
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        with rpc.translated():
            request = getattr(worker_pb2, f"{method}Request")()
            answer = getattr(stub, method)(request, timeout=TIMEOUT_S)
            return await answer


async def test_a_worker_answers_its_cluster_alone_and_each_role_what_it_may_call(worker, folder):
    for role in tls.ROLES:
        assert await call(worker, of(folder, role)) == worker_pb2.DescribeResponse()
    assert await call(worker, of(folder, "admin"), "Drain") == worker_pb2.DrainResponse()
    with pytest.raises(Unauthenticated, match="Drain is for admin only, and this is worker"):
        await call(worker, of(folder, "worker"), "Drain")


async def test_strangers_get_no_connection_and_another_role_is_not_taken_for_a_worker(
    worker, folder, strangers
):
    for stranger in strangers.values():
        with pytest.raises(Unavailable):
            await call(worker, stranger)
    with pytest.raises(Unavailable, match="Verification Check failed"):
        await call(worker, of(folder, "admin"), role="router")


def test_which_calls_are_for_which_roles():
    def refused(method, *roles):
        names = [f"{role}.baton".encode() for role in roles]
        return why_refused(method, {"x509_subject_alternative_name": names})

    tls.use(Credentials())
    assert not refused("/baton.v1.WorkerService/Drain")  # a port without certificates
    tls._process.client_ca_file = "ca.pem"
    for service, allowed in (
        ("DispatchService/Connect", {"router"}),
        ("HandoffService/Control", {"worker"}),
        ("WorkerService/SetRole", {"admin"}),
        ("WorkerService/Describe", set(tls.ROLES)),
        ("FleetService/GetStatus", set(tls.ROLES)),
    ):
        method = f"/baton.v1.{service}"
        assert {role for role in tls.ROLES if not refused(method, role)} == allowed
        assert "without a role" in refused(method, "guest") and "without a role" in refused(method)
    assert not refused("/baton.v1.InferenceService/Generate")
    assert not refused("/grpc.health.v1.Health/Check")


async def test_a_workers_dispatch_service_is_for_routers_alone(folder, strangers):
    ours = of(folder, "worker", client_ca_file=folder / "ca.pem")
    worker = Dispatching()
    service = DispatchService(worker)

    async def answer(credentials, role="worker"):
        while True:
            # gRPC's own, if the refusal comes while the message is being written.
            with contextlib.suppress(InternalError):
                return await first_message(credentials, role)

    async def first_message(credentials, role):
        """The first message of a stream on a connection of its own."""
        tls.use(credentials)
        async with rpc.channel(address, role=role, watched=True) as channel:
            tls.use(ours)
            with rpc.translated():
                call = channel.stream_stream(CONNECT)(timeout=TIMEOUT_S)
                await call.write(RouterMessage(cancel=["h"]).SerializeToString())
                first = WorkerMessage.FromString(await call.read())
                await call.done_writing()
                assert await call.read() is grpc.aio.EOF
                return first

    async with served(ours, service.add_to) as address:
        assert (await answer(of(folder, "router"))).incarnation == worker.incarnation
        assert len(worker.done) == 1
        for role in ("worker", "admin"):
            with pytest.raises(Unauthenticated, match=f"for router only, and this is {role}"):
                await answer(of(folder, role))
        for stranger in strangers.values():
            with pytest.raises(Unavailable):
                await answer(stranger)
        with pytest.raises(Unavailable):
            await answer(of(folder, "router"), "router")  # not taken for another role's
        assert len(worker.done) == 1
        await service.aclose()


def serving_a_page():
    return serving(lambda accept: ("text/plain", b"page"), "127.0.0.1", 0)


async def page_at(url, context):
    """What a port of metrics answers, on a connection of its own."""
    async with httpx.AsyncClient(verify=context, timeout=TIMEOUT_S) as client:
        return (await client.get(f"{url}/metrics")).text


async def test_new_certificates_are_taken_up_and_broken_ones_are_not(worker, folder, caplog):
    """By every port, whichever sees it first."""
    router = of(folder, "router")
    await call(worker, router)
    cert = folder / "worker.pem"
    good = cert.read_bytes()
    cert.write_text("no certificate")
    await call(worker, router)
    assert "the certificate stays as it is" in caplog.text
    shutil.copytree(folder, old := folder.parent / "old")
    cert.write_bytes(good)
    (old / "worker.pem").write_bytes(good)
    async with serving_a_page() as url:
        await call(worker, router)
        renew(folder)
        await call(worker, of(folder, "router"))
        with pytest.raises(Unavailable):
            await call(worker, of(old, "router"))
        context = ssl.create_default_context(cafile=folder / "ca.pem")
        context.check_hostname = False  # it is a worker's
        context.load_cert_chain(folder / "router.pem", folder / "router-key.pem")
        assert await page_at(url, context) == "page"


async def test_the_metrics_port_takes_tls_and_a_silent_client_stops_nobody(folder):
    tls.use(of(folder, "router"))
    async with serving_a_page() as url:
        _, silent = await asyncio.open_connection(*url.removeprefix("https://").split(":"))
        context = ssl.create_default_context(cafile=folder / "ca.pem")
        assert await page_at(url, context) == "page"
        certs.write(folder, [])
        assert await page_at(url, context) == "page"
        silent.close()


async def test_prometheus_scrapes_a_worker_with_the_settings_that_the_documentation_gives(folder):
    page = (Path(__file__).parents[3] / "docs/deploy.md").read_text()
    (text,) = re.findall(r"```yaml\n(scheme: https\n.*?)```", page, re.S)
    asked = yaml.safe_load(text)["tls_config"]
    file = {key: folder / Path(path).name for key, path in asked.items() if key.endswith("_file")}
    context = ssl.create_default_context(cafile=file["ca_file"])
    context.load_cert_chain(file["cert_file"], file["key_file"])
    tls.use(of(folder, "worker", client_ca_file=folder / "ca.pem"))
    async with (
        serving_a_page() as url,
        httpx.AsyncClient(verify=context, timeout=TIMEOUT_S) as client,
    ):
        name = {"sni_hostname": asked["server_name"]}
        assert (await client.get(f"{url}/metrics", extensions=name)).text == "page"


async def test_probes_need_no_tls(folder):
    tls.use(of(folder, "worker", client_ca_file=folder / "ca.pem"))
    health = Health()
    async with (
        health.probed("127.0.0.1", 0) as url,
        httpx.AsyncClient(timeout=TIMEOUT_S, base_url=url) as client,
    ):
        for serving_, alive, statuses in (
            (None, True, (200, 503)), (True, True, (200, 200)), (False, False, (503, 503)),
        ):  # fmt: skip
            if serving_ is not None:
                await health.set(serving_, alive=alive)
            answers = [await client.get(path) for path in ("/health", "/ready")]
            assert tuple(answer.status_code for answer in answers) == statuses
        assert [answer.text for answer in answers] == ["not alive", "not ready"]
        assert (await client.get("/metrics")).status_code == 404
        assert (await client.post("/ready")).status_code == 404


@pytest.mark.parametrize("role", ["worker", "router"])
async def test_a_process_is_asked_for_its_health_by_its_own_settings(
    role, folder, monkeypatch, capsys
):
    """As in its container, whose environment is the service's."""
    health = Health()
    await health.set(False)
    ours = of(folder, role, client_ca_file=folder / "ca.pem")
    ask = partial(asyncio.to_thread, cli.main, ["health"])
    async with served(ours, lambda server: health.add_to(server, [])) as address:
        settings = {
            "HOST": "0.0.0.0", "PORT": address.rpartition(":")[2],
            "TLS_CLIENT_CA": folder / "ca.pem",
            "TLS_CERT": folder / f"{role}.pem", "TLS_KEY": folder / f"{role}-key.pem",
        }  # fmt: skip
        for name, value in settings.items():
            monkeypatch.setenv(f"BATON_OPT_{name}", str(value))
        assert await ask() == 1
        await health.set(True)
        assert await ask() == 0
        said = capsys.readouterr()
        assert said.out == "SERVING\n" and "NOT_SERVING" in said.err
        async with health.probed("127.0.0.1", 0) as url:
            monkeypatch.setenv("BATON_OPT_HEALTH_PORT", url.rpartition(":")[2])
            assert await ask() == 0
            await health.set(False)
            assert await ask() == 1
        assert await ask() == 1
        said = capsys.readouterr()
        assert said.out == "ready\n" and "not ready" in said.err and "--health-port" in said.err


async def test_calls_take_a_new_certificate_and_those_that_run_go_on_with_the_old(
    worker, folder, caplog
):
    ours = shutil.copytree(folder, folder.parent / "ours")
    router = of(ours, "router")
    old = router.of_client()
    assert router.of_client() is old
    held = rpc.channel(worker, old, role="worker")
    stub = worker_pb2_grpc.WorkerServiceStub(held)
    async with asyncio.timeout(TIMEOUT_S):
        await stub.Describe(worker_pb2.DescribeRequest())
        renew(folder)
        await call(worker, of(folder, "router"))
        shutil.copy(folder / "router.pem", ours)
        assert router.of_client() is router.of_client() is old  # its key is still the old one
        assert caplog.text.count("calls go on with the old certificate") == 1
        (ours / "ca.pem").unlink()
        assert router.of_client() is router.of_client() is old
        assert caplog.text.count("ca.pem cannot be read") == 1
        for name in ("router-key.pem", "ca.pem"):
            shutil.copy(folder / name, ours)
        assert router.of_client() is not old
        await call(worker, router)
        # A connection that is open goes on with the certificates that it was made with.
        await stub.Describe(worker_pb2.DescribeRequest())


def test_a_certificate_names_ipv6_hosts_by_their_address(made):
    certificate = x509.load_pem_x509_certificate((made / "router.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert ipaddress.ip_address("fd00::9") in names.get_values_for_type(x509.IPAddress)


def test_the_certificate_of_admin_has_the_hosts_of_planners(tmp_path, capsys):
    given = ["--host", "router.example", "--planner-host", "planner", "--planner-host", "10.0.0.9"]
    assert cli.main(["certs", str(tmp_path), *given]) == 0
    certificate = x509.load_pem_x509_certificate((tmp_path / "admin.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["admin.baton", "planner"]
    assert names.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address("10.0.0.9")]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.9", "example.com"])
def test_a_port_that_others_reach_needs_tls_or_an_explicit_word(folder, host):
    with pytest.raises(ConfigError, match=r"give --tls-cert and --tls-key .*or --insecure"):
        Credentials().check_exposed(host)
    Credentials(insecure=True).check_exposed(host)
    of(folder, "router").check_exposed(host)
    assert not is_loopback(host)
    assert all(map(is_loopback, ("127.0.0.1", "127.0.0.2", "::1", "[::1]", "localhost")))


def test_files_that_cannot_be_used_are_named(folder):
    with pytest.raises(ConfigError, match=r"--tls-cert and --tls-key .*go together"):
        Credentials(folder / "router.pem")
    with pytest.raises(ConfigError, match="--tls-client-ca needs"):
        Credentials(client_ca_file=folder / "ca.pem")
    with pytest.raises(ConfigError, match=r"router\.pem.* cannot be used for TLS"):
        Credentials(folder / "router.pem", folder / "worker-key.pem")
    with pytest.raises(ConfigError, match=r"nothing\.pem cannot be read"):
        Credentials(ca_file=folder / "nothing.pem").of_client()
    assert (folder / "ca-key.pem").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("role", "cert", "refused"),
    [
        ("worker", "worker", False), ("worker", "admin", True), ("worker", "router", True),
        ("router", "router", False), ("router", "worker", True), ("", "admin", False),
    ],
)  # fmt: skip
def test_a_service_does_not_start_with_a_certificate_that_others_would_refuse(
    folder, role, cert, refused
):
    files = {"tls_cert": folder / f"{cert}.pem", "tls_key": folder / f"{cert}-key.pem"}
    config = TlsConfig(**files, tls_ca=folder / "ca.pem")
    wrong = rf"{cert}.pem is no certificate of a {role}: .* {role}.baton, and has {cert}.baton"
    with pytest.raises(ConfigError, match=wrong) if refused else contextlib.nullcontext():
        tls.use_config(config, False, role)
    if role == "router":  # whose workers take no TLS: for its callers any certificate will do
        tls.use_config(TlsConfig(**files), False, role)


@pytest.mark.parametrize("command", ["router", "worker", "decode-worker"])
def test_a_command_says_that_its_certificate_is_of_another_role(folder, command, capsys):
    file = lambda name: str(folder / f"{name}.pem")  # noqa: E731
    given = ["--tls-cert", file("admin"), "--tls-key", file("admin-key"), "--tls-ca", file("ca")]
    assert cli.main([command, *given]) == 1
    assert f"no certificate of a {command.removeprefix('decode-')}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "health", "bench serve"])
def test_a_command_with_a_certificate_and_no_authority_sends_nothing(folder, command, capsys):
    given = ["--tls-cert", str(folder / "admin.pem"), "--tls-key", str(folder / "admin-key.pem")]
    assert cli.main([*command.split(), *given]) == 1
    assert "needs the router's CA: --tls-ca" in capsys.readouterr().err


def test_a_new_certificate_of_another_role_is_not_taken_up(folder, caplog):
    ours = of(folder, "worker")
    ours.role = "worker"
    served, called = ours.context(), ours.of_client()
    for name in ("{}.pem", "{}-key.pem"):
        shutil.copy(folder / name.format("admin"), folder / name.format("worker"))
    assert ours.context() is served and ours.of_client() is called
    assert caplog.text.count("worker.pem is no certificate of a worker") == 2


WRONG = "{} has a certificate that cannot be used: "


@pytest.mark.parametrize(
    ("authority", "days", "named", "reason"),
    [
        ("own", 9, "decode.baton", WRONG + r"Hostname mismatch.*decode.baton.*--tls-name\)"),
        ("own", 9, "", WRONG + r"IP address mismatch.*--tls-name\)"),
        ("own", 0, "worker.baton", WRONG + r"certificate has expired\n"),
        ("made", 9, "worker.baton", "--tls-ca did not sign the certificate of {}"),  # same name
    ],
)
async def test_who_calls_hears_what_is_wrong_with_a_certificate(
    tmp_path, made, capsys, authority, days, named, reason
):
    certs.write(own := tmp_path / "own", [], days)
    trusted = str({"own": own, "made": made}[authority] / "ca.pem")
    async with served(of(own, "worker")) as address:
        asked = ["health", "--target", address, "--tls-ca", trusted, "--tls-name", named]
        assert await asyncio.to_thread(cli.main, asked) == 1
    error = capsys.readouterr().err
    assert re.search(reason.format(address), error), error
