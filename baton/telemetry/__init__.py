"""Traces, spans and metrics."""
