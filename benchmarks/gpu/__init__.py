"""What the GPU path computes, and how fast: kernels, engine and cluster on this machine's GPU.

Only the cluster needs more than Python, torch, triton, numpy and safetensors.
Each part is a process of its own (`part`), so that one that fails leaves the others a working GPU.
"""
