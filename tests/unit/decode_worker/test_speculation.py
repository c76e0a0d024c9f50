"""Workers that draft: prompts as ever, several tokens in an event, and the same tokens in all."""

from __future__ import annotations

from pathlib import Path

from baton.registry.memory import MemoryStore
from baton.v1 import common_pb2, decode_pb2, prefill_pb2
from tests.unit.worker.running import PATIENCE_S, Router, Worker, spec, target

LOOP = [7, 8, 9, 10, 11] * 8
MOST = 60


def wanted(name: str) -> common_pb2.SequenceSpec:
    """A text that repeats itself, and so does what a random model makes of it."""
    asked = spec(name, LOOP, MOST)
    asked.sampling.logprobs = 1
    return asked


def tokens_of(events: list[decode_pb2.SequenceEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


async def events_of(router: Router, name: str) -> list[decode_pb2.SequenceEvent]:
    """All events of a sequence."""
    events = [await router.event(name)]
    while not events[-1].finish_reason:
        assert not events[-1].abort_reason
        events.append(await router.event(name))
    return events


async def test_a_stream_is_the_same_in_fewer_events(directory: Path, store: MemoryStore) -> None:
    async with (
        Worker("prefill", directory, store, speculate=4) as prefill,
        Worker("decode", directory, store, speculate=4, incarnation="drafting") as drafting,
        Worker("decode", directory, store, incarnation="plain") as plain,
    ):
        streams = []
        for decode in (plain, drafting):
            async with Router(decode) as router:
                asked = wanted("a")
                reserved = await router.reserve(asked)
                request = prefill_pb2.PrefillRequest(
                    sequence=asked, target=target(decode, reserved)
                )
                call = prefill.prefill.Prefill(request, timeout=PATIENCE_S)
                responses = [message async for message in call]
                assert responses[-1].HasField("committed")
                streams.append((responses[1].first_token, await events_of(router, "a")))
                assert await decode.clean()
        (first, events), (other_first, fewer) = streams
        assert first == other_first
        assert tokens_of(fewer) == tokens_of(events)
        assert len(tokens_of(events)) == len(events) == MOST - 1
        assert len(fewer) < len(events)
        assert all(len(event.logprobs) == len(event.token_ids) for event in fewer)
        assert [one.chosen.token_id for event in fewer for one in event.logprobs] == tokens_of(
            fewer
        )
        assert [event.finish_reason for event in fewer][:-1] == [0] * (len(fewer) - 1)
        right = 'baton_engine_drafts_total{right="yes"}'
        assert f"{right} {len(events) - len(fewer)}" in drafting.node.metrics.render("")[1].decode()
        assert f"{right} 0" in plain.node.metrics.render("")[1].decode()
        assert await prefill.clean()
