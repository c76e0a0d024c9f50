"""Makes a CA and certificates for a cluster, for `baton certs` and `baton up --tls`."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton.errors import ConfigError
from baton.net import tls

DAYS = 365


def write(
    folder: Path, hosts: Sequence[str], days: int = DAYS, planner_hosts: Sequence[str] = ()
) -> None:
    """Writes CA and certificates to `folder`. Raises ConfigError if a file cannot be accessed.

    `hosts` are names of routers that callers check, `planner_hosts` those of planners, which have
    the certificate of admin; all are valid for `days`.
    """
    further = {"router": ("localhost", "127.0.0.1", "::1", *hosts), "admin": planner_hosts}
    now = datetime.datetime.now(datetime.UTC)
    until = now + datetime.timedelta(days=days)

    def save(name: str, key: Any, certificate: Any) -> None:
        pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
        path = folder / f"{name}-key.pem"
        path.touch(mode=0o600)
        path.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
        (folder / f"{name}.pem").write_bytes(certificate.public_bytes(pem))

    def begun(subject: str, issuer: Any, key: Any) -> Any:
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer or name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(until)
        )

    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "ca-key.pem").exists():
            ca_key: Any = serialization.load_pem_private_key(
                (folder / "ca-key.pem").read_bytes(), None
            )
            ca = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        else:
            ca_key = ec.generate_private_key(ec.SECP256R1())
            usage = x509.BasicConstraints(ca=True, path_length=0)
            ca = begun("Baton development CA", None, ca_key).add_extension(usage, critical=True)
            ca = ca.sign(ca_key, hashes.SHA256())
            save("ca", ca_key, ca)
        for role in tls.ROLES:
            names = [_name(host) for host in (f"{role}.{tls.DOMAIN}", *further.get(role, ()))]
            key = ec.generate_private_key(ec.SECP256R1())
            both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            signed = (
                begun(f"baton {role}", ca.subject, key)
                .add_extension(x509.SubjectAlternativeName(names), critical=False)
                .add_extension(x509.ExtendedKeyUsage(both), critical=False)
                .sign(ca_key, hashes.SHA256())
            )
            save(role, key, signed)
    except (OSError, ValueError) as error:
        raise ConfigError(f"certificates cannot be made in {folder}: {error}") from error


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return x509.DNSName(host)
