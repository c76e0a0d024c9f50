"""The engine's backend for NVIDIA GPUs: forward pass by Triton kernels, CUDA graphs, sampling.

Imported on workers with a GPU, and by tests, which run the kernels in Triton's interpreter."""
