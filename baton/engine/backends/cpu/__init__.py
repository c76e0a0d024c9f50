"""The engine on a CPU: native kernels, or torch's."""
