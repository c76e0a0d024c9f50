"""Running a placed request over its pair, and failing over."""
