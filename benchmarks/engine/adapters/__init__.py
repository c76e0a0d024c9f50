"""One engine each, in a process of its own under the interpreter that has its library; see
`protocol`.
"""
