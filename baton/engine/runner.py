"""Computes a step: tensors in, forward pass, tokens out. Chooses nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from baton.engine.batch import BatchBuilder, StepModel
from baton.engine.pooling import Vector, pooled
from baton.engine.sampling.prompt_logprobs import PromptLogprobs, split_prompt_logprobs
from baton.engine.sampling.sampler import Sampled, Sampler, SampleRow, TokenLogprobs
from baton.engine.scheduler import ScheduledSequence, ScheduledStep
from baton.engine.speculative import verify
from baton.errors import InternalError


class SampledTokens(NamedTuple):
    """The tokens that one sequence got in a step: one, and one more for each accepted proposal.

    None where a part of its prompt was computed whose log-probabilities are wanted.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # of each token, if they were asked for
    prompt: PromptLogprobs | None = None
    pooled: Vector | None = None  # of its embedding, if it wants one: the sum of this step's rows


class StepOutput(NamedTuple):
    """What a step gave its sequences.

    found: by its id what each got, if it got something · token_ids: of a step that samples one
    token for each of its works, these, in the step's order; then `found` has those alone that got
    more than a token.
    """

    found: dict[str, SampledTokens]
    token_ids: list[int] = []  # noqa: RUF012 (never written)

    def by_id(self, step: ScheduledStep) -> dict[str, SampledTokens]:
        """What each sequence of its step got."""
        plain = zip(step.sequences, self.token_ids, strict=bool(self.token_ids))
        return {work.sequence.seq_id: SampledTokens((one,)) for work, one in plain} | self.found


class Launch:
    """A step that was begun; began_ns: by `time.monotonic_ns`, when nothing before it ran."""

    output: StepOutput  # where it has been computed

    def __init__(self, step: ScheduledStep) -> None:
        self.step, self.began_ns = step, time.monotonic_ns()


class Ranks(Protocol):
    """Processes that compute each step together.

    collective_s: what the first one's sums and gathers took so far; may be read by any thread ·
    on_failure: called, by another thread, once no further step can run.
    """

    on_failure: Callable[[], object]

    @property
    def collective_s(self) -> float: ...

    def check(self) -> None:
        """Raises RunnerFailed once no further step can run."""

    def zero_blocks(self, blocks: list[int]) -> None:
        """Zeroes blocks in pools that are not of this host."""


class RunnerFailed(InternalError):
    """No further step can run here."""


class StepRunner:
    """Computes steps over a KV pool `[blocks, layers, 2, kv_heads, block_size, row_size]`.

    `launch` begins a step, `sample` has it sample, `land` waits for it: an engine may launch the
    next one before it lands this. Here `launch` does all of it, by `run`.

    decode_rows: rows of decode steps so far, where more are computed than plans ask for: "wanted",
    "padding", or "wasted" (the sequence was gone) · waited_s: what `land` waited for a device so
    far · expert_tokens: of its model, if it has one; all may be read by any thread · pools: of all
    ranks, this one's first · ranks: where there are several.
    """

    expert_tokens: torch.Tensor | None = None
    waited_s: float | None = None
    ranks: Ranks | None = None

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
        """Whether `launch` takes a step while the step before has not landed."""
        return False

    def launch(self, step: ScheduledStep) -> Launch:
        """Begins a step. The last tokens of sequences may be those that the step before samples."""
        launch = Launch(step)
        launch.output = StepOutput(self.run(step))
        return launch

    def sample(self, launch: Launch) -> None:
        """To be called behind `launch`, once the step before has landed: all tokens are known."""

    def land(self, launch: Launch) -> StepOutput:
        """Waits for a step. Raises what it failed with, unless all of its sequences are gone."""
        return launch.output

    def zero_blocks(self, blocks: list[int]) -> None:
        """Zeroes blocks that unverified bytes came into.

        Attention multiplies what it must not see by zero, which undoes any number but not a NaN.
        """
        for pool in self.pools if blocks else ():
            zero_blocks(pool, blocks)
            if pool.device != self.pool.device:  # another rank's GPU
                torch.cuda.synchronize(pool.device)
        if blocks and self.ranks is not None:
            self.ranks.zero_blocks(blocks)

    def close(self) -> None:
        """Ends what computes for it elsewhere; no step runs any more."""

    def wait_for_writes(self, blocks: list[int] | None = None) -> None:
        """Returns when nothing that runs here uses these blocks any more: others will write there.

        None is all of the pool, which is about to be freed. On a CPU nothing runs between steps.
        """
        if self.pool.device.type == "cuda":
            torch.cuda.synchronize(self.pool.device)


def zero_blocks(pool: torch.Tensor, blocks: list[int]) -> None:
    """Zeroes blocks; on a GPU, the current stream does."""
    content = pool.view(torch.uint8)  # not every operation knows every type of element
    with torch.inference_mode():
        content.index_fill_(0, torch.tensor(blocks).to(content.device), 0)


class Runner(StepRunner):
    """Runs a model."""

    def __init__(self, model: StepModel, pool: torch.Tensor, sampler: Sampler) -> None:
        super().__init__(pool, sampler)
        self.model = model
        self.expert_tokens = model.expert_tokens
        self._batches = BatchBuilder(pool.shape[4], pool.device)

    def run(self, step: ScheduledStep) -> dict[str, SampledTokens]:
        launch = self.launch(step)
        self.sample(launch)
        return self.land(launch).by_id(step)

    def launch(self, step: ScheduledStep) -> Launch:
        launch = Launch(step)
        logits = self.model.step(self._batches.build(step), self.pool)
        launch.output = self._sample(step, logits)
        self.wait_for_writes()
        return launch

    def close(self) -> None:
        self.model.close()

    def _sample(self, step: ScheduledStep, logits: torch.Tensor) -> StepOutput:
        """Samples; pools hidden states and takes log-probabilities of prompts first."""
        work, hidden = step.sequences, self.model.hidden
        sampling = [item for item in work if item.samples]
        rows = [row for item in sampling for row in sample_rows(item)]
        if hidden is None and len(rows) == len(work) == len(logits) and not step.has_chunks:
            return one_each(work, self._choose(logits, rows))
        embedded: dict[str, Vector] = {} if hidden is None else pooled(work, hidden)
        logits, prompts = split_prompt_logprobs(work, logits)
        found = tokens_by_sequence(sampling, self._choose(logits, rows), prompts)
        for seq_id, vector in embedded.items():
            found[seq_id] = found.get(seq_id, SampledTokens(()))._replace(pooled=vector)
        return StepOutput(found)

    def _choose(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> Sampled:
        return self.sampler.sample(logits, rows)


def sample_rows(work: ScheduledSequence) -> Iterator[SampleRow]:
    """What is sampled: the next token, and one behind each proposed one as if those were right.

    So each has the penalties, the position and the random number that it would have in a step of
    its own.
    """
    sequence, proposed = work.sequence, work.proposed
    of_sequence = sequence.token_counts, sequence.grammar
    yield SampleRow(sequence.params, sequence.tokens, sequence.prompt_tokens, 0, *of_sequence)
    for end in range(1, len(proposed) + 1):
        known = [*sequence.tokens, *proposed[:end]]
        yield SampleRow(sequence.params, known, sequence.prompt_tokens, end, *of_sequence)


def one_each(work: list[ScheduledSequence], sampled: Sampled) -> StepOutput:
    """What a step gave in which each work sampled one token."""
    found = dict[str, SampledTokens]()
    for item, token_id, logprobs in zip(work, sampled.token_ids, sampled.logprobs, strict=True):
        sequence = item.sequence
        if logprobs or sequence.grammar is not None or not sequence.params.max_tokens:
            found[sequence.seq_id] = SampledTokens((token_id,), (logprobs,) if logprobs else ())
    return StepOutput(found, sampled.token_ids)


def tokens_by_sequence(
    sampling: list[ScheduledSequence], sampled: Sampled, prompts: Mapping[str, PromptLogprobs]
) -> dict[str, SampledTokens]:
    """What each work's sequence accepts of its sampled rows, by its id; rows as `sample_rows`."""
    tokens = {seq_id: SampledTokens((), (), prompt) for seq_id, prompt in prompts.items()}
    at = 0
    for work in sampling:
        rows, proposed = 1 + len(work.proposed), work.proposed
        end = at + (verify(proposed, sampled.token_ids[at : at + rows]) if proposed else 1)
        logprobs, seq_id = tuple(filter(None, sampled.logprobs[at:end])), work.sequence.seq_id
        new = tuple(sampled.token_ids[at:end])
        tokens[seq_id] = SampledTokens(new, logprobs, prompts.get(seq_id))
        at += rows
    assert at == len(sampled.token_ids), "every row belongs to a work"
    return tokens
