"""Membership: which workers are alive. `interface` is the contract, `etcd` and `memory` keep it."""

from baton.registry.etcd import EtcdRegistry
from baton.registry.interface import Membership, Registration, Registry

__all__ = ["EtcdRegistry", "Membership", "Registration", "Registry"]
