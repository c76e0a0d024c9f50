"""The forward pass on a CPU in C++: compiled on first use, reached through ctypes."""
