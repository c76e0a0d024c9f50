"""The load generator: asks servers as their users would, and reports what the users got."""
