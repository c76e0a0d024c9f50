"""Moves KV blocks from a prefill worker's pool into blocks that a decode worker reserved.

Bottom up: `digest` and `pool` (the bytes), `seam` (what a transport is), `movers` with `kernels/`
(how bytes of a pool are copied: on the host, or on a GPU's stream), `memory` / `shm` / `cuda_ipc` /
`process_group` (the transports), `negotiation` (what two workers agree on); on the prefill side
`aborts`, `connector`, `links`, `delivery` (one attempt) and `sender` (a handoff, with its resends);
on the decode side `peers` (its links), `incoming`, `receiver` and `service`. Nothing here knows an
engine, a router or a request's text.
"""
