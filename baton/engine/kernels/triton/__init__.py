"""The forward pass on NVIDIA GPUs in Triton: each kernel beside its reference in torch.

Imported by GPU code alone. `python -m baton.engine.kernels.triton` compiles the kernels without a
GPU, and tunes them on one.
"""
