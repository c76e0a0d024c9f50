"""The engine: runs a model over paged KV, one step after the other, on one thread.

Read `loop` first: admit, plan, run, publish. `planner` decides, `runner` computes. Prefill and
decode workers use the same engine; what differs is when a sequence is parked.
"""
