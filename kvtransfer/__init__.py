"""Moves KV blocks from a prefill worker's pool into blocks that a decode worker reserved.

Bottom up: `digest` and `pool` (the bytes), `interface` (what a transport is), `copier` with
`kernels/` (copies of a pool's bytes, on the host or on a CUDA stream), `transports/`, `pairing`
(what two workers agree on); on the prefill side `links` and `sender` (a handoff, with its resends);
on the decode side `receiver`. Nothing here knows an engine, a router or a
request's text.
"""
