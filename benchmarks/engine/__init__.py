"""How fast engines compute, side by side: decode steps and prompts, no server around them."""
