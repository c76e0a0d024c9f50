"""Moves KV blocks from a prefill worker's pool into blocks that a decode worker reserved.

Two layers: a transport moves bytes between two pools (`interface`, `transports/`, and
`remote_pool` for pools on other hosts); a link joins two workers over a transport (`rank_ends`,
`outgoing`, `incoming`). Below them `checksum`, `pool` and `copier` with `kernels/` (copies and
checksums of a pool's bytes), and `pairing` (which transport two workers use). Above them `control`
(the gRPC stream) and `sender` (a handoff and its resends). No module here imports an engine.
"""
