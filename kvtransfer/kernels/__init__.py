"""Copies of scattered KV blocks, and their checksum, in one launch each.

`reference` is plain torch, for any device; `blocks` is the same in Triton and is imported only
where a pool lies on a GPU.
"""
