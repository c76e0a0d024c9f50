"""Processes in namespaces of their own, as in containers, where a machine lets us make them."""

import subprocess

import pytest

OWN_PIDS = ("unshare", "--pid", "--mount-proc", "--fork", "--kill-child")
OWN_PIDS_AND_NETWORK = (*OWN_PIDS, "--net")


def _can_make_them():
    command = [*OWN_PIDS_AND_NETWORK, "true"]
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


HAS_NAMESPACES = _can_make_them()
needs_namespaces = pytest.mark.skipif(
    not HAS_NAMESPACES, reason="this machine does not let us make namespaces"
)
