"""Admission: validation, tokenizing, tenants, rate limits, and refusal of what would be late."""
