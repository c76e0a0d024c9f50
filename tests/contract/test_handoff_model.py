"""Every order of reservations, leases, writes, aborts, resends, deaths and steps keeps the rules.

A state machine drives the real bookkeeping of a decode worker (`handoff_world`). Each rule sends a
message or lets something happen, and says how far the worker gets before the next rule: not at all,
a few turns of its event loop, or until everything has come to rest.

`HYPOTHESIS_PROFILE=long` looks longer, and elsewhere each time.
"""

import itertools
import logging
import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.errors import KvCorrupted, Overloaded, Stale, Unavailable
from baton.prefix import token_digest
from baton.v1 import handoff_pb2 as pb

from .handoff_world import LEASE_S, Handoff, World, Writer, content_of, prompt, spec
from .kvtransfer_parts import answer

ROUTERS = ("r0", "r1")
REST = (None, True)  # until nothing moves
# How many turns of the event loop follow, or None until nothing moves; whether the engine has one.
PACE = st.tuples(st.sampled_from([None, None, 0, 1, 2, 3, 5, 8]), st.booleans())
WHICH = st.integers(0, 99)
DEADLINE_S = 4.0
# (family of prompts, its tokens, the most that are sampled, time left or 0)
SHAPES = st.tuples(
    st.integers(0, 1), st.integers(1, 14), st.integers(1, 6), st.sampled_from([0, 0, DEADLINE_S])
)


def pick(items, which):
    return items[which % len(items)]


class DecodeWorker(RuleBasedStateMachine):
    """A decode worker, and what its routers and prefill processes know of their handoffs."""

    def __init__(self):
        super().__init__()
        self.verified = set()  # sequences that may run
        self.world = World(self.verified.__contains__)
        self.numbers = itertools.count()
        self.handoffs, self.writers = [], []

    # What always holds.

    @invariant()
    def the_pool_is_sound(self):
        self.world.blocks.check()
        assert not self.world.runner.wrong
        assert not self.world.errors

    @invariant()
    def granted_blocks_have_one_owner(self):
        blocks = self.world.blocks
        for handoff in self.handoffs:
            for block in handoff.granted:
                owners = [h for h in self.handoffs if block in h.sequence.block_ids]
                assert owners in ([handoff], []), "others have it"
                assert block in blocks._quarantined or (owners and blocks._refs[block] == 1)
                assert block not in blocks._entries, "unverified bytes are in the prefix cache"

    @invariant()
    def blocks_hold_what_they_should(self):
        """Cached ones what their hash says, free ones no unverified bytes."""
        for block, entry in self.world.blocks._entries.items():
            assert content_of(self.world.pool, block) == list(entry.tokens)
        assert self.world.pool[list(self.world.blocks._free)].isfinite().all()

    def teardown(self):
        try:
            self.end()
        finally:
            self.world.close()

    def end(self):
        """Once every writer has acknowledged or died and all routers are gone, nothing is left."""
        self.move(REST)
        for handoff in self.handoffs:
            handoff.stop_writing()
            if handoff.owes_abort and handoff.writer.alive:
                self.send_abort(handoff, False, REST)
        while self.unnoticed():
            self.notice_death(0, REST)
        held = self.world.blocks.num_quarantined
        assert held == 0, f"{held} blocks are quarantined though no writer is left"
        self.world.pass_time(2 * LEASE_S)  # no sender comes back: leases must end it
        entries = self.world.reservations._entries
        assert all(entry.decoding for entry in entries.values())
        for _ in range(200):
            if entries:
                self.world.step()
                self.world.settle()
        assert not entries, "a sequence never ended"
        assert self.world.blocks.num_held == self.world.blocks.num_quarantined == 0
        assert not self.world.receiver._incoming
        assert not self.world.reservations._quarantined
        for check in (self.the_pool_is_sound, self.blocks_hold_what_they_should):
            check()

    # Who is there.

    @initialize()
    def begin(self):
        for _ in ROUTERS:
            self.router_comes_or_goes(0, REST)
        for _ in range(2):
            self.start_writer(REST)

    @precondition(lambda self: len(self.living()) < 3)
    @rule(pace=PACE)
    def start_writer(self, pace):
        """A prefill process starts, or starts again, and opens its link."""
        writer = Writer(self.world, next(self.numbers))
        self.writers.append(writer)
        self.go(writer.offer(), pace)

    @precondition(lambda self: self.writing())
    @rule(which=WHICH, pace=PACE)
    def open_link_anew(self, which, pace):
        """Its earlier epoch is over."""
        self.go(pick(self.writing(), which).writer.offer(), pace)

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
        self.go(self.world.receiver.peer_gone(writer.incarnation), pace)

    @precondition(lambda self: len(self.world.queues) < len(ROUTERS) or self.writing())
    @rule(which=WHICH, pace=PACE)
    def router_comes_or_goes(self, which, pace):
        gone = [router for router in ROUTERS if router not in self.world.queues]
        router = gone[0] if gone else pick(ROUTERS, which)
        self.world.loop.call_soon(self.world.listen if gone else self.world.hang_up, router)
        self.world.tick(1)
        self.move(pace)

    # One handoff.

    @rule(which=WHICH, shape=SHAPES, local=st.sampled_from([0, 0, 3]), pace=PACE)
    def reserve(self, which, shape, local, pace):
        """A router asks for blocks; with `local`, decode may start what is short by itself."""
        router = pick(list(self.world.queues), which)
        family, num_tokens, max_tokens, time_left_s = shape
        name, tokens = f"h{next(self.numbers)}", prompt(family, num_tokens)
        wanted = spec(name, tokens, max_tokens, time_left_s)

        async def send():
            if local:
                self.verified.add(name)  # should it start by itself, it may run at once
            try:
                reserved = await self.world.reserve(router, wanted, local)
            except (Overloaded, Unavailable, Stale):
                return
            if reserved.started:
                return
            self.verified.discard(name)
            if entry := self.world.reservations._entries.get(name):
                token, cached = reserved.reservation_token, reserved.cached_tokens
                self.handoffs.append(Handoff(name, tokens, cached, token, entry.sequence))

        self.go(send(), pace)

    @precondition(lambda self: self.living())
    @rule(which=WHICH, shape=SHAPES)
    def reserve_and_grant(self, which, shape):
        """Both, with nothing in between, so that there is always something under a write."""
        self.reserve(which, shape, 0, REST)
        self.handoffs = [h for h in self.handoffs
                         if h.sequence.block_ids or h.owes_abort or h.granted]  # fmt: skip
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
        handoff.corrupted = False
        handoff.stop_writing()
        handoff.withdrawn, attempt = False, handoff.attempt
        handoff.owes_abort = True
        request = pb.ReadyRequest(
            **handoff.fields(),
            epoch=handoff.epoch,
            first_token=handoff.cached,
            num_tokens=len(handoff.tokens) - handoff.cached,
        )

        async def send():
            try:
                response = await answer(self.world.receiver, "Ready", request)
            except (Stale, Unavailable):
                return
            if writer.alive and handoff.attempt == attempt:
                handoff.granted = tuple(response.block_ids)

        handoff.ready = self.world.start(send())
        self.move(pace)

    @precondition(lambda self: self.writing())
    @rule(which=WHICH, kind=st.sampled_from(["right", "right", "part", "wrong"]))
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
        digest = writer.digest(handoff)
        request = pb.CommitRequest(
            **handoff.fields(),
            epoch=handoff.epoch,
            num_tokens=len(handoff.tokens),
            num_bytes=digest.num_bytes,
            checksum=digest.value,
            first_token_id=999,
            token_digest=token_digest(handoff.tokens),
        )
        if change == "epoch":  # that of a link that it did not begin on
            request.epoch = writer.epochs[-1] if handoff.epoch != writer.epochs[-1] else 0
        elif change:
            setattr(request, change, getattr(request, change) ^ 1)
        handoff.stop_writing()
        good = not change and self.is_there(handoff)
        if good:
            self.verified.add(handoff.name)  # from here on it may run at any moment

        async def send():
            try:
                await answer(self.world.receiver, "Commit", request)
            except KvCorrupted:
                assert not good
                handoff.corrupted = True
            except (Stale, Unavailable):
                entry = self.entry(handoff)
                if entry is None or not entry.decoding:
                    self.verified.discard(handoff.name)
            else:
                assert good, "wrong KV was taken for right"
                handoff.owes_abort = False

        self.go(send(), pace)

    @precondition(lambda self: self.writing())
    @rule(which=WHICH, kind=st.sampled_from(["right", "right", "part", "wrong"]))
    def put_and_commit(self, which, kind):
        """Right, and nothing else happens meanwhile: decoding starts.

        Wrong: the blocks stay reserved for a resend, and until then nothing writes into them.
        """
        handoff = pick(self.writing(), which)
        self.move(REST)
        if not handoff.granted:
            return
        reserved = self.is_reserved(handoff) and handoff.epoch == handoff.writer.epochs[-1]
        handoff.writer.put(handoff, kind)
        self.send_commit(handoff, "checksum" if kind == "part" else "", REST)
        if kind == "right":
            assert (handoff.name in self.verified) == reserved
            return
        assert handoff.corrupted == reserved
        if reserved:
            assert self.is_reserved(handoff), "the sender has the KV: it may send it again"
            assert not self.world.receiver.writing(handoff.name)

    @precondition(lambda self: self.owing())
    @rule(which=WHICH, how=st.sampled_from(["answered", "lost", "resend"]), pace=PACE)
    def abort(self, which, how, pace):
        """The writer stops; its Abort arrives now, never, or announces a resend.

        A resend keeps the reservation, and after it nothing is granted.
        """
        handoff = pick(self.owing(), which)
        at_rest = how == "resend" and pace[0] is None
        if at_rest:
            self.move(REST)
        reserved = self.is_reserved(handoff)
        handoff.stop_writing()
        if how != "lost":
            self.send_abort(handoff, how == "resend", pace)
        if at_rest:
            assert self.is_reserved(handoff) == reserved
            assert not self.world.receiver.writing(handoff.name)

    def send_abort(self, handoff, resend, pace):
        request = pb.AbortRequest(**handoff.fields(), reason="test", resend=resend)

        async def send():
            try:
                await answer(self.world.receiver, "Abort", request)
            except Stale:
                assert resend  # the reservation is gone: the sender still has to abort for good
                return
            handoff.withdrawn, handoff.owes_abort = resend, resend

        self.go(send(), pace)

    @precondition(lambda self: self.handoffs)
    @rule(which=WHICH, pace=PACE)
    def cancel(self, which, pace):
        self.go(self.world.reservations.cancel(pick(self.handoffs, which).name), pace)

    @precondition(lambda self: self.handoffs and self.living())
    @rule(which=WHICH, whose=WHICH, what=st.sampled_from(["Ready", "Commit", "Abort"]))
    def message_of_a_stranger(self, which, whose, what):
        """A process that is not the sender, or does not have the token, is refused."""
        handoff, writer = pick(self.handoffs, which), pick(self.living(), whose)
        if not writer.epochs:
            return
        self.move(REST)  # an Abort under way would free the name for any sender
        foreign = writer is not handoff.writer and handoff.name in self.world.receiver._incoming
        fields = {
            "handoff_id": handoff.name,
            "reservation_token": handoff.token if foreign else "guessed",
            "incarnation": writer.incarnation,
        }
        if what != "Abort":
            fields |= {"epoch": writer.epochs[-1], "num_tokens": 1}
        request = getattr(pb, f"{what}Request")(**fields)

        async def send():
            try:
                await answer(self.world.receiver, what, request)
            except (Stale, Unavailable):
                return
            assert what == "Abort", "a stranger was accepted"  # of which nothing is left to see

        before = (self.is_reserved(handoff), self.world.receiver.writing(handoff.name))
        self.go(send(), REST)
        assert before == (self.is_reserved(handoff), self.world.receiver.writing(handoff.name))

    # Time and the batch.

    @precondition(lambda self: self.handoffs)
    @rule(seconds=st.sampled_from([DEADLINE_S, LEASE_S / 2, LEASE_S]), rest=st.booleans())
    def time_passes(self, seconds, rest):
        """Leases and deadlines end what is not being written, and deadlines the rest too."""
        if rest:
            self.world.settle()
        self.world.pass_time(seconds)
        now = self.world.loop.time()
        for name, entry in self.world.reservations._entries.items():
            assert entry.deadline is None or now < entry.deadline
            if rest and seconds == LEASE_S and not entry.decoding:
                assert self.world.receiver.writing(name), "a lease is over and nothing ended"

    @rule(times=st.integers(1, 3), pace=PACE)
    def steps(self, times, pace):
        for _ in range(times):
            self.world.step()
        self.move((pace[0], False))

    # What the rules are made of.

    def go(self, call, pace):
        self.world.start(call)
        self.move(pace)

    def move(self, pace):
        ticks, turn = pace
        if ticks is None:
            self.world.settle()
        else:
            self.world.tick(ticks)
            if turn:
                self.world.engine_turn()

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

    def entry(self, handoff):
        return self.world.reservations._entries.get(handoff.name)

    def is_reserved(self, handoff):
        entry = self.entry(handoff)
        return entry is not None and entry.blocks is not None and not entry.decoding

    def is_there(self, handoff):
        """Whether the handoff's KV lies in decode's blocks, however it came there."""
        entry = self.entry(handoff)
        if entry is None or entry.blocks is None:
            return False
        found = self.world.pool[list(entry.blocks.block_ids), 0, 0, 0, :, 0].flatten().tolist()
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
