"""The workers as this router sees them: liveness, load, circuit breakers."""
