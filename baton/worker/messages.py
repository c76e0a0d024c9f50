"""Engine values to protobuf messages and back, for both kinds of worker."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass

from baton.block_hash import adapted_salt, hash_chain
from baton.config import PROVING_TOKENS
from baton.engine.build import Loaded
from baton.engine.sampling.logprobs import PromptLogprobs, TokenLogprobs
from baton.engine.sequence import Sequence
from baton.errors import InvalidRequest
from baton.generation.sampling_params import SamplingParams
from baton.generation.structured_output import GrammarCompiler, GrammarMatcher
from baton.kv_groups import KvGroups
from baton.v1 import common_pb2

FINISH_REASONS = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
}


@dataclass(frozen=True)
class ModelLimits:
    """A worker model's limits; beyond them a sequence would fail the step of a whole batch.

    groups: groups of layers, with the tokens of a KV block, for the hashes of prompts.
    """

    vocab_size: int
    max_context: int
    groups: KvGroups

    @classmethod
    def from_loaded(cls, loaded: Loaded) -> ModelLimits:
        return cls(loaded.model_config.vocab_size, loaded.max_context, loaded.layout.groups)

    def check_token(self, token_id: int, field: str) -> None:
        """Raises InvalidRequest when the model knows no such token."""
        if token_id >= self.vocab_size:
            raise InvalidRequest(
                f"token id {token_id} is outside the vocabulary of {self.vocab_size}", field
            )


def sequence_of(
    spec: common_pb2.SequenceSpec, limits: ModelLimits, pause_after: int | None = None
) -> Sequence:
    """The engine's sequence for a router's request, but for its grammar. Raises InvalidRequest.

    Its blocks are hashed here, not on the engine's thread, which a long prompt would delay.
    """
    num_tokens, params = len(spec.token_ids), SamplingParams.from_proto(spec.sampling)
    if not spec.handoff_id:
        raise InvalidRequest("a sequence needs an id", "sequence.handoff_id")
    most = limits.max_context - (params.max_tokens > 0)  # a token of output needs a place
    if not 0 < num_tokens <= most:
        raise InvalidRequest(
            f"{num_tokens} tokens: between 1 and {most} fit the context",
            "sequence.token_ids",
        )
    if not 0 < spec.prompt_tokens <= num_tokens:
        raise InvalidRequest(
            f"{spec.prompt_tokens} of {num_tokens} tokens cannot be the prompt",
            "sequence.prompt_tokens",
        )
    limits.check_token(max(spec.token_ids), "sequence.token_ids")
    params.validate(limits.vocab_size)
    tokens, salt = list(spec.token_ids), adapted_salt(spec.cache_salt, spec.adapter)
    return Sequence(
        seq_id=spec.handoff_id,
        tokens=tokens,
        prompt_tokens=spec.prompt_tokens,
        params=params,
        cache_salt=salt,
        adapter=spec.adapter,
        priority=time.monotonic() + spec.virtual_finish_ms / 1000,
        prompt_s=spec.prompt_us / 1e6,
        exclusive_tokens=PROVING_TOKENS if spec.alone else 0,
        pause_after=pause_after,
        block_hashes=hash_chain(tokens, limits.groups.block_size, salt),
    )


def compiled_grammar(
    sequence: Sequence, grammars: GrammarCompiler
) -> Future[GrammarMatcher] | None:
    """What a sequence with a restricted output needs before it is the engine's; else None.

    Raises and fails as `GrammarCompiler.compile`; cancelling the future is enough to give it up.
    """
    output, reasoning = sequence.params.structured_output, sequence.params.reasoning
    if output is None and reasoning is None:
        return None
    return grammars.compile(output, sequence.tokens, sequence.prompt_tokens, reasoning)


def prompt_logprobs_proto(found: PromptLogprobs) -> common_pb2.PromptLogprobs:
    """Log-probabilities of a part of a prompt."""
    return common_pb2.PromptLogprobs(
        logprobs=found.logprobs.tolist(),
        ranks=found.ranks.tolist(),
        top_ids=found.top_ids.ravel().tolist(),
        top_logprobs=found.top_logprobs.ravel().tolist(),
    )


def logprobs_proto(logprobs: TokenLogprobs) -> common_pb2.PositionLogprobs:
    """Log-probabilities of one position."""
    return common_pb2.PositionLogprobs(
        chosen=common_pb2.TokenLogprob(token_id=logprobs.token_id, logprob=logprobs.logprob),
        top=[common_pb2.TokenLogprob(token_id=t, logprob=p) for t, p in logprobs.top],
    )
