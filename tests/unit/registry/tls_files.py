"""A certificate authority and certificates for tests, made by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TlsFiles:
    """Where the files are. `stranger_ca` signed none of the certificates."""

    ca: Path
    stranger_ca: Path
    server_cert: Path
    server_key: Path
    client_cert: Path
    client_key: Path


def make_tls_files(folder):
    """Makes a CA, a stranger's CA, and a server's and a client's certificate for 127.0.0.1."""
    assert shutil.which("openssl"), "these tests need the openssl command (Debian: apt install it)"
    for authority in ("ca", "stranger"):
        _openssl(
            folder,
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-days", "2", "-subj", f"/CN=test {authority}"),
            *("-keyout", f"{authority}.key", "-out", f"{authority}.crt"),
        )
    for name, usage in (("server", "serverAuth,clientAuth"), ("client", "clientAuth")):
        (folder / f"{name}.ext").write_text(
            f"subjectAltName=IP:127.0.0.1\nextendedKeyUsage={usage}\n"
        )
        _openssl(
            folder,
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr"),
        )
        _openssl(
            folder,
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key"),
            *("-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext", "-out", f"{name}.crt"),
        )
    return TlsFiles(
        ca=folder / "ca.crt",
        stranger_ca=folder / "stranger.crt",
        server_cert=folder / "server.crt",
        server_key=folder / "server.key",
        client_cert=folder / "client.crt",
        client_key=folder / "client.key",
    )


def _openssl(folder, *args):
    subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True, timeout=20)
