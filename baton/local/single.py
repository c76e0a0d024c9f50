"""Baton in one process: an engine without workers and transfers, for `baton generate --local`.

It is the tests' oracle: a cluster must stream the tokens that this returns.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence

from baton.client import Completion, Route, Timing, TokenLogprobs, Usage
from baton.client.results import prompt_logprobs_of
from baton.config import EngineConfig
from baton.engine import build, cpu_affinity
from baton.engine.backends.backend import Backend
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence as EngineSequence
from baton.engine.step_report import SequenceProgress, StepReport
from baton.errors import InternalError, InvalidRequest
from baton.generation.sampling_params import SamplingParams
from baton.generation.structured_output import GrammarCompiler
from baton.text import Tokenizer, check_stop_strings, load_tokenizer
from baton.v1 import common_pb2
from baton.worker.messages import prompt_logprobs_proto
from router.admission.validation import check_length, fit_max_tokens
from router.output.text_stream import TextStream
from router.request import RequestState, TokenizedRequest

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class SingleProcess:
    """A loaded model with its engine; a context manager that stops the engine's thread."""

    def __init__(self, settings: EngineConfig, backend: Backend | None = None) -> None:
        """backend: as `build.load` takes it."""
        with cpu_affinity.pinned_to(settings.cpus):
            self._loaded = build.load(settings, backend=backend)
        self.tokenizer = load_tokenizer(self._loaded.path)
        self._reports: queue.SimpleQueue[SequenceProgress] = queue.SimpleQueue()
        self._engine: Engine = self._loaded.engine(self._publish)
        self._requests = 0
        config = self._loaded.model_config
        self._grammars = GrammarCompiler(self._loaded.path, config.vocab_size, config.eos_token_ids)

    def __enter__(self) -> SingleProcess:
        self._engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.stop()

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] = lambda text: None,
        cut: bool = False,
    ) -> Completion:
        """Runs one completion; `on_text` gets the text as soon as it is final.

        Raises InvalidRequest as a router does. Output that exceeds the context is an error, too,
        unless `cut`.
        """
        tokens = encode(self.tokenizer, prompt)
        vocab, limit = self.tokenizer.vocab_size, self._loaded.max_context
        params.validate(vocab)
        if not tokens or not 0 <= min(tokens) <= max(tokens) < vocab:
            raise InvalidRequest(f"the prompt needs token ids from 0 to {vocab - 1}", "token_ids")
        check_length(len(tokens), limit, has_output=params.max_tokens > 0)
        params = fit_max_tokens(params, len(tokens), limit, limit, cut)
        check_stop_strings(stop)
        self._requests += 1
        name = f"local-{self._requests}"
        request = TokenizedRequest(
            name, tuple(tokens), params, tuple(stop), False, "", float("inf")
        )
        state = RequestState(request)
        sequence = EngineSequence(name, list(tokens), len(tokens), params)
        if params.structured_output is not None:
            output = params.structured_output
            sequence.grammar = self._grammars.compile(output, tokens, len(tokens)).result()
        self._engine.add(sequence).result()
        try:
            return self._collect(state, sequence, on_text)
        finally:
            self._engine.release(name).result()

    def _collect(
        self, state: RequestState, sequence: EngineSequence, on_text: Callable[[str], None]
    ) -> Completion:
        text, asked = TextStream(self.tokenizer, state.request), sequence.params.prompt_logprobs
        pieces: list[str] = []
        logprobs: list[TokenLogprobs] = []
        prompt = common_pb2.PromptLogprobs(token_ids=state.request.prompt)
        reason: str | None = None
        while reason is None:
            progress = self._reports.get()
            if progress.abort_reason:
                failed = InvalidRequest if progress.invalid else InternalError
                raise failed(progress.abort_reason)
            if progress.seq_id != sequence.seq_id:
                continue
            if progress.prompt_logprobs is not None:
                prompt.MergeFrom(prompt_logprobs_proto(progress.prompt_logprobs))
            piece, count = text.advance(progress.token_ids, progress.finish_reason)
            state.deliver(progress.token_ids[:count])  # tokens after a stop are no output
            logprobs += [
                TokenLogprobs(sampled.token_id, sampled.logprob, sampled.top)
                for sampled in progress.logprobs[:count]
            ]
            pieces.append(piece)
            on_text(piece)
            reason = "stop" if text.stop is not None else progress.finish_reason
        return Completion(
            text="".join(pieces),
            token_ids=tuple(state.delivered),
            finish_reason="stop" if reason == "stop" else "length",
            stop=text.stop or "",
            logprobs=tuple(logprobs),
            prompt_logprobs=() if asked is None else prompt_logprobs_of(prompt),
            usage=Usage(len(state.request.prompt), len(state.delivered), sequence.num_cached),
            timing=Timing(
                ttft_ms=state.ttft_s * 1e3, tpot_ms=state.tpot_s * 1e3, e2e_ms=state.e2e_s * 1e3
            ),
            route=Route(attempts=1),
            request_id=state.request.request_id,
        )

    def _publish(self, report: StepReport) -> None:
        for progress in report.progress:
            self._reports.put(progress)


def encode(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Token ids of a text or of chat messages; ids are returned as they are."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return ids
    return tokenizer.encode_chat([item for item in prompt if isinstance(item, Mapping)])
