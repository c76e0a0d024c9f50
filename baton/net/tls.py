"""TLS on a process's ports and towards other processes of its cluster.

Files are read again when they change: for a new connection, never for one that is open. A gRPC
channel keeps the credentials that it was made with: who connects again makes another one where
`of_client` gives other credentials by then. Within a cluster a process is known by its role, which
its certificate names as `ROLE.baton` (a DNS name), so certificates need no addresses of workers.
Callers of routers check the host's name, as usual.
"""

from __future__ import annotations

import _ssl
import ipaddress
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc

from baton.config import TlsConfig
from baton.config.watched_files import WatchedFiles
from baton.errors import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")
ROLES = ("router", "worker", "admin")
DOMAIN = "baton"
_SAN = "x509_subject_alternative_name"
_FOR_CALLERS = (
    "/baton.v1.InferenceService/",
    "/externalscaler.ExternalScaler/",
    "/grpc.health.v1.Health/",
)
# Who may call what on a worker: methods, services, and everybody who has a certificate.
_CALLERS = {
    "/baton.v1.DispatchService/": frozenset({"router"}),
    "/baton.v1.HandoffService/": frozenset({"worker"}),
    "/baton.v1.WorkerService/Drain": frozenset({"admin"}),
    "/baton.v1.WorkerService/LoadAdapter": frozenset({"admin", "router"}),
    "/baton.v1.WorkerService/UnloadAdapter": frozenset({"admin", "router"}),
    "/baton.v1.WorkerService/SetRole": frozenset({"admin"}),
}


class Reloaded(Generic[T]):
    """What is made of files, made again when they change; where that fails, the last one stays."""

    def __init__(self, load: Callable[[WatchedFiles], T], kept: str) -> None:
        """`load` reads them through its argument. Raises ConfigError as it does at first; later
        ones are logged, behind `kept`."""
        self._load, self._kept, self._files = load, kept, WatchedFiles()
        self._value = load(self._files)

    @property
    def current(self) -> T:
        """Returns the loaded object, and a new one after a file has changed."""
        if self._files.changed:
            self._files = WatchedFiles()
            try:
                self._value = self._load(self._files)
            except ConfigError as error:
                log.error("%s: %s", self._kept, error)
        return self._value


@dataclass
class Credentials:
    """A process's certificate, and whom it trusts, from PEM files. Any of them may be missing."""

    cert_file: Path | None = None
    key_file: Path | None = None
    ca_file: Path | None = None  # of the servers that are called
    client_ca_file: Path | None = None  # of the callers, who must have a certificate then
    insecure: bool = False  # may serve without TLS where other machines can connect
    server_name: str = ""  # of servers that are called without a role; empty: their host
    role: str = ""  # that other processes look for in the certificate; empty: none
    _server: Reloaded[ssl.SSLContext] | None = field(default=None, init=False)
    _client: Reloaded[grpc.ChannelCredentials] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if bool(self.cert_file) != bool(self.key_file):
            raise ConfigError("--tls-cert and --tls-key (cert_file, key_file) go together")
        if self.client_ca_file and not self.cert_file:
            raise ConfigError("--tls-client-ca needs --tls-cert and --tls-key")
        self.ca_file = self.ca_file or self.client_ca_file
        if self.cert_file:
            self._server = Reloaded(self._server_context, "the certificate stays as it is")

    @property
    def serves(self) -> bool:
        """Whether ports take TLS, and nothing else."""
        return self.cert_file is not None

    def port(self) -> grpc.ServerCredentials:
        """Credentials of a gRPC server's port; they follow changes of the files."""
        assert self._server is not None
        server, served = self._server, self._server.current

        def changed() -> Any:
            nonlocal served
            if (current := server.current) is served:
                return None
            served = current
            return self._server_configuration()

        return grpc.dynamic_ssl_server_credentials(
            self._server_configuration(),
            changed,
            require_client_authentication=self.client_ca_file is not None,
        )

    def context(self) -> ssl.SSLContext:
        """The context of other servers' ports; it follows changes of the files."""
        assert self._server is not None
        server, context = self._server, self._server.current

        def hello(connection: Any, name: Any, _: ssl.SSLContext) -> None:
            connection.context = server.current

        context.sni_callback = hello
        return context

    def of_client(self) -> grpc.ChannelCredentials | None:
        """For calls: the same object until a file changes; None where they are not encrypted.

        Raises ConfigError where a file cannot be used at first; later the old ones stay.
        """
        if self.ca_file is None:
            return None
        if self._client is None:
            self._client = Reloaded(
                self._client_credentials, "calls go on with the old certificate"
            )
        return self._client.current

    def client_context(self) -> ssl.SSLContext:
        """For calls of other protocols; without an authority it trusts those of this machine."""
        context = ssl.create_default_context(cafile=self.ca_file)
        if self.cert_file:
            context.load_cert_chain(self.cert_file, self.key_file)
        return context

    def check_exposed(self, host: str) -> None:
        """Raises ConfigError where others could read or forge what is sent to `host`'s ports."""
        if not self.serves and not self.insecure and not is_loopback(host):
            raise ConfigError(
                f"--host {host} can be reached from other machines, and without TLS everybody "
                "there can read and send requests: give --tls-cert and --tls-key (`baton certs` "
                "makes some to try), or --insecure where the network is private"
            )

    def _server_configuration(self) -> Any:
        assert self.cert_file is not None and self.key_file is not None
        pair = (self.key_file.read_bytes(), self.cert_file.read_bytes())
        roots = self.client_ca_file.read_bytes() if self.client_ca_file else None
        return grpc.ssl_server_certificate_configuration([pair], roots)

    def _server_context(self, files: WatchedFiles) -> ssl.SSLContext:
        assert self.cert_file is not None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            for path in filter(None, (self.cert_file, self.key_file, self.client_ca_file)):
                files.read(path)
            context.load_cert_chain(self.cert_file, self.key_file)
            self._check_role()
            if self.client_ca_file:
                context.load_verify_locations(self.client_ca_file)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as error:
            named = ", ".join(map(str, filter(None, (self.cert_file, self.key_file))))
            raise ConfigError(f"{named} cannot be used for TLS: {error}") from error
        return context

    def _check_role(self) -> None:
        """Raises ConfigError where other processes would refuse the certificate for its names."""
        # Workers are always called by their role's name; a router is asked for it by workers.
        if not (self.cert_file and self.role) or (self.role == "router" and not self.ca_file):
            return
        # ssl's public functions read names only out of a peer's certificate.
        decoded = _ssl._test_decode_cert(str(self.cert_file))  # type: ignore[attr-defined]
        names = [name for kind, name in decoded.get("subjectAltName", ()) if kind == "DNS"]
        if (needed := f"{self.role}.{DOMAIN}") not in names:
            raise ConfigError(
                f"{self.cert_file} is no certificate of a {self.role}: it must have the DNS name "
                f"{needed}, and has {', '.join(names) or 'none'} (`baton certs` makes one per role)"
            )

    def _client_credentials(self, files: WatchedFiles) -> grpc.ChannelCredentials:
        paths = (self.ca_file, self.key_file, self.cert_file)
        try:
            ca, key, cert = (files.read(path) if path else None for path in paths)
            self.client_context()  # the certificate may have been replaced, and its key not yet
            self._check_role()
        except ssl.SSLError as error:
            named = ", ".join(map(str, filter(None, paths)))
            raise ConfigError(f"{named} cannot be used for TLS: {error}") from error
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error
        return grpc.ssl_channel_credentials(ca, key, cert)


_process = Credentials()


def use(credentials: Credentials) -> None:
    """Makes them this process's: of all ports and channels that are opened from now on."""
    global _process  # noqa: PLW0603 - a process has one identity
    _process = credentials


def use_config(config: TlsConfig, insecure: bool, role: str = "") -> None:
    """Makes those of its settings this process's, which needs a certificate of `role`, if given.

    Raises ConfigError where they cannot be used.
    """
    ca, client_ca = config.tls_ca, config.tls_client_ca
    use(Credentials(config.tls_cert, config.tls_key, ca, client_ca, insecure, role=role))


def of_caller(
    cert_file: str | Path | None, key_file: str | Path | None, ca_file: str | Path | None, name: str
) -> Credentials | None:
    """A command's or SDK's; None without files. `name`: of servers; empty: their host.

    Raises ConfigError for a certificate without an authority: calls would not be encrypted.
    """
    cert, key, ca = (Path(file) if file else None for file in (cert_file, key_file, ca_file))
    if not (cert or key or ca):
        return None
    if ca is None:
        raise ConfigError("a certificate for calls needs the router's CA: --tls-ca (ca_file)")
    return Credentials(cert, key, ca, server_name=name)


def current() -> Credentials:
    """This process's; without files until `use` was called."""
    return _process


def is_loopback(host: str) -> bool:
    """Whether only this machine's processes can connect to a port bound to `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def roles_of(auth_context: Any) -> frozenset[str]:
    """The roles that a caller's certificate names; none without a certificate."""
    names = [name.decode("utf-8", "replace") for name in auth_context.get(_SAN, ())]
    suffix = f".{DOMAIN}"
    return frozenset(n.removesuffix(suffix) for n in names if n.endswith(suffix)) & set(ROLES)


def _who(roles: frozenset[str]) -> str:
    return " and ".join(sorted(roles)) or "a caller without a role of this cluster"


def why_refused(method: str, auth_context: Any) -> str:
    """Why this caller gets no answer from a method; empty where it does.

    Ports that do not ask for certificates, and services for everybody, have no roles to check.
    """
    if _process.client_ca_file is None or method.startswith(_FOR_CALLERS):
        return ""
    roles = roles_of(auth_context)
    service = method[: method.rindex("/") + 1]
    allowed = _CALLERS.get(method) or _CALLERS.get(service) or frozenset(ROLES)
    if roles & allowed:
        return ""
    return f"{method} is for {' and '.join(sorted(allowed))} only, and this is {_who(roles)}"
