"""How tokens are chosen: one validated, immutable value from SDK to sampler.

The router validates it before any work; workers trust what a router sent. No tensors here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import MappingProxyType

from baton.errors import InvalidRequest, quoted
from baton.v1 import common_pb2

DEFAULT_MAX_TOKENS = 64
FILL_CONTEXT = (1 << 32) - 1  # as max_tokens: as many as the context leaves
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 256  # each may be two, with and without a space before it
MAX_STRUCTURED_OUTPUT_CHARS = 64 << 10
MAX_SEED = (1 << 64) - 1
_OPTIONAL = {"top_p", "repetition_penalty", "seed", "max_tokens", "logprobs"}
_OPTIONAL |= {"prompt_logprobs", "structured_output"}


@dataclass(frozen=True)
class StructuredOutput:
    """What the whole output has to match, in one of these forms; see common.proto."""

    json_schema: str = ""
    regex: str = ""
    choice: tuple[str, ...] = ()
    grammar: str = ""

    @classmethod
    def from_proto(cls, message: common_pb2.StructuredOutput) -> StructuredOutput:
        """The restriction a message stands for."""
        return cls(message.json_schema, message.regex, tuple(message.choice), message.grammar)

    def validate(self) -> None:
        """Raises InvalidRequest unless it is one form of a size that is taken."""
        field, forms = "sampling.structured_output", tuple(vars(self))
        if sum(map(bool, vars(self).values())) != 1:
            raise InvalidRequest(f"give exactly one of {', '.join(forms)}, not empty", field)
        if not all(self.choice):
            raise InvalidRequest("a choice must not be empty", field)
        size = sum(map(len, (self.json_schema, self.regex, self.grammar, *self.choice)))
        if size > (most := MAX_STRUCTURED_OUTPUT_CHARS):
            raise InvalidRequest(f"it has {size} characters and at most {most} are taken", field)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings; see common.proto for what each one does.

    `logprobs` and `prompt_logprobs` None are off.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    max_tokens: int = DEFAULT_MAX_TOKENS
    ignore_eos: bool = False
    logprobs: int | None = None
    structured_output: StructuredOutput | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    embedding: bool = False

    @cached_property
    def has_penalties(self) -> bool:
        """Whether logits depend on earlier tokens, a bias, or what is allowed."""
        return bool(
            self.logit_bias
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.allowed_token_ids
            or self.bad_words
        )

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidRequest naming the first setting that is out of range."""
        checks = (
            ("temperature", 0 <= self.temperature <= 100, "between 0 and 100"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", 0 < self.repetition_penalty <= 100, "above 0, at most 100"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "at most max_tokens"),
            ("seed", 0 <= self.seed <= MAX_SEED, "an unsigned 64-bit number"),
            *(
                (
                    name,
                    (getattr(self, name) or 0) <= MAX_TOP_LOGPROBS,
                    f"at most {MAX_TOP_LOGPROBS}",
                )
                for name in ("logprobs", "prompt_logprobs")
            ),
            ("logit_bias", all(-100 <= b <= 100 for b in self.logit_bias.values()), "±100 at most"),
            ("logit_bias", all(t < vocab_size for t in self.logit_bias), "of known tokens"),
            ("stop_token_ids", all(t < vocab_size for t in self.stop_token_ids), "known tokens"),
            (
                "allowed_token_ids",
                all(t < vocab_size for t in self.allowed_token_ids),
                "known tokens",
            ),
            ("bad_words", all(w and max(w) < vocab_size for w in self.bad_words), "known tokens"),
        )
        for name, valid, expected in checks:
            if not valid:
                raise InvalidRequest(
                    f"{name} must be {expected}, not {quoted(getattr(self, name))}",
                    f"sampling.{name}",
                )
        if self.embedding and (self.max_tokens or self.prompt_logprobs is not None):
            raise InvalidRequest(
                "an embedding is of a prompt alone: set max_tokens to 0, and leave prompt_logprobs "
                "out",
                "sampling.embedding",
            )
        if self.structured_output is not None:
            self.structured_output.validate()
            if self.allowed_token_ids or self.bad_words:
                raise InvalidRequest(
                    "structured output says which tokens are allowed: leave allowed_token_ids and "
                    "bad_words out",
                    f"sampling.{'bad_words' if self.bad_words else 'allowed_token_ids'}",
                )
            if self.ignore_eos:
                raise InvalidRequest(
                    "ignore_eos has no meaning for structured output, which ends with "
                    "end-of-sequence: leave one of them out",
                    "sampling.ignore_eos",
                )

    def to_proto(self) -> common_pb2.SamplingParams:
        values = {name: getattr(self, name) for name in _NAMES}
        values["logit_bias"] = dict(self.logit_bias)
        for name in ("stop_token_ids", "allowed_token_ids"):
            values[name] = sorted(getattr(self, name))
        values["bad_words"] = [common_pb2.BadWord(token_ids=word) for word in self.bad_words]
        if self.structured_output is not None:
            values["structured_output"] = vars(self.structured_output)
        return common_pb2.SamplingParams(**values)

    @classmethod
    def from_proto(cls, message: common_pb2.SamplingParams) -> SamplingParams:
        """The settings a message stands for; unset optional fields take their defaults.

        Raises InvalidRequest for more entries than are taken, before any is copied.
        """
        limits = (
            ("logit_bias", MAX_LOGIT_BIAS),
            ("stop_token_ids", MAX_STOP_TOKEN_IDS),
            ("bad_words", 2 * MAX_BAD_WORDS),
        )
        for name, most in limits:
            if (count := len(getattr(message, name))) > most:
                raise InvalidRequest(
                    f"{name} may have {most} entries at most, not {count}", f"sampling.{name}"
                )
        values = {
            name: getattr(message, name)
            for name in _NAMES
            if name not in _OPTIONAL or message.HasField(name)
        }
        values["logit_bias"] = MappingProxyType(dict(message.logit_bias))
        for name in ("stop_token_ids", "allowed_token_ids"):
            values[name] = frozenset(getattr(message, name))
        values["bad_words"] = tuple(tuple(word.token_ids) for word in message.bad_words)
        if output := values.get("structured_output"):
            values["structured_output"] = StructuredOutput.from_proto(output)
        return cls(**values)


_NAMES = tuple(field.name for field in fields(SamplingParams))
