"""Membership: which workers are alive, and which models names stand for, kept in etcd."""

from baton.registry.etcd import EtcdRegistry
from baton.registry.lease import EtcdRegistration
from baton.registry.membership import Membership
from baton.registry.routes import RouteTable

__all__ = ["EtcdRegistration", "EtcdRegistry", "Membership", "RouteTable"]
