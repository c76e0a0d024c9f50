"""The largest steps that an engine may run, for measuring what they take before there is a pool.

Every table names the same one block: what is computed means nothing, its size is what counts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from baton.engine.batch import StepBatch, StepModel
from baton.engine.kv_cache import KvLayout
from baton.engine.sampling.sampler import Sampler, SampleRow
from baton.sampling import SamplingParams

# Of all settings these take the most memory: counted, ranked, summed up, and told of. Top-p ranks
# in one way behind a top-k and in another without.
_RANKED = SamplingParams(
    temperature=1.0, top_k=64, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=20
)
_NUCLEUS = replace(_RANKED, top_k=0)


class Trial:
    """Runs a model's largest steps over a pool of one block of `layout`."""

    def __init__(
        self,
        model: StepModel,
        sampler: Sampler,
        layout: KvLayout,
        max_context: int,
        device: torch.device,
    ) -> None:
        assert layout.num_blocks == 1
        self._model = model
        self._sampler = sampler
        self._max_context = max_context
        self._pool = torch.zeros(layout.shape, dtype=layout.dtype, device=device)

    def chunk(self, rows: int, drawn: int) -> None:
        """A step of so many rows at the end of full contexts, of which `drawn` are drawn from."""
        longest = self._max_context - 1
        counts = [longest] * (rows // longest)
        if rest := rows % longest:
            counts.insert(0, rest)  # those with one row come first
        self._run(counts, drawn)

    def decode(self, sequences: int) -> Tensor:
        """A step that gives so many full contexts a token: logits `[sequences, vocab_size]`."""
        return self._step([1] * sequences, sequences)

    def _run(self, counts: list[int], drawn: int) -> None:
        logits = self._step(counts, drawn)
        settings = (_NUCLEUS if row % 2 else _RANKED for row in range(drawn))
        self._sampler.sample(logits, [SampleRow(params, [0], 1) for params in settings])

    def _step(self, counts: list[int], drawn: int) -> Tensor:
        rows, block_size = sum(counts), self._pool.shape[4]
        width = -(-self._max_context // block_size)
        contexts = [self._max_context - count for count in counts]
        batch = StepBatch(
            token_ids=self._ints([0] * rows),
            contexts=self._ints(contexts),
            counts=self._ints(counts),
            tables=self._ints([0]).expand(len(counts), width).contiguous(),
            logit_rows=self._ints(list(range(rows - drawn, rows))),
            singles=counts.count(1),
        )
        return self._model.step(batch, self._pool)

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._pool.device)
