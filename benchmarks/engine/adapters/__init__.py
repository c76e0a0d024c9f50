"""Adapters: programs that run one engine each, with the interpreter that has its library."""
