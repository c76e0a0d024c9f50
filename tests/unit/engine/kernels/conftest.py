"""What a GPU computes, run on CPU tensors by Triton's interpreter."""

import tests.interpreted  # noqa: F401  (before any test imports a kernel)
