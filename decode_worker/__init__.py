"""The decode worker: reserves blocks, takes KV in, runs the continuous batch, streams tokens.

Read `reservations` first: who holds blocks, and every way that ends.
"""
