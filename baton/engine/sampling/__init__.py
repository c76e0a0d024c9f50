"""Sampling of tokens from logits: penalties, filters, and randomness by (seed, position)."""
