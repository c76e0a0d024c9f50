"""Copies and checksums of scattered KV blocks: a Triton kernel, and its `reference` in torch."""
