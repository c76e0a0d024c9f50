"""Programs that compute with one engine each and say how long it took; see `answering`.

Each runs in a process of its own, under the interpreter that has its library.
"""
