"""Chooses the pair of workers for a request: filter, score, pick; and explains the choice."""
