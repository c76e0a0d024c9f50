"""From tokens to what a caller receives: text, reasoning, tool calls, and delivery."""
