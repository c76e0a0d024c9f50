"""Measures an engine's prefill and decode speed, for `baton bench engine` and benchmarks/."""

from __future__ import annotations

import itertools
import queue
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from baton.config import EngineConfig
from baton.engine import build, cpu_affinity
from baton.engine.build import Loaded
from baton.engine.sequence import Sequence
from baton.engine.step_report import StepReport
from baton.errors import ConfigError
from baton.generation.sampling_params import SamplingParams

_STEP_S = 120.0  # longer than any step takes
_PROMPTS = (128, 512, 2048)  # tokens
_TRIES, _WARM_UP, _STEPS = 3, 4, 16


@dataclass(frozen=True)
class PrefillRate:
    """Prefill speed of a single prompt, the median of several runs."""

    prompt_tokens: int
    ms: float
    tokens_per_s: float


@dataclass(frozen=True)
class DecodeRate:
    """Speed of decode steps with `batch` sequences."""

    batch: int
    context_tokens: int
    step_ms: float
    tokens_per_s: float


def measure(
    settings: EngineConfig, context: int, show: Callable[[PrefillRate | DecodeRate], None]
) -> dict[str, Any]:
    """Loads the model and measures it; calls `show` with each rate.

    context: tokens of each decoding sequence. Raises ConfigError if it does not fit, and as `load`.
    """
    loaded = load(settings)
    last = context + _WARM_UP + _STEPS + 2  # tokens of a sequence at its end
    batches = list(_doubled(most_sequences(loaded, last)))
    if last > loaded.max_context or not batches:
        raise ConfigError(
            f"--context {context} does not fit: contexts end at {loaded.max_context} tokens, and "
            f"the KV cache holds {loaded.layout.num_tokens}"
        )
    rates: list[PrefillRate | DecodeRate] = []
    with closing(EngineDriver(loaded)) as driver:
        for tokens in (tokens for tokens in _PROMPTS if tokens < loaded.max_context):
            took_s = statistics.median(driver.prefill(tokens) for _ in range(_TRIES))
            rates.append(PrefillRate(tokens, took_s * 1e3, tokens / took_s))
            show(rates[-1])
        for batch in batches:
            step_s = driver.decode([context] * batch, _WARM_UP, _STEPS)
            rates.append(DecodeRate(batch, context, step_s * 1e3, batch / step_s))
            show(rates[-1])
    return {
        "model": loaded.path.name,
        "device": str(loaded.runner.pool.device),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "prefill": [asdict(rate) for rate in rates if isinstance(rate, PrefillRate)],
        "decode": [asdict(rate) for rate in rates if isinstance(rate, DecodeRate)],
    }


def load(settings: EngineConfig) -> Loaded:
    """Loads and warms up a model to be measured. Raises ConfigError for speculative decoding."""
    if settings.most_proposed:
        raise ConfigError(
            f"--{'speculative-model' if settings.speculative_model else 'speculate'}: the speed of "
            "speculative decoding depends on the text, and random tokens are measured here: leave "
            "it out, and measure a running server with your own load (`baton bench serve`)"
        )
    with cpu_affinity.pinned_to(settings.cpus):
        loaded = build.load(settings)
    build.warm_up(loaded)
    return loaded


def most_sequences(loaded: Loaded, tokens: int) -> int:
    """The number of sequences of `tokens` tokens that a batch and the KV cache hold."""
    layout = loaded.layout
    blocks = layout.groups.most_blocks(tokens, layout.step_tokens)
    return min(loaded.settings.max_batch, layout.num_blocks // blocks)


def _doubled(most: int) -> Iterator[int]:
    """Powers of two below `most`, and `most`."""
    batch = 1
    while batch < most:
        yield batch
        batch *= 2
    if most:
        yield most


class EngineDriver:
    """A running engine without a worker, driven for measurements."""

    def __init__(self, loaded: Loaded) -> None:
        self._vocab = loaded.model_config.vocab_size
        self._names, self._dice = map(str, itertools.count()), random.Random(0)  # noqa: S311 - no secret
        self._reports: queue.SimpleQueue[tuple[float, StepReport]] = queue.SimpleQueue()
        self._engine = loaded.engine(
            lambda report: self._reports.put((time.perf_counter(), report))
        )

        self.waited_s = 0.0  # mean time a step of the last `decode` waited for the device

        self._engine.start()

    def close(self) -> None:
        """Stops the engine."""
        self._engine.stop()

    def decode(
        self,
        contexts: Items[int],
        warm_up: int,
        steps: int,
        first: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> float:
        """Mean seconds of a decode step of sequences with these context lengths.

        No prompt is computed: sequences start as after a handoff. sampling: settings of all
        sequences; first: additional ones of the first.
        """
        run, batch = warm_up + steps + 1, len(contexts)
        settings = {"seed": 1, "ignore_eos": True, "max_tokens": run + 1, **sampling}
        params = [SamplingParams(**{**settings, **(first or {})})]
        params += [SamplingParams(**settings)] * (batch - 1)
        self._start(contexts, params)
        ends, waited = list[float](), list[float]()
        while len(ends) < run:
            ended, report = self._next()
            if report.num_sequences == batch:
                ends.append(ended)
                waited.append(report.waited_s)
        counted = ends[warm_up - 1 : -1]  # without the last step, which frees the sequences
        self.waited_s = sum(waited[warm_up:-1]) / (len(counted) - 1)
        return (counted[-1] - counted[0]) / (len(counted) - 1)

    def _start(self, contexts: Items[int], params: list[SamplingParams]) -> list[Sequence]:
        """Sequences that decode from now on."""
        sequences = [
            self._sequence(self.prompt(context), one)
            for context, one in zip(contexts, params, strict=True)
        ]
        for sequence in sequences:
            self._engine.reserve(sequence).result()

        def start() -> None:
            for sequence in sequences:
                self._engine.resume(sequence.seq_id, sequence.num_tokens, 7)

        self._engine.submit(start).result()
        return sequences

    def beside(self, contexts: Items[int], tokens: int, warm_up: int) -> tuple[float, int]:
        """Seconds of the steps that compute a prompt beside decoding sequences, and their number.

        contexts: of the decoding sequences, in tokens.
        """
        params = SamplingParams(seed=1, ignore_eos=True, max_tokens=100_000)
        streams = self._start(contexts, [params] * len(contexts))
        for _ in range(warm_up):
            self._next()
        sequence = self._sequence(self.prompt(tokens), SamplingParams(max_tokens=1))
        self._engine.add(sequence).result()
        seconds, steps, done = 0.0, 0, False
        while not done:
            _, report = self._next()
            if report.num_tokens > len(contexts):
                seconds += (report.ended_ns - report.started_ns) / 1e9
                steps += 1
            done = any(one.seq_id == sequence.seq_id and one.token_ids for one in report.progress)
        for stream in streams:
            self._engine.release(stream.seq_id).result()
        return seconds, steps

    def prefill(self, tokens: int) -> float:
        """Seconds from a prompt's submission to its first token."""
        sequence = self._sequence(self.prompt(tokens), SamplingParams(max_tokens=1))
        began = time.perf_counter()
        self._engine.add(sequence).result()
        while True:
            ended, report = self._next()
            if any(progress.token_ids for progress in report.progress):
                return ended - began

    def prompt(self, tokens: int) -> list[int]:
        """A random prompt, different at each call."""
        return [self._dice.randrange(self._vocab) for _ in range(tokens)]

    def _sequence(self, tokens: list[int], params: SamplingParams) -> Sequence:
        return Sequence(next(self._names), tokens, len(tokens), params)

    def _next(self) -> tuple[float, StepReport]:
        """The end and report of the next step with sequences. Raises RuntimeError if one failed."""
        while True:
            try:
                ended, report = self._reports.get(timeout=_STEP_S)
            except queue.Empty:
                raise RuntimeError(f"no step ended within {_STEP_S:g} s") from None
            if failed := [one.abort_reason for one in report.others if one.abort_reason]:
                raise RuntimeError(failed[0])
            if report.num_sequences:
                return ended, report
