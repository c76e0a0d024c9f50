"""Backends: the CPU and the GPU."""
