"""Membership: who is alive. `seam` says what a registry is, `etcd` and `memory` are the two."""

from baton.registry.etcd import EtcdRegistry
from baton.registry.interface import Registration, Registry
from baton.registry.membership import Membership

__all__ = ["EtcdRegistry", "Membership", "Registration", "Registry"]
