"""How blocks move: one module a transport, all behind `interface`."""
