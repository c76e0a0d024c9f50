"""Operations of a model: torch references, Triton kernels, native code."""
