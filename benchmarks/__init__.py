"""Benchmarks against other programs: `python -m benchmarks engine` and `python -m benchmarks
serve`.

Not part of what is installed: it starts programs that are not Baton's, some under an interpreter
of their own. What loads one server and needs no such thing is `baton bench serve`.
"""
