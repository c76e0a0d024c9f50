"""From scores to tokens: filters, penalties, randomness by (seed, position)."""
