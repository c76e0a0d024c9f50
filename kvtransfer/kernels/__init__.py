"""Copies of scattered KV blocks, and their checksum, in one launch each; `reference` in torch."""
