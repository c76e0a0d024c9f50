"""The router: admits requests, places each on a pair of workers, and delivers its tokens.

Read `dispatch` first. The router speaks text with callers and token ids with workers; it knows no
tensor, keeps nothing on disk, and any number of routers can serve one cluster.
"""
