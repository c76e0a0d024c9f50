"""Async scheduling: which plans use launched rows, and which writes are waited for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.engine.backends.gpu.async_scheduling import BatchStability, Launch, Row, Writes
from baton.engine.backends.gpu.device import HostStream
from baton.engine.backends.gpu.runner import GpuRunner
from baton.engine.planner import Plan, Work
from baton.engine.sequence import Sequence
from baton.sampling import SamplingParams
from tests.unit.engine.gpu.driving import MODEL, SIZE, Driven, on_gpu, plain
from tests.unit.engine.gpu.lazy_stream import LazyStream

LONG = SamplingParams(max_tokens=40, ignore_eos=True)


def sequence(name: str, length: int = 6, params: SamplingParams = LONG) -> Sequence:
    tokens = [(7 * i + sum(name.encode())) % 90 + 2 for i in range(length)]
    return Sequence(name, tokens, length, params)


def runner_of(driven: Driven) -> GpuRunner:
    assert isinstance(driven.runner, GpuRunner)
    return driven.runner


def async_launch_of(driven: Driven) -> Launch:
    async_launch = runner_of(driven)._async_launch
    assert async_launch is not None
    return async_launch


def decoding(stream: HostStream, names: str = "ab", num_blocks: int = 40) -> Driven:
    """Some sequences, and the step that nobody has planned for them on the stream."""
    driven = on_gpu(stream, num_blocks)
    for name in names:
        driven.add(sequence(name))
    for _ in range(4):
        driven.step()
    assert set(async_launch_of(driven).rows) == set(driven.planner.running)
    return driven


def tokens_alone(name: str, params: SamplingParams = LONG) -> list[int]:
    driven = plain(40)
    driven.add(sequence(name, params=params))
    driven.finish()
    return driven.tokens[name]


class TestBlocksThatOthersWriteInto:
    """A prefill worker writes into reserved blocks without this engine's stream."""

    CONTENT = 5.0

    def reserve_all_and_write(self, driven: Driven, stream: LazyStream) -> Tensor:
        """What a reservation of all free blocks holds once a late stream has done everything."""
        free = driven.blocks.num_available
        late = sequence("late", free * SIZE - 1)
        pool, blocks = driven.runner.pool, list(driven.sequences.reserve(late).block_ids)
        assert len(blocks) == free
        pool[blocks] = self.CONTENT
        stream.run(stream.pending)
        return pool[blocks]

    @pytest.mark.parametrize("waits", [True, False])
    def test_a_row_of_a_cancelled_sequence_has_ended_by_then(
        self, waits: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stream = LazyStream()
        driven = decoding(stream)
        if not waits:
            monkeypatch.setattr(driven.runner, "wait_for_writes", lambda blocks: None)
        driven.cancel("a")
        content = self.reserve_all_and_write(driven, stream)
        assert bool((content == self.CONTENT).all()) == waits

    @pytest.mark.parametrize("waits", [True, False])
    def test_zeroes_are_written_by_then(self, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        stream = LazyStream()
        driven = decoding(stream, "a")
        if not waits:
            monkeypatch.setattr(driven.runner, "wait_for_writes", lambda blocks: None)
        driven.sequences.reserve(sequence("gone"))
        driven.cancel("gone")  # its blocks may hold anything
        assert stream.pending == 2
        content = self.reserve_all_and_write(driven, stream)
        assert bool((content == self.CONTENT).all()) == waits

    def test_zeroes_behind_a_step_that_was_ahead_are_not_over_when_that_is(self) -> None:
        stream = LazyStream()
        driven = decoding(stream, "a")
        driven.sequences.reserve(sequence("gone"))
        driven.cancel("gone")
        driven.step()  # takes the row that was on the stream before the zeroes
        assert stream.pending == 2
        content = self.reserve_all_and_write(driven, stream)
        assert bool((content == self.CONTENT).all())

    def test_blocks_that_nothing_writes_into_are_not_waited_for(self) -> None:
        stream = LazyStream()
        driven = decoding(stream)
        driven.sequences.reserve(sequence("late"))
        assert stream.pending == 1
        runner_of(driven).wait_for_writes([0, 1, 2])
        driven.cancel("late")
        driven.finish()
        assert driven.tokens == {name: tokens_alone(name) for name in "ab"}

    def test_a_row_whose_block_was_given_away_meanwhile_is_computed_again(self) -> None:
        stream = LazyStream()
        driven = decoding(stream)
        before = runner_of(driven).stats.wasted_rows
        row = next(iter(async_launch_of(driven).rows.values()))
        block = row.blocks[row.start // SIZE]
        runner_of(driven).wait_for_writes([block])
        driven.runner.pool[block, ..., row.start % SIZE, :] = torch.nan
        driven.finish()
        assert driven.tokens == {name: tokens_alone(name) for name in "ab"}
        assert runner_of(driven).stats.wasted_rows == before + 1

    def test_all_of_the_pool_can_be_waited_for(self) -> None:
        stream = LazyStream()
        driven = decoding(stream)
        driven.runner.scrub([30])
        assert stream.pending == 2
        runner_of(driven).wait_for_writes()
        assert stream.pending == 0


def test_inputs_of_an_unused_row_stay_until_it_has_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = LazyStream()
    driven = decoding(stream)
    for _ in range(12):  # until one who joins is a rare event
        driven.step()
    positions = [row.start for row in async_launch_of(driven).rows.values()]
    for name in "ab":
        driven.cancel(name)
    late = sequence("c")
    driven.tokens["c"], driven.logprobs["c"] = [], []
    driven.sequences.reserve(late)
    driven.sequences.resume("c", late.num_tokens, 9)
    decode, seen = MODEL.decode, []

    def watched(token_ids: Tensor, context_lens: Tensor, *rest: Tensor) -> Tensor:
        seen.append(context_lens.tolist())
        return decode(token_ids, context_lens, *rest)

    monkeypatch.setattr(MODEL, "decode", watched)
    assert stream.pending == 1
    driven.step()
    stream.run(stream.pending)
    assert seen == [positions, [6], [7]]


class TestFailures:
    def test_an_async_step_that_fails_on_the_device_fails_its_own_run(self) -> None:
        stream = LazyStream()
        driven = decoding(stream)
        known = {name: list(driven.tokens[name]) for name in "ab"}
        stream.fails_in = 0
        assert stream.pending == 1
        driven.step()
        assert [one.abort_reason for one in driven.progress] == [
            "engine step failed: RuntimeError: the device failed"
        ] * 2
        assert driven.tokens == known
        assert stream.pending == 0, "what was ahead of the failed one has ended"
        driven.add(sequence("c"))
        driven.finish()
        assert driven.tokens["c"] == tokens_alone("c")

    def test_the_run_that_launched_it_does_not_fail(self) -> None:
        stream = LazyStream()
        driven = decoding(stream)
        stream.fails_in = 1  # the one that the next run launches ahead
        driven.step()
        assert all(one.token_ids and not one.abort_reason for one in driven.progress)
        driven.step()
        assert all(one.abort_reason for one in driven.progress)

    def test_it_is_not_raised_by_a_reservation(self) -> None:
        stream = LazyStream()
        driven = decoding(stream)
        row = next(iter(async_launch_of(driven).rows.values()))
        stream.fails_in = 0
        runner_of(driven).wait_for_writes([row.blocks[row.start // SIZE]])
        assert stream.pending == 0
        driven.step()
        assert all("device failed" in str(one.abort_reason) for one in driven.progress)

    def test_a_failed_launch_that_is_not_used_is_not_raised(self) -> None:
        stream = LazyStream()
        driven = decoding(stream)
        stream.fails_in = 0
        for name in "ab":
            driven.cancel(name)
        driven.add(sequence("c"))
        driven.finish()
        assert driven.tokens["c"] == tokens_alone("c")
        assert driven.ends["c"] == "length"

    def test_one_that_cannot_be_launched_is_computed_when_it_is_planned(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        driven = decoding(HostStream())
        decode, calls = MODEL.decode, list[int]()

        def failing(*arguments: Tensor) -> Tensor:
            calls.append(len(calls))
            if len(calls) == 1:  # the step behind the one that is ahead already
                raise RuntimeError("out of memory")
            return decode(*arguments)

        monkeypatch.setattr(MODEL, "decode", failing)
        driven.step()
        assert "async launch failed" in caplog.text
        assert runner_of(driven)._async_launch is None
        driven.finish()
        assert driven.tokens == {name: tokens_alone(name) for name in "ab"}

    def test_logits_that_are_no_numbers_fail_the_step_and_are_no_index(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drawn = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0)
        driven = on_gpu(LazyStream(), 40)
        driven.add(sequence("a", params=drawn))
        driven.step()
        decode = MODEL.decode
        fed: list[int] = []

        def broken(token_ids: Tensor, *arguments: Tensor) -> Tensor:
            fed.extend(token_ids.tolist())
            return decode(token_ids, *arguments) * torch.nan

        monkeypatch.setattr(MODEL, "decode", broken)
        driven.step()
        assert "not finite" in str(driven.progress[0].abort_reason)
        assert len(fed) == 2, "one was ahead of it"
        assert max(fed) < MODEL.config.vocab_size


class TestRowsForAPlan:
    def launch(self, one: Sequence) -> Launch:
        """Sequence `one`'s last token, computed ahead."""
        row = Row(0, one.num_tokens - 1, list(one.block_ids))
        launch = Launch({one: row}, 1, 0, HostStream().record_event(), [2], [0])
        launch.feed([0, 0, one.tokens[-1]])
        return launch

    def one(self) -> Sequence:
        one = sequence("a", 7)
        one.block_ids, one.num_computed = [4, 9], 6
        return one

    def test_the_work_that_is_just_the_same(self) -> None:
        one = self.one()
        assert self.launch(one).rows_for([Work(one, 6, 1)]) == {one: 0}

    @pytest.mark.parametrize("blocks", [[4, 8], [9, 4], [4], [4, 8, 9]], ids=str)
    def test_not_with_other_blocks(self, blocks: list[int]) -> None:
        one = self.one()
        launch = self.launch(one)
        one.block_ids = blocks
        assert not launch.rows_for([Work(one, 6, 1)])

    def test_not_with_another_token_position_draft_or_object(self) -> None:
        one, other = self.one(), self.one()
        launch = self.launch(one)
        assert not launch.rows_for([Work(other, 6, 1)])
        assert not launch.rows_for([Work(one, 6, 2, (5,))])
        assert not launch.rows_for([Work(one, 5, 2)])
        one.tokens.append(3)
        assert not launch.rows_for([Work(one, 7, 1)])
        assert not launch.rows_for([Work(one, 6, 1)]), "a token behind it is known: it draws none"
        one.tokens[6:] = [one.tokens[6] + 1]
        assert not launch.rows_for([Work(one, 6, 1)])


class TestAsyncLaunches:
    def step_with(self, **settings: object) -> GpuRunner:
        driven = on_gpu(LazyStream(), 40)
        driven.add(sequence("a"))
        params = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **settings})  # type: ignore[arg-type]
        driven.add(sequence("b", params=params))
        for _ in range(3):
            driven.step()
        return runner_of(driven)

    def test_all_that_go_on(self) -> None:
        runner = self.step_with()
        assert len(runner._async_launch.rows) == 2  # type: ignore[union-attr]

    def test_those_that_end_by_length_are_left_out(self) -> None:
        runner = self.step_with(max_tokens=3)
        assert [one.seq_id for one in runner._async_launch.rows] == ["a"]  # type: ignore[union-attr]

    @pytest.mark.parametrize(
        "settings",
        [
            {"logprobs": 1},
            {"repetition_penalty": 1.2},
            {"logit_bias": {3: 1.0}},
            {"min_tokens": 30},
        ],
        ids=str,
    )
    def test_none_where_one_needs_the_host(self, settings: dict[str, object]) -> None:
        assert self.step_with(**settings)._async_launch is None

    def test_none_where_one_has_no_slot(self) -> None:
        driven = on_gpu(LazyStream(), 3)  # the third block is all that is left: not plentiful
        driven.add(sequence("a", 5))
        driven.step()
        driven.step()
        driven.step()
        assert driven.planner.running.first.num_tokens == 8
        runner = runner_of(driven)
        before = runner.stats.async_launches
        assert before == 2
        driven.step()
        assert runner.stats.async_launches == before

    def test_one_that_is_to_park_stops_there(self) -> None:
        stream = LazyStream()
        driven = on_gpu(stream, 40)
        parking = sequence("a")
        parking.park_after = 4
        driven.add(parking)
        for _ in range(3):
            driven.step()
        assert len(async_launch_of(driven).rows) == 1  # the fourth token
        driven.step()
        assert runner_of(driven)._async_launch is None
        assert stream.pending == 0
        assert driven.tokens["a"] == tokens_alone("a")[:4]
        assert len(parking.block_ids) == -(-10 // SIZE)

    def test_another_engine_uses_nothing_of_the_last_one(self) -> None:
        stream = LazyStream()
        runner = decoding(stream).runner
        assert stream.pending == 1
        second = Driven(runner, 40, lookahead=1)
        for name in "ab":
            second.add(sequence(name))
        second.finish()
        assert second.tokens == {name: tokens_alone(name) for name in "ab"}


class TestNewcomers:
    """Who comes with all but one token computed is part of the next launch, not of an extra one."""

    def come(self, driven: Driven, name: str, **settings: object) -> None:
        """A sequence of one token; it needs nobody's KV."""
        params = SamplingParams(**{"max_tokens": 9, "ignore_eos": True, **settings})  # type: ignore[arg-type]
        driven.tokens[name], driven.logprobs[name] = [], []
        driven.sequences.reserve(sequence(name, 1, params))
        driven.sequences.start_reserved(name)

    def test_they_join_the_step_behind_the_one_that_is_launched(self) -> None:
        driven = decoding(LazyStream(), "a")
        self.come(driven, "new")
        for _ in range(2):
            driven.step()
            assert {one.seq_id for one in driven.progress} == {"a"} | ({"new"} if _ else set())
            assert {one.seq_id for one in async_launch_of(driven).rows} == {"a", "new"}
        driven.finish()
        expected = plain(40)
        expected.add(sequence("new", 1, SamplingParams(max_tokens=9, ignore_eos=True)))
        expected.finish()
        assert driven.tokens == {"a": tokens_alone("a"), "new": expected.tokens["new"]}

    def test_one_a_step_costs_no_launch_of_its_own(self) -> None:
        driven = decoding(LazyStream(), "a")
        stats = runner_of(driven).stats
        launches = stats.launches
        for step in range(20):
            self.come(driven, f"n{step}", max_tokens=4)
            driven.step()
        assert stats.launches == launches + 20
        assert (stats.split, stats.wasted_rows) == (0, 0)

    def test_one_that_leaves_before_its_step_is_planned_wastes_its_row(self) -> None:
        driven = decoding(LazyStream(), "a")
        self.come(driven, "new")
        driven.step()
        driven.cancel("new")
        driven.finish()
        assert driven.tokens == {"a": tokens_alone("a"), "new": []}
        assert runner_of(driven).stats.wasted_rows == 1

    @pytest.mark.parametrize("settings", [{"logprobs": 1}, {"presence_penalty": 1.0}], ids=str)
    def test_one_that_needs_the_host_is_computed_at_once(self, settings: dict[str, object]) -> None:
        driven = decoding(LazyStream(), "a")
        self.come(driven, "new", **settings)
        driven.step()
        assert {one.seq_id for one in driven.progress} == {"a", "new"}
        assert runner_of(driven).stats.split == 1

    def test_without_an_async_launch_they_are_computed_at_once(self) -> None:
        driven = on_gpu(LazyStream(), 40)
        driven.add(sequence("a"))
        driven.step()
        assert runner_of(driven)._async_launch is None
        self.come(driven, "new")
        driven.step()
        assert {one.seq_id for one in driven.progress} == {"a", "new"}


class TestBatchStability:
    def works(self, *sequences: Sequence) -> Plan:
        return Plan([Work(one, one.num_tokens - 1, 1) for one in sequences])

    def test_it_is_steady_while_few_join(self) -> None:
        stability, some = BatchStability(), [sequence(name) for name in "abcdefgh"]
        for count in range(1, len(some)):
            for _ in range(10):
                stability.observe(self.works(*some[:count]))
                assert stability.steady
            stability.observe(self.works(some[0]))  # leaving is no change
            assert stability.steady

    def test_it_is_not_while_sequences_keep_joining_and_is_again_later(self) -> None:
        stability = BatchStability()
        for at in range(20):
            stability.observe(self.works(sequence(str(at))))
        assert not stability.steady
        same = self.works(sequence("a"))
        steady = []
        for _ in range(30):
            stability.observe(same)
            steady.append(stability.steady)
        assert not steady[5]
        assert all(steady[25:])


def test_writes_are_forgotten_once_they_are_waited_for() -> None:
    stream, writes = LazyStream(), Writes()
    for block in range(4):
        stream.put(lambda: None)
        writes.add(stream.record_event(), [block])
    writes.wait({1})
    assert (stream.pending, len(writes)) == (2, 2)
    writes.wait({1})
    assert (stream.pending, len(writes)) == (2, 2)
    end = writes.end
    writes.wait(None)
    assert (stream.pending, len(writes)) == (0, 0)
    writes.add(stream.record_event(), [0])
    writes.ended(end)  # of which all has been forgotten
    assert len(writes) == 1
    writes.ended(end + 1)
    assert len(writes) == 0
