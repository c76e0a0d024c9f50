"""`baton trace` and `baton top` against a cluster: what one request did, and what routers tell."""

import json
import re
import signal
from pathlib import Path

import pytest

from tests.cluster.command import baton, running

PROMPT = "class Stack:\n    def push(self, item):\n        self.items.append(item)\n" * 12
STARTED = re.compile(r"ready: (\S+), etcd")


@pytest.mark.timeout(300)
async def test_a_request_can_be_traced_afterwards(tmp_path: Path) -> None:
    """`baton up` keeps traces without being told to, and any router says where."""
    env = {"TMPDIR": str(tmp_path)}
    async with running("up", "--port", "0", "--drain-timeout", "1", env=env) as up:
        match = STARTED.match(await up.says("ready: ", 120.0))
        assert match
        target = ("--target", match[1])
        await up.says(f"baton trace --target {match[1]}")
        empty = await baton("trace", *target)
        assert (empty.status, empty.out) == (1, "")
        assert "keeps no trace of a request yet" in empty.err

        done = await baton("generate", PROMPT, "--max-tokens", "8", "--json", *target)
        trace_id = json.loads(done.out)["trace_id"]
        drawn = await baton("trace", trace_id, *target)
        assert (drawn.status, drawn.err) == (0, "")
        assert drawn.out.startswith(f"trace {trace_id}: ")
        for span in (
            "router  router.generate", "router  router.admit", "router  router.place",
            "decode  decode.reserve", "prefill  prefill.chunk", "prefill  kv.transfer",
            "decode  decode.run",
        ):  # fmt: skip
            assert re.search(rf"─ {span}|^{span}", drawn.out, re.M), (span, drawn.out)
        share = re.search(r"spans account for ([\d.]+)% of the request's", drawn.out)
        assert share and 80 < float(share[1]) <= 100

        refused = await baton("generate", "--token-ids", "99999999", *target)
        assert refused.status == 1
        listed = json.loads((await baton("trace", "--json", *target)).out)["traces"]
        assert [(told["trace_id"] == trace_id, told["error"] is None) for told in listed] in (
            [(False, False), (True, True)],
            [(True, True)],  # the refused one's span is still on its way
        )
        last = await baton("trace", "--slowest", "1", *target)
        assert trace_id in last.out

        unknown = await baton("trace", "2" * 32, *target)
        assert (unknown.status, unknown.out) == (1, "")
        assert "has no trace " + "2" * 32 in unknown.err

        frame = await baton("top", "--once", "--interval", "0.2", *target)
        assert (frame.status, frame.err) == (0, "")
        for role in ("prefill", "decode"):
            assert re.search(rf"^{role} +{role}-0-[0-9a-f]{{8}} +READY ", frame.out, re.M), (
                frame.out
            )
        assert re.search(
            r"^prefill-0-[0-9a-f]{8}  decode-0-[0-9a-f]{8}  shm +OPEN ", frame.out, re.M
        ), frame.out
        assert "refused INVALID_ARGUMENT: token id 99999999" in frame.out
        counts = json.loads((await baton("status", "--json", *target)).out)["router"]["counts"]
        assert counts["ended"] == {"OK": 1, "INVALID_ARGUMENT": 1}
        assert (counts["refused"], counts["output_tokens"]) == (1, 8)
        assert await up.end(signal.SIGTERM) == 0
    nobody = await baton("top", "--once", "--interval", "0.2", *target)
    assert (nobody.status, nobody.out) == (1, "")
    assert f"no router answers: {match[1]}: " in nobody.err
