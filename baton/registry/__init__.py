"""Membership: which workers are alive, kept in etcd."""

from baton.registry.etcd import EtcdRegistration, EtcdRegistry
from baton.registry.membership import Membership

__all__ = ["EtcdRegistration", "EtcdRegistry", "Membership"]
