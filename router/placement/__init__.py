"""Which pair of workers a request runs on: filter, score, pick."""
