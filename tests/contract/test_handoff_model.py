"""Every order of reservations, leases, writes, aborts, resends, deaths and steps keeps the rules.

A state machine drives the bookkeeping of a decode worker. What is real: BlockManager, Scheduler and
Engine, Reservations and their event streams, IncomingLinks over the memory transport, links and
their bytes. What is not: the clock; the threads of the engine and of links, whose work runs when
the machine says so; and the model, whose stand-in checks what it reads. So every order of events
can be tried, and comes out the same when it is tried again.

`HYPOTHESIS_PROFILE=long` looks longer, and elsewhere each time.
"""

import asyncio
import itertools
import logging
import os
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer

from baton.block_hash import token_digest
from baton.engine.block_manager import BlockManager
from baton.engine.chunk_budget import ChunkBudget
from baton.engine.engine import Engine
from baton.engine.runner import SampledTokens, StepRunner
from baton.engine.scheduler import Scheduler
from baton.errors import DeadlineExceeded, KvCorrupted, Overloaded, Stale, Unavailable
from baton.generation.structured_output import GrammarCompiler
from baton.kv_groups import KvGroups
from baton.v1 import common_pb2, decode_pb2
from baton.v1 import handoff_pb2 as pb
from baton.v1.dispatch_pb2 import WorkerMessage
from baton.worker.messages import ModelLimits
from decode_worker.handoff import BEFORE_COMMIT, DECODING, State
from decode_worker.reservations import Reservations
from decode_worker.service import HandoffService
from decode_worker.spans import DecodeSpans
from kvtransfer import incoming
from kvtransfer.incoming import IncomingLinks
from kvtransfer.pool import Checksum, KvPool, Slots

from .kvtransfer_parts import MemoryTransport, answer

BLOCKS, BLOCK_SIZE = 10, 4
LEASE_S, DEADLINE_S = 10.0, 4.0
MOST_ROUTERS = 2
OUTPUT = 900  # tokens from here on are sampled, those below are prompts'
DESCRIPTOR = common_pb2.KvDescriptor(model_fingerprint="m", num_kv_heads=1, block_size=BLOCK_SIZE)
REST = (None, True)  # until nothing moves
# How many turns of the event loop follow, or None until nothing moves; whether the engine has one.
PACE = st.tuples(st.sampled_from([None, None, 0, 1, 2, 3, 5, 8]), st.booleans())
WHICH = st.integers(0, 99)
PUTS = st.sampled_from(["right", "right", "part", "wrong"])
# (family of prompts, its tokens, the most that are sampled, time left or 0)
SHAPES = st.tuples(
    st.integers(0, 1), st.integers(1, 14), st.integers(1, 6), st.sampled_from([0, 0, DEADLINE_S])
)


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still until `now` is changed."""

    now = 0.0

    def time(self):
        return self.now


class Inline(Executor):
    """A link's thread whose work is done at once, but for checksums: those wait in `checksums`."""

    checksums = []  # noqa: RUF012 (emptied for each machine)

    def __init__(self, *_, **__):
        pass

    def submit(self, work, *arguments):
        future = Future()

        def do():
            try:
                future.set_result(work(*arguments))
            except Exception as error:
                future.set_exception(error)

        if work.__name__ == "_read_checksum":
            self.checksums.append(do)
        else:
            do()
        return future


class CheckingRunner(StepRunner):
    """Stands for the model: the KV of a token is the token, and what is read must be that, unless
    it is not verified yet: what comes of it must not be told."""

    def __init__(self, pool, committed):
        super().__init__(pool, None)
        self._committed, self.wrong = committed, []

    def run(self, plan):
        return {
            one.sequence.seq_id: sampled for one in plan.sequences if (sampled := self._run(one))
        }

    def zero_blocks(self, blocks):
        self.pool[blocks] = 0

    def wait_for_writes(self, blocks=None):
        pass  # nothing runs here behind a step's back

    def close(self):
        pass

    def _run(self, work):
        sequence = work.sequence
        if sequence.awaits_kv or sequence.seq_id not in self._committed:
            self.wrong.append(f"{sequence.seq_id} was scheduled before Commit")
        found = content_of(self.pool, sequence.block_ids)[: work.start]
        if found != sequence.tokens[: work.start] and not sequence.unverified:
            self.wrong.append(f"{sequence.seq_id} read {found}, not {sequence.tokens}")
        for n in range(work.start, work.start + work.count):
            block = sequence.block_ids[n // BLOCK_SIZE]
            self.pool[block, ..., n % BLOCK_SIZE, :] = float(sequence.tokens[n])
        return SampledTokens((OUTPUT + sequence.num_tokens,)) if work.samples else None


def new_pool():
    return torch.zeros(BLOCKS, 1, 2, 1, BLOCK_SIZE, 1)


def content_of(pool, blocks):
    """The blocks' slots, as the tokens they stand for."""
    return pool[list(blocks), 0, 0, 0, :, 0].flatten().tolist()


def pick(items, which):
    return items[which % len(items)]


async def find(incarnation):
    """The registry's record of a prefill process."""
    return common_pb2.WorkerRecord(incarnation=incarnation, host_id="another")


class Writer:
    """A prefill process: its pool holds the right KV of one handoff at a time in its blocks."""

    def __init__(self, number):
        self.incarnation = f"p{number}"
        self.alive, self.noticed = True, False  # whether decode knows that it is dead
        self.pool = KvPool(new_pool())
        self.epochs = []  # all it ever had; the last one is current
        self.link = None

    async def offer(self, service):
        request = pb.OfferRequest(
            incarnation=self.incarnation, target_incarnation="d", kv=DESCRIPTOR,
            transports=[common_pb2.TRANSPORT_MEMORY],
        )  # fmt: skip
        response = await answer(service, "offer", request)
        self.link = service.links.transports[0].connect(self.pool, response.endpoint, 1.0)
        self.epochs.append(response.epoch)

    def put(self, handoff, kind):
        """Writes into the granted blocks: all of it, the first block only, or wrong bytes."""
        rest = handoff.tokens[handoff.cached :][: BLOCK_SIZE if kind == "part" else None]
        local = self._hold([float("nan")] * len(rest) if kind == "wrong" else rest)
        remote = Slots(handoff.granted[: len(local.block_ids)], len(rest))
        self.link.put(local, remote, Checksum(), 1.0)

    def checksum_of(self, handoff):
        """What the right KV comes to."""
        return self.pool.checksum_of(self._hold(handoff.tokens[handoff.cached :]))

    def _hold(self, content):
        """The slots of the own pool that now hold it, one number for each token."""
        for n, number in enumerate(content):
            self.pool.tensor[n // BLOCK_SIZE, ..., n % BLOCK_SIZE, :] = number
        return Slots(tuple(range(-(-len(content) // BLOCK_SIZE))), len(content))


@dataclass(eq=False)
class Handoff:
    """One request's handoff as its router and its prefill process know it."""

    name: str
    tokens: list
    cached: int
    token: str
    sequence: object  # the engine's: it knows the blocks
    writer: object = None
    epoch: int = 0  # of the attempt that runs
    granted: tuple = ()  # blocks that its writer may still write into
    corrupted: bool = False  # so said its last Commit's answer
    owes_abort: bool = False  # unless committed, it ends with an Abort that is answered
    withdrawn: bool = False  # decode has agreed to a resend that has not begun
    ready: object = None  # the call that asks for the grant
    attempt: int = 0  # what is answered to an earlier one is not listened to

    def stop_writing(self):
        """A call that is given up is cancelled at decode, before whatever is sent after it."""
        self.granted = ()
        self.attempt += 1
        if self.ready:
            self.ready.cancel()

    def fields(self):
        """Those that every message of its sender has."""
        sender = {"handoff_id": self.name, "reservation_token": self.token}
        return {**sender, "incarnation": self.writer.incarnation}


class Router:
    """A router's connection, as handoffs use it."""

    def __init__(self):
        self.waiting = {}  # for an answer to a reservation, by handoff id
        self.outgoing, self.outgoing_soon = SimpleNamespace(reserved=self), WorkerMessage()

    def flush(self):
        pass

    def add(self, **answer):
        self.waiting.pop(answer["handoff_id"]).set_result(answer)

    def failed(self, handoff_id, error):
        if (waiting := self.waiting.pop(handoff_id, None)) is not None:
            waiting.set_exception(error)
        else:  # its deadline has ended what was reserved, or it was refused then already
            assert isinstance(error, (DeadlineExceeded, Overloaded, Stale))


class DecodeWorker(RuleBasedStateMachine):
    """A decode worker, and what its routers and prefill processes know of their handoffs.

    Each rule sends a message or lets something happen, and says how far the worker gets before the
    next rule: not at all, a few turns of its event loop, or until everything has come to rest.
    """

    def __init__(self):
        super().__init__()
        self.committed = set()  # sequences that may run
        self.wrong = set()  # of these, what was committed with wrong KV: nobody may hear of it
        Inline.checksums.clear()
        self.numbers, self.calls, self.errors = itertools.count(), set(), []
        self.handoffs, self.writers, self.routers = [], [], []
        self.loop, self.pool = Loop(), new_pool()
        self.loop.set_exception_handler(lambda loop, context: self.errors.append(context))
        self.loop._default_executor = Inline()  # a real thread would not be at rest in time
        self.patch = mock.patch.object(incoming, "ThreadPoolExecutor", Inline)
        self.patch.start()
        self.runner = CheckingRunner(self.pool, self.committed)
        self.blocks = BlockManager(BLOCKS, BLOCK_SIZE)
        scheduler = Scheduler(self.blocks, ChunkBudget(8), max_batch=4)
        publish = lambda report: self.loop.call_soon(self.table.on_step, report)  # noqa: E731
        self.engine = Engine(self.runner, scheduler, frozenset(), 64, publish)
        limits, grammars = (
            ModelLimits(1000, 64, KvGroups((0,), BLOCK_SIZE)),
            GrammarCompiler(Path(), 1000, ()),
        )
        self.table = Reservations(self.engine, limits, grammars, LEASE_S, 10.0)
        record = common_pb2.WorkerRecord(incarnation="d", host_id="host", kv=DESCRIPTOR)
        transports = [MemoryTransport()]
        self.links = IncomingLinks(
            [KvPool(self.pool)], record, transports, find, self.table, timeout_s=10.0
        )
        self.service = HandoffService(self.table, self.links)

    @invariant()
    def what_always_holds(self):
        self.blocks.check()
        self.table.check()
        assert not self.runner.wrong
        assert not self.errors
        for handoff in self.handoffs:
            for block in handoff.granted:
                owners = [h for h in self.handoffs if block in h.sequence.block_ids]
                assert owners in ([handoff], []), "others have it"
                held = owners and self.blocks._refs[block] == 1
                assert held or block in self.blocks._quarantined
                assert block not in self.blocks._entries, "unverified bytes are in the prefix cache"
        for known in self.table._handoffs.values():
            early = known.events.started and known.state is not State.RUNNING
            assert not early, "a token came before its KV was verified"
        for router in self.routers:
            told = {event.handoff_id for event in router.outgoing_soon.events if event.token_ids}
            assert not told & self.wrong, "tokens of wrong KV were told"
        for block, entry in self.blocks._entries.items():
            assert content_of(self.pool, [block]) == list(entry.tokens)
        free = self.pool[list(self.blocks._free)]
        assert free.isfinite().all(), "unverified bytes are in a free block"

    def teardown(self):
        try:
            self.end()
            self.go(self.links.close())
        finally:
            self.patch.stop()
            self.loop.close()

    def end(self):
        """Once every writer has acknowledged or died and all routers are gone, nothing is left."""
        self.move()
        for handoff in self.handoffs:
            handoff.stop_writing()
            if handoff.owes_abort and handoff.writer.alive:
                self.send_abort(handoff, False)
        while self.unnoticed():
            self.notice_death(0, REST)
        held = self.blocks.num_quarantined
        assert held == 0, f"{held} blocks are quarantined though no writer is left"
        self.pass_time(2 * LEASE_S)  # no sender comes back: leases must end it
        left = self.table._handoffs
        assert all(known.state in DECODING for known in left.values())
        for _ in range(200):
            if left:
                self.steps(1, REST)
        assert not left, "a sequence never ended"
        assert self.blocks.num_held == self.blocks.num_quarantined == 0
        self.what_always_holds()

    # Who is there.

    @initialize()
    def begin(self):
        for _ in range(2):
            self.router_comes_or_goes(0, REST)
            self.start_writer(REST)

    @precondition(lambda self: len(self.living()) < 3)
    @rule(pace=PACE)
    def start_writer(self, pace):
        """A prefill process starts, or starts again, and opens its link."""
        self.writers.append(writer := Writer(next(self.numbers)))
        self.go(writer.offer(self.service), pace)

    @precondition(lambda self: self.writing())
    @rule(which=WHICH, pace=PACE)
    def open_link_anew(self, which, pace):
        """Its earlier epoch is over."""
        self.go(pick(self.writing(), which).writer.offer(self.service), pace)

    @precondition(lambda self: self.writing())
    @rule(which=WHICH)
    def kill_writer(self, which):
        """From now on it writes nothing, but decode has not noticed."""
        pick(self.writing(), which).writer.alive = False

    @precondition(lambda self: self.unnoticed())
    @rule(which=WHICH, pace=PACE)
    def notice_death(self, which, pace):
        writer = pick(self.unnoticed(), which)
        writer.noticed = True
        for handoff in self.handoffs:
            if handoff.writer is writer:
                handoff.stop_writing()
                handoff.owes_abort = False
        self.go(self.links.sender_exited(writer.incarnation), pace)

    @precondition(lambda self: len(self.routers) < MOST_ROUTERS or self.writing())
    @rule(which=WHICH, pace=PACE)
    def router_comes_or_goes(self, which, pace):
        async def change():
            if len(self.routers) < MOST_ROUTERS:
                self.routers.append(Router())
            else:
                self.table.lost(self.routers.pop(which % MOST_ROUTERS))

        self.go(change(), (1, False))
        self.move(pace)

    # One handoff.

    @rule(which=WHICH, shape=SHAPES, local=st.sampled_from([0, 0, 3]), pace=PACE)
    def reserve(self, which, shape, local, pace):
        """A router asks for blocks; with `local`, decode may start what is short by itself."""
        family, num_tokens, max_tokens, time_left_s = shape
        name = f"h{next(self.numbers)}"
        # Prompts of one family share their beginning, and no two positions are alike.
        tokens = [100 * family + n + 1 for n in range(num_tokens)]
        sampling = common_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        spec = common_pb2.SequenceSpec(
            handoff_id=name, token_ids=tokens, prompt_tokens=num_tokens, sampling=sampling,
            time_left_ms=int(time_left_s * 1000),
        )  # fmt: skip
        request = decode_pb2.ReserveRequest(sequence=spec, local_prefill_max_tokens=local)
        router = pick(self.routers, which)

        async def send():
            if local:
                self.committed.add(name)  # should it start by itself, it may run at once
            try:
                spans = DecodeSpans(NoOpTracer(), Context())
                answer = router.waiting[name] = self.loop.create_future()
                self.table.reserve(router, request, spans)
                reserved = await answer
            except (DeadlineExceeded, Overloaded, Unavailable, Stale):
                return
            if reserved["started"]:
                return
            self.committed.discard(name)
            if (known := self.live(name)) is not None:
                token, cached = reserved["reservation_token"], reserved["cached_tokens"]
                self.handoffs.append(Handoff(name, tokens, cached, token, known.sequence))

        self.go(send(), pace)

    @precondition(lambda self: self.living())
    @rule(which=WHICH, shape=SHAPES)
    def reserve_and_grant(self, which, shape):
        """Both, with nothing in between, so that there is always something under a write."""
        self.reserve(which, shape, 0, REST)
        self.handoffs = [
            h for h in self.handoffs if h.sequence.block_ids or h.owes_abort or h.granted
        ]
        if grantable := self.grantable():
            self.send_ready(grantable[-1], pick(self.living(), which), -1, REST)

    @precondition(lambda self: self.grantable() and self.living())
    @rule(which=WHICH, whose=WHICH, epoch=st.sampled_from([-1, -1, 0]), pace=PACE)
    def ready(self, which, whose, epoch, pace):
        """A prefill process asks for the grant, perhaps over a link that is gone."""
        self.send_ready(pick(self.grantable(), which), pick(self.living(), whose), epoch, pace)

    def send_ready(self, handoff, writer, epoch, pace):
        writer = handoff.writer or writer
        if not writer.alive or not writer.epochs:
            return
        handoff.writer, handoff.epoch = writer, writer.epochs[epoch]
        handoff.stop_writing()
        handoff.corrupted = handoff.withdrawn = False
        handoff.owes_abort, attempt = True, handoff.attempt
        request = pb.ReadyRequest(
            **handoff.fields(),
            epoch=handoff.epoch,
            first_token=handoff.cached,
            num_tokens=len(handoff.tokens) - handoff.cached,
        )

        async def send():
            try:
                response = await answer(self.service, "ready", request)
            except (Stale, Unavailable):
                return
            if writer.alive and handoff.attempt == attempt:
                handoff.granted = tuple(response.block_ids)

        handoff.ready = self.go(send(), pace)

    @precondition(lambda self: self.writing())
    @rule(which=WHICH, kind=PUTS)
    def put(self, which, kind):
        """Perhaps very late."""
        handoff = pick(self.writing(), which)
        handoff.writer.put(handoff, kind)

    @precondition(lambda self: self.writing())
    @rule(
        which=WHICH,
        change=st.sampled_from(["", "", "", "num_tokens", "num_bytes", "checksum", "epoch"]),
        pace=PACE,
    )
    def commit(self, which, change, pace):
        """The writer says that it is done, rightly or not."""
        self.send_commit(pick(self.writing(), which), change, pace)

    def send_commit(self, handoff, change, pace):
        writer = handoff.writer
        checksum = writer.checksum_of(handoff)
        request = pb.CommitRequest(
            **handoff.fields(),
            epoch=handoff.epoch,
            num_tokens=len(handoff.tokens),
            num_bytes=checksum.num_bytes,
            checksum=checksum.value,
            first_token_id=999,
            token_digest=token_digest(handoff.tokens),
        )
        if change == "epoch":  # that of a link that it did not begin on
            request.epoch = writer.epochs[-1] if handoff.epoch != writer.epochs[-1] else 0
        elif change:
            setattr(request, change, getattr(request, change) ^ 1)
        handoff.stop_writing()
        good = not change and self.is_there(handoff)
        if change not in ("num_tokens", "epoch"):
            self.committed.add(handoff.name)  # from here on it may run at any moment
            (self.wrong.discard if good else self.wrong.add)(handoff.name)

        async def send():
            try:
                await answer(self.service, "commit", request)
            except KvCorrupted:
                assert not good
                handoff.corrupted = True
                self.committed.discard(handoff.name)
            except (Stale, Unavailable):
                known = self.live(handoff.name)
                if known is None or known.state not in DECODING:
                    self.committed.discard(handoff.name)
            else:
                assert good, "wrong KV was taken for right"
                handoff.owes_abort = False

        self.go(send(), pace)

    @precondition(lambda self: self.writing())
    @rule(which=WHICH, kind=PUTS)
    def put_and_commit(self, which, kind):
        """Right, and nothing else happens meanwhile: decoding starts.

        Wrong: what decodes on it ends, and its reservation, too; none of it is told.
        """
        handoff = pick(self.writing(), which)
        self.move()
        if not handoff.granted:
            return
        reserved = self.is_reserved(handoff) and handoff.epoch == handoff.writer.epochs[-1]
        handoff.writer.put(handoff, kind)
        self.send_commit(handoff, "checksum" if kind == "part" else "", REST)
        if kind == "right":
            assert (handoff.name in self.committed) == reserved
            return
        assert handoff.corrupted == reserved
        if reserved:
            assert self.live(handoff.name) is None
            assert not self.may_be_written(handoff.name)

    @precondition(lambda self: self.writing())
    @rule(which=WHICH, kind=PUTS, turns=st.integers(1, 6))
    def decode_before_the_checksum(self, which, kind, turns):
        """What was committed runs, whole or wrong, while its checksum is still to be computed."""
        handoff = pick(self.writing(), which)
        self.move()
        if not handoff.granted:
            return
        handoff.writer.put(handoff, kind)
        self.send_commit(handoff, "checksum" if kind == "part" else "", (8, True))
        for _ in range(turns):
            self.steps(1, (3, False))

    @precondition(lambda self: self.owing())
    @rule(which=WHICH, how=st.sampled_from(["answered", "lost", "resend"]), pace=PACE)
    def abort(self, which, how, pace):
        """The writer stops; its Abort arrives now, never, or announces a resend.

        A resend keeps the reservation, and after it nothing is granted.
        """
        handoff = pick(self.owing(), which)
        at_rest = how == "resend" and pace[0] is None
        if at_rest:
            self.move()
        reserved = self.is_reserved(handoff)
        handoff.stop_writing()
        if how != "lost":
            self.send_abort(handoff, how == "resend", pace)
        if at_rest:
            assert self.is_reserved(handoff) == reserved
            assert not self.may_be_written(handoff.name)

    def send_abort(self, handoff, resend, pace=REST):
        request = pb.AbortRequest(**handoff.fields(), reason="test", resend=resend)

        async def send():
            try:
                await answer(self.service, "abort", request)
            except Stale:
                assert resend  # the reservation is gone: the sender still has to abort for good
                return
            handoff.withdrawn = handoff.owes_abort = resend

        self.go(send(), pace)

    @precondition(lambda self: self.handoffs)
    @rule(which=WHICH, pace=PACE)
    def cancel(self, which, pace):
        name = pick(self.handoffs, which).name
        known = self.live(name)

        async def cancel():
            self.table.cancel(known.events.router if known else self.routers[0], name)

        self.go(cancel(), pace)

    @precondition(lambda self: self.handoffs and self.living())
    @rule(which=WHICH, whose=WHICH, what=st.sampled_from(["ready", "commit", "abort"]))
    def message_of_a_stranger(self, which, whose, what):
        """A process that is not the sender, or does not have the token, is refused."""
        handoff, writer = pick(self.handoffs, which), pick(self.living(), whose)
        if not writer.epochs:
            return
        self.move()  # an Abort under way would free the name for any sender
        known = self.table._handoffs.get(handoff.name)
        foreign = writer is not handoff.writer and known is not None and known.transfer is not None
        token = handoff.token if foreign else "guessed"
        request = getattr(pb, f"{what.title()}Request")(
            handoff_id=handoff.name, reservation_token=token, incarnation=writer.incarnation
        )
        if what != "abort":
            request.epoch, request.num_tokens = writer.epochs[-1], 1

        async def send():
            try:
                await answer(self.service, what, request)
            except (Stale, Unavailable):
                return
            assert what == "abort", "a stranger was accepted"  # of which nothing is left to see

        before = (self.is_reserved(handoff), self.may_be_written(handoff.name))
        self.go(send())
        assert before == (self.is_reserved(handoff), self.may_be_written(handoff.name))

    # Time and the batch.

    @precondition(lambda self: self.handoffs)
    @rule(seconds=st.sampled_from([DEADLINE_S, LEASE_S / 2, LEASE_S]), rest=st.booleans())
    def time_passes(self, seconds, rest):
        """Leases and deadlines end what is not being written, and deadlines the rest too."""
        if rest:
            self.move()
        self.pass_time(seconds)
        now = self.loop.time()
        for known in self.table._handoffs.values():
            if known.state is not State.QUARANTINED:
                assert known.deadline is None or now < known.deadline
            if rest and seconds == LEASE_S and known.state in BEFORE_COMMIT:
                assert known.may_be_written, "a lease is over and nothing ended"

    @rule(times=st.integers(1, 3), pace=PACE)
    def steps(self, times, pace):
        """The engine's thread goes around."""
        for _ in range(times):
            self.engine.submit(self.engine._mark_stopping)
            self.engine._run_commands()
            self.engine._step()
            self.engine._stopping = False
        self.move((pace[0], False))

    # What the rules are made of.

    def go(self, call, pace=REST):
        """Begins a call, and lets the worker get as far as `pace` says."""
        task = self.loop.create_task(call)
        self.calls.add(task)
        self.move(pace)
        return task

    def move(self, pace=REST):
        ticks, turn = pace
        if ticks is None:
            self.settle()
            return
        self.tick(ticks)
        if turn:
            self.engine._inbox.run_all()

    def tick(self, times):
        """Runs what is ready on the event loop, once each time."""
        for _ in range(times):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    @precondition(lambda self: Inline.checksums)
    @rule(pace=PACE)
    def checksums_are_computed(self, pace):
        """Links' threads read what was written, which nothing has changed meanwhile."""
        self.compute_checksums()
        self.move(pace)

    def compute_checksums(self):
        while Inline.checksums:
            Inline.checksums.pop(0)()

    def settle(self):
        """Everything that can end without time passing ends."""
        for _ in range(100):
            self.compute_checksums()
            self.tick(2)
            if self.quiet():
                break
            self.engine._inbox.run_all()
        assert self.quiet(), f"stuck: {self.calls}"
        for call in self.calls:
            if not call.cancelled():
                call.result()
        self.calls.clear()

    def quiet(self):
        busy = self.table._tasks, self.links._tasks, self.loop._ready
        busy = *busy, Inline.checksums
        done = all(call.done() for call in self.calls)
        return done and not any(busy) and self.engine._inbox._jobs.empty()

    def pass_time(self, seconds):
        self.loop.now += seconds
        self.settle()

    def living(self):
        return [writer for writer in self.writers if writer.alive]

    def unnoticed(self):
        return [writer for writer in self.writers if not writer.alive and not writer.noticed]

    def writing(self):
        """Those whose writer may put bytes into decode's blocks now."""
        return [h for h in self.handoffs if h.granted and h.writer.alive]

    def owing(self):
        """Those of which decode does not know for sure that their writer has stopped."""
        return [h for h in self.handoffs if h.owes_abort and h.writer.alive]

    def grantable(self):
        """Reserved ones whose sender has not sent Ready, or has announced a resend."""
        reserved = filter(self.is_reserved, self.handoffs)
        return [h for h in reserved if h.withdrawn or not h.owes_abort]

    def live(self, name):
        """The worker's own record of a handoff, unless it is over for its router."""
        known = self.table._handoffs.get(name)
        return None if known is None or known.state is State.QUARANTINED else known

    def may_be_written(self, name):
        known = self.table._handoffs.get(name)
        return known is not None and known.may_be_written

    def is_reserved(self, handoff):
        known = self.live(handoff.name)
        return known is not None and known.state in BEFORE_COMMIT - {State.REQUESTED}

    def is_there(self, handoff):
        """Whether the handoff's KV lies in decode's blocks, however it came there."""
        known = self.live(handoff.name)
        if known is None or known.block_ids is None:
            return False
        found = content_of(self.pool, known.block_ids)
        return found[: len(handoff.tokens)] == handoff.tokens


common = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
PROFILES = {
    "suite": settings(max_examples=160, stateful_step_count=40, derandomize=True, **common),
    "long": settings(max_examples=5000, stateful_step_count=80, **common),
}
TestDecodeWorker = DecodeWorker.TestCase
TestDecodeWorker.settings = PROFILES[os.environ.get("HYPOTHESIS_PROFILE", "suite")]


@pytest.fixture(autouse=True)
def quiet():
    """The worker warns of everything that is done to it here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
