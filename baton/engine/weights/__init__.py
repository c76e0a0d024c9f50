"""Checkpoints, weight types and quantisation."""
