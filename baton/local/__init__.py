"""Baton on one machine: local clusters for `baton up`, the demo and tests; one-process runs."""
