"""The prefill worker: runs prompts in chunks, sends their KV blocks, returns first tokens."""
