"""Runs a request over a pair of workers, and fails over."""
