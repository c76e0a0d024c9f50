"""Workers that draft: prompts as ever, several tokens in an event, and the same tokens in all."""

from baton.v1 import prefill_pb2
from tests.unit.worker.running import Router, Worker, spec, target

MOST = 60


async def test_a_stream_is_the_same_in_fewer_events(directory, store):
    # A text that repeats itself, and so does what a random model makes of it.
    wanted = spec("a", [7, 8, 9, 10, 11] * 8, MOST)
    wanted.sampling.logprobs = 1
    async with (
        Worker("prefill", directory, store, speculate=4) as prefill,
        Worker("decode", directory, store, speculate=4, incarnation="drafting") as drafting,
        Worker("decode", directory, store, incarnation="plain") as plain,
    ):
        firsts = []
        streams = []
        for decode in (plain, drafting):
            async with Router(decode) as router:
                to = target(decode, await router.reserve(wanted))
                request = prefill_pb2.PrefillRequest(sequence=wanted, target=to)
                responses = [message async for message in prefill.prefill.Prefill(request)]
                assert responses[-1].HasField("committed")
                firsts.append(responses[1].first_token)
                streams.append([await router.event("a")])
                while not streams[-1][-1].finish_reason:
                    assert not streams[-1][-1].abort_reason
                    streams[-1].append(await router.event("a"))
                assert await decode.clean()
        assert await prefill.clean()
        events, fewer = streams
        tokens = [token for event in fewer for token in event.token_ids]
        assert firsts[0] == firsts[1]
        assert tokens == [token for event in events for token in event.token_ids]
        assert len(tokens) == len(events) == MOST - 1 > len(fewer)
        assert all(len(event.logprobs) == len(event.token_ids) for event in fewer)
        assert [one.chosen.token_id for event in fewer for one in event.logprobs] == tokens
        assert not any(event.finish_reason for event in fewer[:-1])
        for decode, right in ((drafting, len(events) - len(fewer)), (plain, 0)):
            page = decode.node.metrics.render("")[1].decode()
            assert f'baton_engine_drafts_total{{right="yes"}} {right}' in page
