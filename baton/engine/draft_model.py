"""A draft model as proposer: a small model guesses the next tokens of a large one's sequences.

It runs on the engine's thread, before the step that verifies its proposals. It samples with the
settings, seed and position of the large model, so that proposals agree as often as the two
distributions do, also at temperatures above 0. Its KV has a pool of its own and follows from the
tokens alone: nothing of it is handed over. After a handoff or a failover it is computed in chunks
beside steps of the sequence, which has no proposals until then; a chunk takes about
`CATCH_UP_SHARE` of the time of a prompt's.

    tokens        t0 ... t7  p8 p9 p10     t7 is the last known token, p8 to p10 are proposed
    num_computed            10             p10 is never computed
    next step     t0 ... t7  t8 t9         t8 is p8 and t9 is not p9: 9 tokens remain computed

Source: Y. Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023; here
tokens are compared instead of distributions, which keeps them what they are without speculation.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, replace
from typing import Generic, Self, TypeVar

import torch

from baton.config import EngineConfig, model_path
from baton.engine.backends.backend import Backend
from baton.engine.backends.cpu.backend import CpuBackend
from baton.engine.batch import BatchBuilder, StepModel
from baton.engine.block_manager import BlockManager
from baton.engine.chunk_budget import ChunkBudget
from baton.engine.kv_cache import KvLayout, allocate_pool, plan_layout
from baton.engine.models.model_config import ModelConfig
from baton.engine.runner import zero_blocks
from baton.engine.sampling.sampler import NO_TOKEN, Sampler, SampleRow
from baton.engine.scheduler import ScheduledSequence, ScheduledStep, Scheduler
from baton.engine.sequence import Sequence
from baton.engine.speculative.cost import AcceptanceRate, RowCost, worthwhile
from baton.engine.speculative.proposer import Proposer
from baton.generation.sampling_params import SamplingParams
from baton.kv_groups import held

log = logging.getLogger(__name__)

CATCH_UP_SHARE = 0.25  # duration of a catch-up chunk, as a share of a prompt's chunk
MIN_CATCH_UP = 32  # tokens of a catch-up chunk, as few as `ChunkBudget` measures
_READY_TOKENS = 2  # most tokens to compute after a step whose proposals were accepted
_RECENT = 0.1  # weight of the last duration in a mean
_PROBE_STEPS = 32  # between attempts where proposals were not worth their cost


@dataclass
class DraftModel:
    """A draft model in memory, with its KV pool.

    sampler: of the model that it drafts for · seconds: total time of its steps; any thread may read
    it.
    """

    model: StepModel
    pool: torch.Tensor
    layout: KvLayout
    max_context: int
    sampler: Sampler
    seconds: float = 0.0


def draft_layout(
    settings: EngineConfig, draft: ModelConfig, layout: KvLayout, dtype: torch.dtype
) -> KvLayout:
    """The draft's KV pool: for as many tokens as the other model's, whose layout is given.

    dtype: of the computation, which latent rows have whatever the other model's KV has.
    """
    dtype = dtype if draft.latent else layout.dtype
    blocks = layout.num_blocks // len(layout.windows) * len(draft.layer_groups.windows)
    return plan_layout(draft, dtype, layout.block_size, blocks, 0, settings.chunk_tokens)


def load_draft(
    settings: EngineConfig, backend: Backend, config: ModelConfig, layout: KvLayout,
    dtype: torch.dtype, max_context: int, sampler: Sampler,
) -> DraftModel:  # fmt: skip
    """Loads the draft model, or the predicting layer, that `settings` name.

    backend, config, layout, max_context, sampler: of the model that it drafts for. Raises
    CheckpointError, ConfigError.
    """
    draft = config.draft(settings)
    longest = min(max_context, draft.max_context)
    limited = replace(draft, max_context=longest)
    own = draft_layout(settings, limited, layout, dtype)
    of_draft = settings.of_draft(draft.quantization is not None)
    loader = type(backend)(of_draft)
    if isinstance(loader, CpuBackend) and isinstance(backend, CpuBackend):
        loader.whole = backend.whole
    model = loader.shard_model(model_path(of_draft.model), limited, dtype)
    log.info(
        "draft model: %d KV blocks (%.0f MiB), contexts of up to %d tokens",
        own.num_blocks, own.num_bytes / 2**20, longest,
    )  # fmt: skip
    return DraftModel(model, allocate_pool(own, None, backend.device), own, longest, sampler)


@dataclass(eq=False)
class DraftSequence(Sequence):
    """A sequence on the draft model: the known tokens of another, then those proposed for it.

    known: number of known tokens at the last step · num_kept: computed tokens that are in the
    prefix cache · wanted: number of tokens to propose in this step.
    """

    rate: AcceptanceRate = field(default_factory=AcceptanceRate)
    proposed: tuple[int, ...] = ()
    known: int = 0
    num_kept: int = 0
    wanted: int = 0
    probes: bool = False  # it gets a proposal that is not worth its cost
    broken: bool = False  # its logits were not finite

    @classmethod
    def from_sequence(cls, sequence: Sequence, rate: AcceptanceRate) -> Self:
        return cls(
            sequence.seq_id, [], sequence.prompt_tokens,
            replace(sequence.params, logprobs=None, prompt_logprobs=None),
            sequence.cache_salt, token_counts=sequence.token_counts, grammar=sequence.grammar,
            rate=rate,
        )  # fmt: skip

    def follow(self, tokens: Tokens[int]) -> None:
        """Takes over the known tokens; computed ones stay as far as they are those."""
        end = self.known
        for proposed, token in zip(self.tokens[self.known :], tokens[self.known :], strict=False):
            if proposed != token:
                break
            end += 1
        self.tokens[end:] = tokens[end:]
        self.num_computed = min(self.num_computed, end)
        self.known, self.proposed = len(tokens), ()

    @property
    def row(self) -> SampleRow:
        """The sampling input for the token after its last one."""
        proposed = len(self.tokens) - self.known
        of_sequence = self.token_counts, self.grammar
        return SampleRow(self.params, self.tokens, self.prompt_tokens, proposed, *of_sequence)


D = TypeVar("D", bound=DraftSequence)


class ModelProposer(Proposer, Generic[D]):
    """Proposes what a model samples; sequence_type: what it knows of a sequence."""

    sequence_type: type[D]

    def __init__(
        self, most: int, max_context: int, draft: DraftModel, chunk: ChunkBudget,
        prefix_cache: bool,
    ) -> None:  # fmt: skip
        """chunk: of the draft model's tokens in a step."""
        super().__init__(most, max_context)
        self._draft, layout = draft, draft.layout
        sizes = layout.num_blocks, layout.block_size
        self.blocks = BlockManager(*sizes, prefix_cache, layout.windows)
        self._kv = Scheduler(self.blocks, chunk, 0)  # for its blocks alone
        self._batches = BatchBuilder(layout.block_size, draft.pool.device, draft.model.num_groups)
        self._costs = RowCost()
        self._draft_s: dict[int, float] = {}  # of a step of the draft model, by its rows
        self._last_draft_s = 0.0
        self._drafts: dict[Sequence, D] = {}
        self._rate = AcceptanceRate()  # of all sequences, with which new ones begin
        self._steps = 0
        self._failed = False

    def limit(self, sequence: Sequence) -> int:
        return max(0, min(super().limit(sequence), self._draft.max_context - sequence.num_tokens))

    def propose(
        self, sequences: list[Sequence], limits: list[int], rows: int
    ) -> list[tuple[int, ...]]:
        self._free_ended()
        if self._failed or not sequences:
            return [()] * len(sequences)
        self._steps += 1
        price = self.price(len(sequences), rows)
        self._probe(sequences, price)
        drafts = [
            self._follow(sequence, self._count(sequence, limit, price))
            for sequence, limit in zip(sequences, limits, strict=True)
        ]
        try:
            self._compute(drafts)
        except Exception:  # sequences go on without proposals
            log.exception("the draft model failed: it proposes nothing from now on")
            self._failed = True
            return [()] * len(sequences)
        return [draft.proposed for draft in drafts]

    def learn(self, sequence: Sequence, sampled: Tokens[int]) -> None:
        if draft := self._drafts.get(sequence):
            for proposed, token in zip(draft.proposed, sampled, strict=False):
                draft.rate.add(proposed == token)
                self._rate.add(proposed == token)

    def record_step(self, rows: int, proposed: int, seconds: float) -> None:
        self._costs.record_step(rows, proposed, seconds)

    def price(self, sequences: int, rows: int) -> float:
        """The share by which a step of `rows` rows, with a proposed token for each sequence, is
        longer with another."""
        step_s = self._costs.seconds(rows)
        draft_s = self._draft_s.get(sequences, self._last_draft_s)
        return self._costs.price(rows) + (draft_s / step_s if step_s else 0.0)

    def _probe(self, sequences: list[Sequence], price: float) -> None:
        """Now and then has one sequence after the other get a proposal even if its rate is low."""
        turn, rest = divmod(self._steps, _PROBE_STEPS)
        draft = self._drafts.get(sequences[turn % len(sequences)])
        if draft is not None and not rest and worthwhile(1.0, price, 1):  # if it can pay at all
            draft.probes = True

    def _count(self, sequence: Sequence, limit: int, price: float) -> int:
        """The number of tokens to propose for a sequence."""
        draft = self._draft_of(sequence)
        if draft.broken or limit < 1:
            return 0
        return worthwhile(draft.rate.value, price, limit) or int(draft.probes)

    def _draft_of(self, sequence: Sequence) -> D:
        """The draft state of a sequence, which is created on first use."""
        draft = self._drafts.get(sequence)
        if draft is None:
            rate = AcceptanceRate(self._rate.value)
            draft = self._drafts[sequence] = self.sequence_type.from_sequence(sequence, rate)
        return draft

    def _follow(self, sequence: Sequence, count: int) -> D:
        """The draft of a sequence, with `count` tokens to propose if there are blocks for them."""
        draft = self._drafts[sequence]
        draft.follow(sequence.tokens)
        self._keep(draft)
        draft.wanted = count if count and self._kv.reserve(draft, count) else 0
        return draft

    def _keep(self, draft: D) -> None:
        """Keeps what was computed of known tokens for other sequences."""

    def _compute(self, drafts: list[D]) -> None:
        """Computes known tokens, then proposes token after token."""
        rows = self._known_rows(drafts)
        while rows:
            self._run(sorted(rows, key=lambda pair: pair[1] > 1))
            left = (draft for draft in drafts if 0 < len(draft.proposed) < draft.wanted)
            rows = [(draft, 1) for draft in left]

    @abstractmethod
    def _known_rows(self, drafts: list[D]) -> list[tuple[D, int]]:
        """The number of known tokens to compute of each draft."""

    def _run(self, rows: list[tuple[D, int]]) -> None:
        """Computes the next rows of each sequence, and samples where all tokens are computed.

        Sequences with one row come first.
        """
        began = time.perf_counter()
        step = ScheduledStep(
            [ScheduledSequence(one, one.num_computed, count) for one, count in rows]
        )
        logits = self._logits(step, rows)
        for draft, count in rows:
            draft.num_computed += count
        sampling = [draft for draft, _ in rows if not draft.num_pending]
        tokens = self._draft.sampler.sample(logits, [draft.row for draft in sampling]).token_ids
        for draft, token in zip(sampling, tokens, strict=True):
            if token == NO_TOKEN:
                self._give_up(draft)
            else:
                draft.tokens.append(token)
                draft.proposed += (token,)
                draft.probes = False
        self._record(step, time.perf_counter() - began)

    def _logits(self, step: ScheduledStep, rows: list[tuple[D, int]]) -> torch.Tensor:
        """Runs a step of the draft model: logits of the sequences that sample."""
        return self._draft.model.step(self._batches.build(step), self._draft.pool)

    def _record(self, step: ScheduledStep, seconds: float) -> None:
        """Records the duration of a step of the draft model."""
        self._draft.seconds += seconds
        self._kv.chunk.record_step(step, seconds)
        if all(one.count <= self.most + 1 for one in step.sequences):
            rows = len(step.sequences)
            mean = self._draft_s.get(rows, seconds)
            self._last_draft_s = mean + _RECENT * (seconds - mean)
            self._draft_s[rows] = self._last_draft_s

    def _give_up(self, draft: D) -> None:
        """Proposes nothing any more for a sequence, and zeroes its KV, which may not be finite."""
        log.warning("the draft model's logits for sequence %s are not finite", draft.seq_id)
        private = self.blocks.uncache(held(draft.block_ids))
        self._kv.free(draft)
        if private:
            zero_blocks(self._draft.pool, private)
        draft.broken, draft.wanted, draft.proposed = True, 0, ()

    def _free_ended(self) -> None:
        """Frees the blocks of sequences that have ended, and of preempted ones."""
        for sequence, draft in list(self._drafts.items()):
            if sequence.dropped:
                del self._drafts[sequence]
            if sequence.dropped or not sequence.block_ids:
                self._kv.free(draft)


class DraftProposer(ModelProposer[DraftSequence]):
    """Proposes what a draft model samples."""

    sequence_type = DraftSequence

    def _keep(self, draft: DraftSequence) -> None:
        draft.num_kept = min(draft.num_kept, draft.num_computed)
        self._kv.cache_blocks(draft, draft.num_kept, draft.num_computed)
        draft.num_kept = draft.num_computed

    def _known_rows(self, drafts: list[DraftSequence]) -> list[tuple[DraftSequence, int]]:
        """Draft sequences with their numbers of known tokens to compute, within the budget."""
        budget, rows = self._kv.chunk.tokens, list[tuple[DraftSequence, int]]()
        for draft in drafts:
            count = draft.num_pending if draft.wanted else 0
            if count > _READY_TOKENS:
                count = min(count, budget)
                budget -= count
            if count:
                rows.append((draft, count))
        return rows


def warm_up(draft: DraftModel) -> None:
    """Runs a step of a draft model, so that no request pays for first-time costs."""
    size, groups = draft.layout.block_size, len(draft.layout.windows)
    sequence = Sequence("warm-up", [1] * size, size, SamplingParams(), block_ids=[*range(groups)])
    batches = BatchBuilder(size, draft.pool.device, draft.model.num_groups)
    for start in 0, size - 1:
        step = ScheduledStep([ScheduledSequence(sequence, start, size - start)])
        draft.model.step(batches.build(step), draft.pool)
