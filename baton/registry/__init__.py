"""Membership: which workers are alive, kept in etcd."""

from baton.registry.etcd import EtcdRegistry
from baton.registry.lease import EtcdRegistration
from baton.registry.membership import Membership

__all__ = ["EtcdRegistration", "EtcdRegistry", "Membership"]
