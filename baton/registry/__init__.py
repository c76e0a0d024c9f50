"""What is kept in etcd: which workers are alive, which planner leads, and its plan."""

from baton.registry.election import Election, LedKey
from baton.registry.etcd import EtcdRegistry
from baton.registry.lease import EtcdRegistration
from baton.registry.membership import Membership

__all__ = ["Election", "EtcdRegistration", "EtcdRegistry", "LedKey", "Membership"]
