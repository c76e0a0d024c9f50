"""What prefill and decode workers have in common: load, register, serve, report, drain."""
