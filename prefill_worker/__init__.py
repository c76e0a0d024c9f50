"""The prefill worker: runs prompts in chunks, sends their KV blocks, returns first tokens.

The size of chunks is decided by `baton.engine.chunk_budget`.
"""
