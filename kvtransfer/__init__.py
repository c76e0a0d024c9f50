"""Moves KV blocks from a prefill worker's pool into blocks that a decode worker reserved.

Bottom up: `pool` (the bytes), `seam` (what a transport is), `memory` / `shm` / `process_group` (the
transports), `negotiation` (what two workers agree on), `links` and `sender` (prefill side),
`receiver` and `service` (decode side). Nothing here knows an engine, a router or a request's text.
"""
