"""Triton kernels of the forward pass on NVIDIA GPUs, each with its reference in torch.

Imported by GPU code only. `python -m baton.engine.kernels.triton` compiles the kernels without a
GPU, and tunes them on one.
"""
