"""The model runner: input tensors, forward pass, sampled tokens. It makes no choices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from baton.engine.adapters import LoraAdapter
from baton.engine.batch import BatchBuilder, StepModel
from baton.engine.pooling import Vector, pooled
from baton.engine.sampling.logprobs import PromptLogprobs, TokenLogprobs, split_prompt_logprobs
from baton.engine.sampling.sampler import NO_TOKEN, Sampled, Sampler, SampleRow
from baton.engine.scheduler import ScheduledSequence, ScheduledStep
from baton.engine.speculative.verify import verify
from baton.errors import InternalError


class SampledTokens(NamedTuple):
    """What one sequence got in a step.

    token_ids: one, and one more for each accepted proposal; none where a part of its prompt was
    computed · logprobs: of each token, if asked for · prompt: log-probabilities of prompt tokens ·
    pooled: sum of this step's hidden states, for an embedding or a classification head, or logits
    of the label tokens · broken: whether the model's output for it is not finite, so that it got
    nothing.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt: PromptLogprobs | None = None
    pooled: Vector | None = None
    broken: bool = False


BROKEN = SampledTokens((), broken=True)


class StepOutput(NamedTuple):
    """What a step gave its sequences.

    found: by sequence id · token_ids: of a step that samples one token for each sequence, in the
    step's order; `found` then has only sequences that got more than a token.
    """

    found: dict[str, SampledTokens]
    token_ids: list[int] = []  # noqa: RUF012 (never written)

    def by_id(self, step: ScheduledStep) -> dict[str, SampledTokens]:
        """Sampled tokens by sequence ID."""
        plain = zip(step.sequences, self.token_ids, strict=bool(self.token_ids))
        return {
            scheduled.sequence.seq_id: SampledTokens((one,)) for scheduled, one in plain
        } | self.found


class Launch:
    """A launched step. began_ns: `time.monotonic_ns` when no earlier step ran any more."""

    output: StepOutput  # set once it is computed

    def __init__(self, step: ScheduledStep) -> None:
        self.step, self.began_ns = step, time.monotonic_ns()


class Ranks(Protocol):
    """Processes that compute each step together.

    collective_s: total seconds of the first one's collectives; may be read by any thread ·
    on_failure: called by another thread once no further step can run.
    """

    on_failure: Callable[[], object]

    @property
    def collective_s(self) -> float: ...

    def check(self) -> None:
        """Raises RunnerFailed once no further step can run."""

    def zero_blocks(self, blocks: list[int]) -> None:
        """Zeroes blocks of pools on other hosts."""


class RunnerFailed(InternalError):
    """No further step can run here."""


class StepRunner:
    """Computes steps over a KV pool of the shape that `KvLayout` has.

    `launch` starts a step, `sample` samples, `land` waits for it; an engine may launch the next
    step before it lands this one. Here `launch` does everything, by `run`.

    decode_rows: rows of decode steps so far, where more are computed than plans ask for: "wanted",
    "padding", or "wasted" (the sequence was gone) · waited_s: total seconds that `land` waited for
    the device · expert_tokens: as of `StepModel`; any thread may read these · pools: of all ranks,
    this one's first · ranks: of a tensor-parallel model · num_groups: as of `StepModel`.
    """

    expert_tokens: torch.Tensor | None = None
    waited_s: float | None = None
    ranks: Ranks | None = None
    num_groups: int = 1

    def __init__(self, pool: torch.Tensor, sampler: Sampler) -> None:
        self.pool = pool
        self.pools: tuple[torch.Tensor, ...] = (pool,)
        self.sampler = sampler
        self.decode_rows: dict[str, int] = {}

    def run(self, step: ScheduledStep) -> dict[str, SampledTokens]:
        """Runs every row of the step; by its id what each sequence got, if it got something.

        When it returns, all that was computed is in the pool for every thread to see.
        """
        raise NotImplementedError

    def launches_ahead(self, step: ScheduledStep) -> bool:
        """Whether a step can be launched while the previous one has not landed."""
        return False

    def launch(self, step: ScheduledStep) -> Launch:
        """Launches a step. Last tokens of sequences may be those that the previous step samples."""
        launch = Launch(step)
        launch.output = StepOutput(self.run(step))
        return launch

    def sample(self, launch: Launch) -> None:
        """Samples; to be called after `launch`, once the previous step has landed."""

    def land(self, launch: Launch) -> StepOutput:
        """Waits for a step. Raises its failure, unless all of its sequences have ended."""
        return launch.output

    def zero_blocks(self, blocks: list[int]) -> None:
        """Zeroes blocks that unverified bytes were written to.

        Attention multiplies masked values by zero, which removes any number but not a NaN.
        """
        for pool in self.pools if blocks else ():
            zero_blocks(pool, blocks)
            if pool.device != self.pool.device:  # another rank's GPU
                torch.cuda.synchronize(pool.device)
        if blocks and self.ranks is not None:
            self.ranks.zero_blocks(blocks)

    def copy_blocks(self, source: list[int], target: list[int]) -> None:
        """Copies blocks to as many others, in the pools of all ranks on this host."""
        for pool in self.pools:
            copy_blocks(pool, source, target)
            if pool.device != self.pool.device:  # another rank's GPU
                torch.cuda.synchronize(pool.device)

    def write_lora(self, slot: int, adapter: LoraAdapter) -> None:
        """Writes an adapter to a slot that no sequence uses."""

    def close(self) -> None:
        """Stops other ranks; no step follows."""

    def wait_for_writes(self, blocks: list[int] | None = None) -> None:
        """Waits until no step uses these blocks, which others are about to write.

        blocks: None for the whole pool, before it is freed. On a CPU nothing runs between steps.
        """
        if self.pool.device.type == "cuda":
            torch.cuda.synchronize(self.pool.device)


def zero_blocks(pool: torch.Tensor, blocks: list[int]) -> None:
    """Zeroes blocks of a pool; on a GPU, on the current stream."""
    content = pool.view(torch.uint8)  # not every operation knows every type of element
    with torch.inference_mode():
        content.index_fill_(0, torch.tensor(blocks).to(content.device), 0)


def copy_blocks(pool: torch.Tensor, source: list[int], target: list[int]) -> None:
    """Copies blocks of a pool; on a GPU, on the current stream, without waiting for it."""
    content = pool.view(torch.uint8).flatten(1).view(torch.int32)
    first, second = torch.tensor([source, target]).to(content.device, non_blocking=True)
    with torch.inference_mode():
        content.index_copy_(0, second, content.index_select(0, first))


class Runner(StepRunner):
    """Runs a model."""

    def __init__(self, model: StepModel, pool: torch.Tensor, sampler: Sampler) -> None:
        super().__init__(pool, sampler)
        self.model = model
        self.expert_tokens = model.expert_tokens
        self.num_groups = model.num_groups
        self._batches = BatchBuilder(pool.shape[4], pool.device, self.num_groups)
        self._take_hidden: Callable[[ScheduledStep, torch.Tensor], None] | None = None

    def keep_hidden(self, take: Callable[[ScheduledStep, torch.Tensor], None]) -> None:
        """Passes each step to `take`, with `StepModel.hidden`."""
        self._take_hidden, self._batches.keeps_hidden = take, True

    def run(self, step: ScheduledStep) -> dict[str, SampledTokens]:
        launch = self.launch(step)
        self.sample(launch)
        return self.land(launch).by_id(step)

    def launch(self, step: ScheduledStep) -> Launch:
        launch = Launch(step)
        logits = self.model.step(self._batches.build(step), self.pool)
        launch.output = self._sample(step, logits)
        if self._take_hidden is not None and self.model.hidden is not None:
            self._take_hidden(step, self.model.hidden)
        self.wait_for_writes()
        return launch

    def write_lora(self, slot: int, adapter: LoraAdapter) -> None:
        self.model.write_lora(slot, adapter)

    def close(self) -> None:
        self.model.close()

    def _sample(self, step: ScheduledStep, logits: torch.Tensor) -> StepOutput:
        """Samples, after hidden states are pooled and log-probabilities of prompts computed."""
        scheduled = step.sequences
        is_pooled = any(item.sequence.params.is_pooled for item in scheduled)
        hidden = self.model.hidden if is_pooled else None
        sampling = [item for item in scheduled if item.samples]
        rows = [row for item in sampling for row in sample_rows(item)]
        if hidden is None and len(rows) == len(scheduled) == len(logits) and not step.has_chunks:
            return one_each(scheduled, self._choose(logits, rows))
        vectors: dict[str, Vector] = {} if hidden is None else pooled(scheduled, hidden, logits)
        logits, prompts = split_prompt_logprobs(scheduled, logits)
        found = tokens_by_sequence(sampling, self._choose(logits, rows), prompts)
        for seq_id, vector in vectors.items():
            got = found.get(seq_id, SampledTokens(()))
            found[seq_id] = got._replace(pooled=vector) if np.isfinite(vector).all() else BROKEN
        return StepOutput(found)

    def _choose(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> Sampled:
        return self.sampler.sample(logits, rows)


def sample_rows(scheduled: ScheduledSequence) -> Iterator[SampleRow]:
    """What is sampled: the next token, and one after each proposed token as if it were accepted.

    Each has the penalties, position and random number that it would have in a step of its own.
    """
    sequence, proposed = scheduled.sequence, scheduled.proposed
    of_sequence = sequence.token_counts, sequence.grammar
    yield SampleRow(sequence.params, sequence.tokens, sequence.prompt_tokens, 0, *of_sequence)
    for end in range(1, len(proposed) + 1):
        known = [*sequence.tokens, *proposed[:end]]
        yield SampleRow(sequence.params, known, sequence.prompt_tokens, end, *of_sequence)


def one_each(scheduled: list[ScheduledSequence], sampled: Sampled) -> StepOutput:
    """The output of a step in which every sequence sampled one token."""
    found = dict[str, SampledTokens]()
    for item, token_id, logprobs in zip(
        scheduled, sampled.token_ids, sampled.logprobs, strict=True
    ):
        sequence = item.sequence
        if token_id == NO_TOKEN:
            found[sequence.seq_id] = BROKEN
        elif logprobs or sequence.grammar is not None or not sequence.params.max_tokens:
            found[sequence.seq_id] = SampledTokens((token_id,), (logprobs,) if logprobs else ())
    return StepOutput(found, sampled.token_ids)


def tokens_by_sequence(
    sampling: list[ScheduledSequence], sampled: Sampled, prompts: Mapping[str, PromptLogprobs]
) -> dict[str, SampledTokens]:
    """What each sequence accepts of its sampled rows, by its id; rows as `sample_rows`."""
    tokens = {
        seq_id: BROKEN if np.isnan(prompt.logprobs).any() else SampledTokens((), (), prompt)
        for seq_id, prompt in prompts.items()
    }
    at = 0
    for scheduled in sampling:
        rows, proposed = 1 + len(scheduled.proposed), scheduled.proposed
        end = at + (verify(proposed, sampled.token_ids[at : at + rows]) if proposed else 1)
        logprobs, seq_id = tuple(filter(None, sampled.logprobs[at:end])), scheduled.sequence.seq_id
        new = tuple(sampled.token_ids[at:end])
        at += rows
        if NO_TOKEN in new:
            tokens[seq_id] = BROKEN
        elif tokens.get(seq_id) is not BROKEN:
            tokens[seq_id] = SampledTokens(new, logprobs, prompts.get(seq_id))
    assert at == len(sampled.token_ids), "every row belongs to a sequence"
    return tokens
