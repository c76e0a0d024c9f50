"""Drives a model over a scattered KV pool in tests, without scheduler or runner."""

import random
from dataclasses import replace

import torch

from baton.engine.batch import StepBatch
from baton.engine.kv_cache import plan_layout

NUM_BLOCKS = 320


class PagedSequence:
    """A sequence's known tokens and its scattered blocks."""

    def __init__(self, tokens, block_ids, state_blocks=()):
        self.tokens = tokens
        self.block_ids = block_ids
        self.state_blocks = list(state_blocks)
        self.computed = 0
        self.lora_slot = -1


class PagedRun:
    """A pool and the sequences in it; `step` runs any mix of them."""

    def __init__(self, model, block_size=16, *, kv_dtype=None):
        """kv_dtype: of the pool; the model's own if it is None."""
        kv_dtype = kv_dtype or model.dtype
        layout = plan_layout(model.config, kv_dtype, block_size, NUM_BLOCKS, 0)
        self._state_blocks = layout.state_blocks
        self.model = model
        self.block_size = block_size
        self.num_groups = len(layout.windows)
        self.pool = torch.zeros(layout.shape, dtype=kv_dtype)
        # Block 0 fills padded block_tables: nobody owns it here, so it may hold any finite garbage.
        self.pool[0] = 3
        self._free = random.Random(0).sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)

    def add(self, tokens, room=0):
        """A sequence with blocks for its tokens and `room` more."""
        count = -(-(len(tokens) + room) // self.block_size) * self.num_groups
        blocks = [self._free.pop() for _ in range(count)]
        states = [self._free.pop() for _ in range(self._state_blocks)]
        return PagedSequence(list(tokens), blocks, states)

    @torch.inference_mode()
    def step(self, *work):
        """Computes the next `count` tokens of each sequence; logits `[count, vocab]` of each.

        Work of one token comes first, as schedulers order it.
        """
        batch = self._batch(work)
        logits = self.model.step(batch, self.pool).clone()  # its memory is the next step's, too
        for sequence, count in work:
            sequence.computed += count
        return list(logits.split([count for _, count in work]))

    def logits(self, tokens, *counts):
        """`[tokens, vocab]` of a new sequence, of whose tokens steps compute so many each."""
        sequence = self.add(tokens)
        return torch.cat([self.step((sequence, count))[0] for count in counts or [len(tokens)]])

    def generate(self, sequence, count):
        """All tokens of a sequence once it has so many greedy ones more."""
        for _ in range(count):
            (logits,) = self.step((sequence, len(sequence.tokens) - sequence.computed))
            sequence.tokens.append(int(logits[-1].argmax()))
        return sequence.tokens

    def _batch(self, work):
        token_ids: list[int] = []
        for sequence, count in work:
            token_ids += sequence.tokens[sequence.computed : sequence.computed + count]
        contexts, counts = [one.computed for one, _ in work], [count for _, count in work]
        batch = batch_of(token_ids, contexts, counts, [self._blocks(*one) for one in work])
        if self._state_blocks:
            states = ints([sequence.state_blocks for sequence, _ in work])
            batch = replace(batch, state_tables=states)
        slots = ints([sequence.lora_slot for sequence, _ in work]).repeat_interleave(ints(counts))
        return replace(batch, lora_slots=slots) if max(slots) >= 0 else batch

    def _blocks(self, sequence, count):
        needed = -(-(sequence.computed + count) // self.block_size)
        return sequence.block_ids[: needed * self.num_groups]


def batch_of(token_ids, context_lens, query_lens, block_tables):
    """A step's batch, of lists; every row has scores."""
    width = max(map(len, block_tables))
    return StepBatch(
        token_ids=ints(token_ids),
        context_lens=ints(context_lens),
        query_lens=ints(query_lens),
        block_tables=ints([table + [0] * (width - len(table)) for table in block_tables]),
        logit_rows=torch.arange(len(token_ids), dtype=torch.int32),
        num_decodes=query_lens.count(1),
    )


def ints(values):
    return torch.tensor(values, dtype=torch.int32)
