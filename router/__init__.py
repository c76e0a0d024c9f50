"""The router: admits requests, places each on a pair of workers, and delivers its tokens.

Read `request` first, then `generation_service` and `dispatch.dispatch`. The router speaks text with
callers and token ids with workers; it has no tensors, keeps nothing on disk, and any number of
routers can serve one cluster. HTTP APIs are in `baton.gateway`, options and defaults in
`baton.config.router`, stop strings and tool parsers in `baton.text`. Folders, each importing only
those behind it: output; admission and dispatch; telemetry; placement and queueing; fleet.
"""
