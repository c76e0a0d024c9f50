"""What `baton demo` says of the way a completion took."""

from baton.client import Completion, Route, Timing, Usage
from baton.local.demo import route_text

USAGE = Usage(prompt_tokens=83, completion_tokens=64, cached_tokens=16)
TIMING = Timing(1.0, 54.4, 4.66, 352.3, 2.61, 339_968)


def test_the_route_says_where_a_completion_ran_and_what_moved() -> None:
    moved = Completion("x", (1,) * 64, "length", usage=USAGE, timing=TIMING,
                       route=Route("p1", "d1", "shm", 1))  # fmt: skip
    assert route_text(moved).splitlines() == [
        "  prefill by p1, decode by d1",
        "  KV cache moved over shm: 332.0 KiB in 2.6 ms",
        "  83 prompt tokens (16 from a cache), 64 generated, finish reason: length",
        "  first token after 54 ms, then one each 4.7 ms, 352 ms in all",
    ]
    alone = Completion("x", (1,), "length", route=Route(None, "d1", None, 1))
    assert "prefill and decode by d1: no KV cache had to move" in route_text(alone)
