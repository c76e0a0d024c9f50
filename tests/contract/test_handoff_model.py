"""Every order of reservations, leases, writes, aborts, resends, deaths and steps keeps the rules.

A state machine drives the real bookkeeping of a decode worker (`handoff_world`). Each rule sends a
message or lets something happen, and says how far the worker gets before the next rule: not at all,
a few turns of its event loop, or until everything has come to rest.

`HYPOTHESIS_PROFILE=long` looks longer, and elsewhere each time.
"""

import logging
import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from baton.errors import Stale, Unavailable
from baton.v1 import handoff_pb2 as pb

from .handoff_moves import AT_REST, Moves, pick
from .handoff_world import LEASE_S, Writer

ROUTERS = ("r0", "r1")
HOW_FAR = st.sampled_from([AT_REST, AT_REST, 0, 1, 2, 3, 5, 8])
ENGINE_TURN = st.booleans()
WHICH = st.integers(0, 99)
DEADLINE_S = 4.0
# (family of prompts, its tokens, the most that are drawn, time left or 0)
SHAPES = st.tuples(
    st.integers(0, 1), st.integers(1, 14), st.integers(1, 6), st.sampled_from([0, 0, DEADLINE_S])
)


class DecodeWorker(Moves):
    # Who is there.

    @initialize()
    def begin(self):
        for _ in ROUTERS:
            self.router_comes_or_goes(0, AT_REST, True)
        for _ in range(2):
            self.start_writer(AT_REST, True)

    @precondition(lambda self: len(self.living()) < 3)
    @rule(how_far=HOW_FAR, turn=ENGINE_TURN)
    def start_writer(self, how_far, turn):
        """A prefill process starts, or starts again, and opens its link."""
        writer = Writer(self.world, next(self.numbers))
        self.writers.append(writer)
        self.go(writer.offer(), how_far, turn)

    @precondition(lambda self: self.writing())
    @rule(which=WHICH, how_far=HOW_FAR, turn=ENGINE_TURN)
    def open_link_anew(self, which, how_far, turn):
        """Its earlier epoch is over."""
        self.go(pick(self.writing(), which).writer.offer(), how_far, turn)

    @precondition(lambda self: self.writing())
    @rule(which=WHICH)
    def kill_writer(self, which):
        """From now on it writes nothing, but decode has not noticed."""
        pick(self.writing(), which).writer.alive = False

    @precondition(lambda self: self.unnoticed())
    @rule(which=WHICH, how_far=HOW_FAR, turn=ENGINE_TURN)
    def notice_death(self, which, how_far, turn):
        self.notice(pick(self.unnoticed(), which), how_far, turn)

    @precondition(lambda self: len(self.world.queues) < len(ROUTERS) or self.writing())
    @rule(which=WHICH, how_far=HOW_FAR, turn=ENGINE_TURN)
    def router_comes_or_goes(self, which, how_far, turn):
        gone = [router for router in ROUTERS if router not in self.world.queues]
        router = gone[0] if gone else pick(ROUTERS, which)
        self.world.loop.call_soon(self.world.listen if gone else self.world.hang_up, router)
        self.world.tick(1)
        self.move(how_far, turn)

    # One handoff.

    @rule(
        which=WHICH,
        shape=SHAPES,
        local=st.sampled_from([0, 0, 3]),
        how_far=HOW_FAR,
        turn=ENGINE_TURN,
    )
    def reserve(self, which, shape, local, how_far, turn):
        """A router asks for blocks; with `local`, decode may start what is short by itself."""
        self.send_reserve(pick(list(self.world.queues), which), shape, local, how_far, turn)

    @precondition(lambda self: self.living())
    @rule(which=WHICH, shape=SHAPES)
    def reserve_and_grant(self, which, shape):
        """Both, with nothing in between, so that there is always something under a write."""
        self.send_reserve(pick(list(self.world.queues), which), shape, 0, AT_REST, True)
        self.handoffs = [handoff for handoff in self.handoffs if not self.is_over(handoff)]
        if self.grantable():
            self.send_ready(self.grantable()[-1], pick(self.living(), which), -1, AT_REST, True)

    @precondition(lambda self: self.grantable() and self.living())
    @rule(which=WHICH, whose=WHICH, epoch=st.sampled_from([-1, -1, 0]), how_far=HOW_FAR)
    def ready(self, which, whose, epoch, how_far):
        """A prefill process asks for the grant, perhaps over a link that is gone."""
        handoff = pick(self.grantable(), which)
        self.send_ready(handoff, pick(self.living(), whose), epoch, how_far, True)

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
        how_far=HOW_FAR,
        turn=ENGINE_TURN,
    )
    def commit(self, which, change, how_far, turn):
        """The writer says that it is done, rightly or not."""
        self.send_commit(pick(self.writing(), which), change, how_far, turn)

    @precondition(lambda self: self.writing())
    @rule(which=WHICH)
    def commit_over_a_link_that_it_did_not_begin_on(self, which):
        handoff = pick(self.writing(), which)
        handoff.writer.put(handoff, "right")
        self.go(handoff.writer.offer(), AT_REST, True)
        self.send_commit(handoff, "epoch", AT_REST, True)
        assert handoff.name not in self.verified

    @precondition(lambda self: self.writing())
    @rule(which=WHICH, kind=st.sampled_from(["part", "wrong"]))
    def put_and_commit_what_is_wrong(self, which, kind):
        """The blocks stay reserved for a resend, and until then nothing writes into them."""
        handoff = pick(self.writing(), which)
        self.move(AT_REST, True)
        reserved = self.is_reserved(handoff) and handoff.epoch == handoff.writer.epochs[-1]
        handoff.writer.put(handoff, kind)
        self.send_commit(handoff, "checksum" if kind == "part" else "", AT_REST, True)
        assert handoff.corrupted == reserved
        if reserved:
            assert self.is_reserved(handoff), "the sender has the KV: it may send it again"
            assert not self.world.receiver.writing(handoff.name)

    @precondition(lambda self: self.writing())
    @rule(which=WHICH)
    def write_after_the_cancel(self, which):
        """Into blocks that are quarantined until the writer's Abort."""
        handoff = pick(self.writing(), which)
        self.go(self.world.reservations.cancel(handoff.name), AT_REST, True)
        assert set(handoff.granted) <= self.world.blocks._quarantined
        handoff.writer.put(handoff, "wrong")

    @precondition(lambda self: self.writing())
    @rule(which=WHICH, ticks=st.integers(0, 4))
    def abort_that_overtakes_the_cancel(self, which, ticks):
        """The engine is busy: the cancel's command runs after the Abort was answered."""
        handoff = pick(self.writing(), which)
        self.go(self.world.reservations.cancel(handoff.name), ticks, False)
        handoff.stop_writing()
        self.send_abort(handoff, False, AT_REST, True)
        assert not handoff.sequence.block_ids

    @precondition(lambda self: self.writing())
    @rule(which=WHICH, turn=ENGINE_TURN)
    def put_and_commit(self, which, turn):
        """What should happen: where nothing else happens meanwhile, decoding starts."""
        handoff = pick(self.writing(), which)
        self.move(AT_REST, True)
        if not handoff.granted:
            return
        reserved = self.is_reserved(handoff) and handoff.epoch == handoff.writer.epochs[-1]
        handoff.writer.put(handoff, "right")
        self.send_commit(handoff, "", AT_REST, turn)
        assert (handoff.name in self.verified) == reserved

    @precondition(lambda self: self.owing())
    @rule(
        which=WHICH,
        how=st.sampled_from(["answered", "lost", "resend"]),
        how_far=HOW_FAR,
        turn=ENGINE_TURN,
    )
    def abort(self, which, how, how_far, turn):
        """The writer stops; its Abort arrives now, never, or announces a resend."""
        handoff = pick(self.owing(), which)
        handoff.stop_writing()
        if how != "lost":
            self.send_abort(handoff, how == "resend", how_far, turn)

    @precondition(lambda self: self.owing())
    @rule(which=WHICH)
    def withdraw_and_find_it_reserved(self, which):
        """A resend keeps the reservation, and after it nothing is granted."""
        handoff = pick(self.owing(), which)
        self.move(AT_REST, True)
        reserved = self.is_reserved(handoff)
        handoff.stop_writing()
        self.send_abort(handoff, True, AT_REST, True)
        assert self.is_reserved(handoff) == reserved
        assert not self.world.receiver.writing(handoff.name)

    @precondition(lambda self: self.handoffs)
    @rule(which=WHICH, how_far=HOW_FAR, turn=ENGINE_TURN)
    def cancel(self, which, how_far, turn):
        self.go(self.world.reservations.cancel(pick(self.handoffs, which).name), how_far, turn)

    @precondition(lambda self: self.handoffs and self.living())
    @rule(which=WHICH, whose=WHICH, what=st.sampled_from(["ready", "commit", "abort"]))
    def message_of_a_stranger(self, which, whose, what):
        """A process that is not the sender, or does not have the token, is refused."""
        handoff, writer = pick(self.handoffs, which), pick(self.living(), whose)
        if not writer.epochs:
            return
        self.move(AT_REST, True)  # an Abort under way would free the name for any sender
        foreign = writer is not handoff.writer and self.is_sent_to(handoff)
        token = handoff.token if foreign else "guessed"

        async def call():
            named = {
                "handoff_id": handoff.name,
                "reservation_token": token,
                "incarnation": writer.incarnation,
            }
            try:
                if what == "ready":
                    await self.world.receiver.ready(
                        pb.ReadyRequest(**named, epoch=writer.epochs[-1], num_tokens=1)
                    )
                elif what == "commit":
                    await self.world.receiver.commit(
                        pb.CommitRequest(**named, epoch=writer.epochs[-1], num_tokens=1)
                    )
                else:
                    await self.world.receiver.abort(pb.AbortRequest(**named))
            except (Stale, Unavailable):
                return
            assert what == "abort", "a stranger was accepted"  # of which nothing is left to see

        before = (self.is_reserved(handoff), self.world.receiver.writing(handoff.name))
        self.go(call(), AT_REST, True)
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

    @rule(times=st.integers(1, 3), how_far=HOW_FAR)
    def steps(self, times, how_far):
        for _ in range(times):
            self.world.step()
        self.move(how_far, False)


common = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
PROFILES = {
    "suite": settings(max_examples=120, stateful_step_count=40, derandomize=True, **common),
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
