"""Speculative decoding: n-gram (prompt lookup) proposals."""
