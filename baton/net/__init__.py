"""Networking: gRPC, the HTTP server, TLS, and connections between processes of one worker."""
