"""What `baton doctor` looks at: `machine` and `cards` here, `links` and `fleet` at a router."""
