"""What `baton demo` says, without a cluster."""

import dataclasses

from baton.client import Completion, Route, Timing, Usage
from baton.local import demo

DONE = Completion(
    text="x",
    token_ids=(1,) * 64,
    finish_reason="length",
    usage=Usage(prompt_tokens=83, completion_tokens=64, cached_tokens=16),
    timing=Timing(1.0, 54.4, 4.66, 352.3, 2.61, 339_968),
    route=Route("p1", "d1", "shm", 1),
)


def test_the_route_says_where_a_completion_ran() -> None:
    assert demo.route_text(DONE).splitlines() == [
        "  prefill by p1, decode by d1",
        "  KV cache moved over shm: 332.0 KiB in 2.6 ms",
        "  83 prompt tokens (16 from a cache), 64 generated, finish reason: length",
        "  first token after 54 ms, then one each 4.7 ms, 352 ms in all",
    ]
    alone = dataclasses.replace(DONE, route=Route(None, "d1", None, 1))
    text = demo.route_text(alone)
    assert text.startswith("  prefill and decode by d1: no KV cache had to move\n")
