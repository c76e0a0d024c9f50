"""The engine on an NVIDIA GPU: the forward pass over Triton's kernels, and what drives it.

Imported where a GPU computes, and by tests, which run the kernels in Triton's interpreter.
"""
