"""The prefill worker: runs prompts in chunks, streams their KV blocks out, returns first tokens.

Read `prefills` first: one prompt's story.
"""
