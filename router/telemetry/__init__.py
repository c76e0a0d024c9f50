"""The router's counts, metrics, and spans."""
