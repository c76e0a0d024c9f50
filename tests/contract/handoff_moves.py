"""What the state machine of `test_handoff_model` is made of: messages, knowledge, and the rules.

Who sends what is the machine's choice; here is what a sender then knows, and what must always hold.
"""

from hypothesis.stateful import RuleBasedStateMachine, invariant

from baton.errors import KvCorrupted, Overloaded, Stale, Unavailable
from baton.prefix import token_digest
from baton.v1 import handoff_pb2 as pb

from .handoff_world import LEASE_S, Handoff, World, content_of, names, prompt, spec

AT_REST = None


class Moves(RuleBasedStateMachine):
    """A decode worker, and what its routers and prefill processes know of their handoffs.

    `how_far` is how many turns of the event loop follow a message, or AT_REST; `turn` is whether
    the engine gets its turn as well.
    """

    def __init__(self):
        super().__init__()
        self.verified = set()  # sequences that may run
        self.world = World(self.verified.__contains__)
        self.names, self.numbers = names("h"), iter(range(10_000))
        self.handoffs, self.writers = [], []
        self.closed = False

    # What always holds.

    @invariant()
    def everything_is_in_order(self):
        self.the_pool_is_sound()
        self.granted_blocks_have_one_owner()
        self.cached_blocks_hold_what_their_hash_says()
        self.free_blocks_hold_no_unverified_bytes()

    def the_pool_is_sound(self):
        self.world.blocks.check()
        assert not self.world.runner.wrong
        assert not self.world.errors

    def granted_blocks_have_one_owner(self):
        blocks = self.world.blocks
        for handoff in self.handoffs:
            others = {
                block
                for other in self.handoffs
                if other is not handoff
                for block in other.sequence.block_ids
            }
            own = set(handoff.sequence.block_ids)
            for block in handoff.granted:
                assert block in own or block in blocks._quarantined
                assert block not in others
                assert block not in blocks._entries, "unverified bytes are in the prefix cache"
                assert block in blocks._quarantined or blocks._refs[block] == 1

    def cached_blocks_hold_what_their_hash_says(self):
        for block, entry in self.world.blocks._entries.items():
            assert content_of(self.world.pool, block) == list(entry.tokens)

    def free_blocks_hold_no_unverified_bytes(self):
        free = list(self.world.blocks._free)
        assert self.world.pool[free].isfinite().all()

    def teardown(self):
        """Once every writer has acknowledged or died and all routers are gone, nothing is left."""
        try:
            self.end()
        finally:
            self.world.close()

    def end(self):
        self.move(AT_REST, True)
        for handoff in self.handoffs:
            handoff.stop_writing()
            if handoff.owes_abort and handoff.writer.alive:
                self.send_abort(handoff, False, AT_REST, True)
        for writer in self.unnoticed():
            self.notice(writer, AT_REST, True)
        held = self.world.blocks.num_quarantined
        assert held == 0, f"{held} blocks are quarantined though no writer is left"
        self.world.pass_time(2 * LEASE_S)  # no sender comes back: leases must end it
        entries = self.world.reservations._entries
        assert all(entry.decoding for entry in entries.values())
        for _ in range(200):
            if not entries:
                break
            self.world.step()
            self.world.settle()
        assert not entries, "a sequence never ended"
        assert self.world.blocks.num_held == self.world.blocks.num_quarantined == 0
        assert not self.world.receiver._incoming
        assert not self.world.reservations._quarantined
        self.everything_is_in_order()

    def send_reserve(self, router, shape, local, how_far, turn):
        family, num_tokens, max_tokens, time_left_s = shape
        name, tokens = next(self.names), prompt(family, num_tokens)
        wanted = spec(name, tokens, max_tokens, time_left_s)

        async def call():
            if local:
                self.verified.add(name)  # should it start by itself, it may run at once
            try:
                reserved = await self.world.reserve(router, wanted, local)
            except (Overloaded, Unavailable, Stale):
                return
            if not reserved.started:
                self.verified.discard(name)
                self.take_note(name, tokens, reserved)

        self.go(call(), how_far, turn)

    def take_note(self, name, tokens, reserved):
        entry = self.world.reservations._entries.get(name)
        if entry is not None:
            token, cached = reserved.reservation_token, reserved.cached_tokens
            self.handoffs.append(Handoff(name, tokens, cached, token, entry.sequence))

    def send_ready(self, handoff, writer, epoch, how_far, turn):
        writer = handoff.writer or writer
        if not writer.alive or not writer.epochs:
            return
        handoff.writer, handoff.epoch = writer, writer.epochs[epoch]
        handoff.corrupted = False
        handoff.stop_writing()
        handoff.withdrawn, attempt = False, handoff.attempt
        handoff.owes_abort = True

        async def call():
            try:
                response = await self.world.receiver.ready(self.ready_request(handoff))
            except (Stale, Unavailable):
                return
            if writer.alive and handoff.attempt == attempt:
                handoff.granted = tuple(response.block_ids)

        self.go(call(), how_far, turn)

    def send_commit(self, handoff, change, how_far, turn):
        writer = handoff.writer
        digest = writer.digest(handoff)
        request = pb.CommitRequest(
            **self.named(handoff),
            epoch=handoff.epoch,
            num_tokens=len(handoff.tokens),
            num_bytes=digest.num_bytes,
            checksum=digest.value,
            first_token_id=999,
            token_digest=token_digest(handoff.tokens),
        )
        if change == "epoch":
            request.epoch = writer.epochs[-1] if handoff.epoch != writer.epochs[-1] else 0
        elif change:
            setattr(request, change, getattr(request, change) ^ 1)
        handoff.stop_writing()
        good = not change and self.is_there(handoff)
        if good:
            self.verified.add(handoff.name)  # from here on it may run at any moment

        async def call():
            try:
                await self.world.receiver.commit(request)
            except KvCorrupted:
                assert not good
                handoff.corrupted = True
            except (Stale, Unavailable):
                if handoff.name not in self.committed():
                    self.verified.discard(handoff.name)
            else:
                assert good, "wrong KV was taken for right"
                handoff.owes_abort = False

        self.go(call(), how_far, turn)

    def send_abort(self, handoff, resend, how_far, turn):
        request = pb.AbortRequest(**self.named(handoff), reason="test", resend=resend)

        async def call():
            try:
                await self.world.receiver.abort(request)
            except Stale:
                assert resend  # the reservation is gone: the sender still has to abort for good
                return
            handoff.withdrawn, handoff.owes_abort = resend, resend

        self.go(call(), how_far, turn)

    def notice(self, writer, how_far, turn):
        writer.noticed = True
        for handoff in self.handoffs:
            if handoff.writer is writer:
                handoff.stop_writing()
                handoff.owes_abort = False

        async def call():
            await self.world.receiver.peer_gone(writer.incarnation)

        self.go(call(), how_far, turn)

    def ready_request(self, handoff):
        return pb.ReadyRequest(
            **self.named(handoff),
            epoch=handoff.epoch,
            first_token=handoff.cached,
            num_tokens=len(handoff.tokens) - handoff.cached,
        )

    def named(self, handoff):
        return {
            "handoff_id": handoff.name,
            "reservation_token": handoff.token,
            "incarnation": handoff.writer.incarnation,
        }

    def go(self, call, how_far, turn):
        self.world.start(call)
        self.move(how_far, turn)

    def move(self, how_far, turn):
        if how_far is AT_REST:
            self.world.settle()
            return
        self.world.tick(how_far)
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

    def is_reserved(self, handoff):
        entry = self.world.reservations._entries.get(handoff.name)
        return entry is not None and entry.blocks is not None and not entry.decoding

    def is_there(self, handoff):
        """Whether the handoff's KV lies in decode's blocks, however it came there."""
        entry = self.world.reservations._entries.get(handoff.name)
        if entry is None or entry.blocks is None:
            return False
        slots = [
            slot for block in entry.blocks.block_ids for slot in content_of(self.world.pool, block)
        ]
        return slots[: len(handoff.tokens)] == handoff.tokens

    def grantable(self):
        """Reserved ones whose sender has not sent Ready, or has announced a resend."""
        return [
            h for h in self.handoffs if self.is_reserved(h) and (h.withdrawn or not h.owes_abort)
        ]

    def is_over(self, handoff):
        return not (handoff.sequence.block_ids or handoff.owes_abort or handoff.granted)

    def is_sent_to(self, handoff):
        return handoff.name in self.world.receiver._incoming

    def committed(self):
        entries = self.world.reservations._entries
        return {name for name, entry in entries.items() if entry.decoding}


def pick(items, which):
    return items[which % len(items)]
