"""The registry in etcd: its address, access, and the keys that a cluster uses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from baton.config import options
from baton.config.options import option, split_address
from baton.errors import ConfigError


@dataclass(frozen=True)
class RegistryConfig:
    """Where etcd is, how to log in there, and which cluster's keys to use."""

    GROUP: ClassVar[str] = "registry"
    etcd: str = option(
        "127.0.0.1:2379",
        "--etcd HOST:PORT",
        "etcd's address; several are separated by commas; an https:// prefix turns on TLS",
    )
    lease_ttl_s: int = option(
        5,
        "--lease-ttl SECONDS",
        "time to live of a worker's record in etcd without a keep-alive",
        least=1,
    )
    cluster: str = option(
        "default", "--cluster NAME", "cluster name; separates clusters that share an etcd"
    )
    user: str = option("", "--etcd-user NAME", "etcd user")
    password_file: Path | None = option(
        None, "--etcd-password-file FILE", "file with the etcd user's password"
    )
    ca_file: Path | None = option(
        None, "--etcd-ca FILE", "PEM file with the CA that signed etcd's certificate"
    )
    cert_file: Path | None = option(
        None, "--etcd-cert FILE", "PEM file with this process's client certificate for etcd"
    )
    key_file: Path | None = option(
        None, "--etcd-key FILE", "PEM file with the private key of --etcd-cert"
    )

    def __post_init__(self) -> None:
        options.check(self)
        for address in self.addresses:
            split_address(address.removeprefix("http://").removeprefix("https://"), "--etcd")
        if not self.cluster or "/" in self.cluster:
            raise ConfigError(f"--cluster must be a name without '/', not {self.cluster!r}")
        if bool(self.cert_file) != bool(self.key_file):
            raise ConfigError("--etcd-cert and --etcd-key go together")

    @property
    def addresses(self) -> tuple[str, ...]:
        """etcd's endpoints: HOST:PORT or URLs."""
        return tuple(address.strip() for address in self.etcd.split(","))

    @property
    def workers_prefix(self) -> str:
        """Prefix of the keys of worker records."""
        return f"/baton/v1/{self.cluster}/workers/"

    @property
    def ticket_keys_prefix(self) -> str:
        """Prefix of the key that holds the routers' secret for resume tickets."""
        return f"/baton/v1/{self.cluster}/ticket-keys/"

    @property
    def routes_prefix(self) -> str:
        """Prefix of the keys of routes of model names."""
        return f"/baton/v1/{self.cluster}/routes/"

    @property
    def ranks_prefix(self) -> str:
        """Prefix of the keys of hosts that run ranks of a worker on another host."""
        return f"/baton/v1/{self.cluster}/ranks/"

    @property
    def planner_prefix(self) -> str:
        """Prefix of the keys of the leading planner and of its plan."""
        return f"/baton/v1/{self.cluster}/planner/"
