"""The load generator: sends requests as clients do, and reports what the clients see."""
