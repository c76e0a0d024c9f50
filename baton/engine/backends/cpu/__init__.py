"""CPU cores and threads of an engine."""
