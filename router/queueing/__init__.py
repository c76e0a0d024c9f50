"""Order of requests: weighted fair queueing over tenants, and the wait queue for room."""
