"""What the router counts, logs and traces."""
