"""Passwords and TLS against a real etcd: what works, and what a wrong setting says."""

import asyncio
import contextlib
import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from baton.config import RegistryConfig
from baton.errors import ConfigError, Unavailable
from baton.local.etcd_process import EmbeddedEtcd, etcd_binary
from baton.registry.etcd_client import EtcdClient
from baton.registry.etcd_registry import EtcdRegistry
from baton.v1.common_pb2 import WorkerRecord, WorkerRole
from tests.documents import DOCS, blocks
from tests.waiting import WAIT_S

PASSWORD = "fleet-of-foot"
RECORD = WorkerRecord(incarnation="d1", role=WorkerRole.WORKER_ROLE_DECODE, address="h:1")


@contextlib.asynccontextmanager
async def opened(config):
    registry = EtcdRegistry(config)
    try:
        yield registry
    finally:
        await registry.close()


async def register_and_see(config):
    async with opened(config) as registry, registry.register(RECORD), registry.watch() as members:
        assert dict(members.records) == {"d1": RECORD}


async def refused(config, match):
    with pytest.raises(ConfigError, match=match):
        await register_and_see(config)


def etcdctl(address, *words, stdin=""):
    command = [etcd_binary().with_name("etcdctl"), "--endpoints", address, *words]
    done = subprocess.run(
        command, check=True, input=stdin, capture_output=True, text=True, timeout=WAIT_S
    )
    return done.stdout


def require_password(address):
    """Users root and worker; worker may touch the keys of cluster `default` alone."""
    prefix = RegistryConfig().workers_prefix
    for line in (
        "user add root:rootpw",
        "user grant-role root root",
        f"user add worker:{PASSWORD}",
        "role add worker",
        f"role grant-permission worker --prefix=true readwrite {prefix}",
        "user grant-role worker worker",
        "auth enable",
    ):
        etcdctl(address, *line.split())


@pytest.fixture
async def etcd():
    async with EmbeddedEtcd(args=["--bcrypt-cost", "4"]) as etcd:
        yield etcd


async def test_a_user_with_rights_to_its_cluster_alone_is_enough_and_may_change_its_password(
    etcd, tmp_path
):
    for name, password in (("right", PASSWORD + "\n"), ("wrong", "guess")):
        (tmp_path / name).write_text(password)
    mine = RegistryConfig(etcd=etcd.address, user="worker", password_file=tmp_path / "right")
    await register_and_see(mine)  # an etcd without passwords takes one
    await asyncio.to_thread(require_password, etcd.address)
    await register_and_see(mine)
    await refused(RegistryConfig(etcd=etcd.address), "asks for a user: set --etcd-user")
    await refused(replace(mine, cluster="theirs"), "denies user 'worker' access")
    wrong = replace(mine, password_file=tmp_path / "wrong")
    await refused(wrong, "refuses user 'worker' or its password")
    changed = WorkerRecord(incarnation="d1", role=RECORD.role, address="h:2")
    async with (
        opened(mine) as registry,
        registry.register(RECORD) as registration,
        registry.watch() as members,
    ):
        await etcd.kill()  # which makes it forget its tokens
        await etcd.start()
        change = ["--user", "root:rootpw", "user", "passwd", "worker", "--interactive=false"]
        await asyncio.to_thread(etcdctl, etcd.address, *change, stdin="changed\n")
        (tmp_path / "right").write_text("changed\n")
        await registration.update(changed)
        async with asyncio.timeout(WAIT_S), contextlib.aclosing(members.changes()) as changes:
            async for records in changes:
                if members.connected and records["d1"] == changed:
                    break


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"user": "worker"}, "--etcd-password-file"),
        ({"user": "worker", "password_file": "nowhere"}, "nowhere cannot be read"),
        ({"user": "worker", "password_file": "cut"}, "--etcd-password-file cut is no UTF-8"),
        ({"ca_file": "nowhere"}, "--etcd-ca nowhere cannot be read"),
        ({"etcd": "http://h:1", "ca_file": "ca.crt"}, "is not TLS"),
    ],
)
def test_wrong_settings_are_errors_before_anything_starts(settings, match, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ca.crt").touch()
    (tmp_path / "cut").write_bytes("\u00fc".encode()[:1])
    paths = {k: tmp_path.joinpath(v).relative_to(tmp_path) for k, v in settings.items() if "_" in k}
    with pytest.raises(ConfigError, match=match):
        EtcdRegistry(RegistryConfig(**settings | paths))


def make_tls_files(folder):
    """Runs the commands of docs/security.md, and the first of them again for a stranger's CA."""
    assert shutil.which("openssl"), "these tests need the openssl command (Debian: apt install it)"
    (commands,) = (text for text in blocks(DOCS / "security.md") if "openssl req" in text)
    run_commands(commands, folder)
    (folder / "stranger").mkdir()
    run_commands(commands.partition("\n\n")[0], folder / "stranger")
    return folder / "secrets", folder / "stranger/secrets/etcd_ca.pem"


def run_commands(commands, folder):
    command = ["sh", "-e", "-c", commands]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=WAIT_S)


async def test_mutual_tls_and_what_wrong_certificates_say(tmp_path, monkeypatch):
    monkeypatch.setattr("baton.registry.etcd_client.START_S", 0.3)
    tls, stranger_ca = await asyncio.to_thread(make_tls_files, tmp_path)
    ca = tls / "etcd_ca.pem"
    with socket.socket() as one, socket.socket() as two:
        for probe in (one, two):
            probe.bind(("127.0.0.1", 0))
        plain, secret = one.getsockname()[1], two.getsockname()[1]
    urls = f"http://127.0.0.1:{plain},https://127.0.0.1:{secret},https://127.0.0.2:{secret}"
    args = [
        *("--listen-client-urls", urls),
        *("--cert-file", f"{tls}/etcd_server_cert.pem", "--key-file", f"{tls}/etcd_server_key.pem"),
        *("--client-cert-auth", "--trusted-ca-file", str(ca)),
    ]
    ours = {kind + "_file": tls / f"etcd_client_{kind}.pem" for kind in ("cert", "key")}
    address = f"127.0.0.1:{secret}"
    async with EmbeddedEtcd(client_port=plain, args=args):
        await register_and_see(RegistryConfig(etcd=address, ca_file=ca, **ours))
        await register_and_see(RegistryConfig(etcd=f"https://{address}", ca_file=ca, **ours))
        await refused(RegistryConfig(etcd=address, ca_file=stranger_ca, **ours), "did not sign")
        changing = Path(shutil.copy(stranger_ca, tmp_path / "changing.pem"))
        client = EtcdClient(RegistryConfig(etcd=address, ca_file=changing, **ours))
        with pytest.raises(ConfigError, match="did not sign"):
            await client.get("x")
        shutil.copy(ca, changing)
        assert (await client.get("x"))[0] is None
        await client.close()
        await refused(RegistryConfig(etcd=address, ca_file=ca), "client certificate")
        await refused(
            RegistryConfig(etcd=f"127.0.0.2:{secret}", ca_file=ca, **ours), "another name"
        )
        with pytest.raises(Unavailable, match="https:// if it speaks TLS"):
            await register_and_see(RegistryConfig(etcd=address))
