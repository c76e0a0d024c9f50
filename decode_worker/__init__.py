"""The decode worker: reserves blocks, takes KV in, runs the continuous batch, streams tokens.

Read `reservations` first: what holds blocks, and every way that ends.
"""
