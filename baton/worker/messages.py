"""Engine values to protobuf messages and back, for both kinds of worker."""

from __future__ import annotations

from baton.engine.sampler import TokenLogprobs
from baton.engine.sequence import Sequence
from baton.sampling import SamplingParams
from baton.v1 import common_pb2

FINISH_REASONS = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
}


def sequence_of(spec: common_pb2.SequenceSpec, park_after: int | None = None) -> Sequence:
    """The engine's sequence for what a router asks for."""
    return Sequence(
        seq_id=spec.handoff_id,
        tokens=list(spec.token_ids),
        prompt_tokens=spec.prompt_tokens,
        params=SamplingParams.from_proto(spec.sampling),
        cache_salt=spec.cache_salt,
        park_after=park_after,
    )


def logprobs_proto(logprobs: TokenLogprobs) -> common_pb2.PositionLogprobs:
    """Log-probabilities of one position."""
    return common_pb2.PositionLogprobs(
        chosen=common_pb2.TokenLogprob(token_id=logprobs.token_id, logprob=logprobs.logprob),
        top=[common_pb2.TokenLogprob(token_id=t, logprob=p) for t, p in logprobs.top],
    )
