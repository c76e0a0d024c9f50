"""Admission: validation, tenants, rate limits, fair queueing, and the wait queue."""
