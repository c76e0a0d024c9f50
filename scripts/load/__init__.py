"""What the load experiments share: arrivals, a generator in a process of its own, figures."""
