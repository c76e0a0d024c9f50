"""The planner: how many workers of which role, from what routers measure.

`decision` decides and does nothing else; `main` observes, elects a leader, publishes and acts.
"""
