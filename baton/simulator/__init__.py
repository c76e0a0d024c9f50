"""Simulates a cluster on a virtual clock, with the router's own decisions, for `baton advise`."""
