"""The decode worker: reserves blocks, takes KV in, runs the continuous batch, streams tokens.

Read `handoff` (the states) and then `handoffs` (what changes them) first.
"""
