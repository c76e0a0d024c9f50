"""Tracing and metrics."""
