"""Scenarios over `baton.bench`, each on a cluster of real processes that it starts itself."""
