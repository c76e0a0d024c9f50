"""What is kept in etcd: which workers are alive, which models names stand for, who plans."""

from baton.registry.election import Election, LedKey
from baton.registry.etcd_registry import EtcdRegistry, plan_of
from baton.registry.lease import LeasedKey
from baton.registry.membership import Membership
from baton.registry.routes import RouteTable

__all__ = [
    "Election",
    "EtcdRegistry",
    "LeasedKey",
    "LedKey",
    "Membership",
    "RouteTable",
    "plan_of",
]
