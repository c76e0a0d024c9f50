"""Sampling parameters: one immutable value from router to sampler. Torch-free.

The router validates it; workers trust the router.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any

from baton.errors import InvalidRequest, quoted
from baton.v1 import common_pb2

DEFAULT_MAX_TOKENS = 64
FILL_CONTEXT = (1 << 32) - 1  # as max_tokens: the rest of the context
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 14  # take a millisecond of the router's loop, and 48 KiB
MAX_CACHE_SALT_CHARS = 256
MAX_LABEL_TOKEN_IDS = 16
MAX_BAD_WORDS = 256  # each is up to two token sequences: with and without a space before it
MAX_LABEL_TOKEN_IDS = 16
MAX_STRUCTURED_OUTPUT_CHARS = 64 << 10
MAX_SEED = (1 << 64) - 1
_OPTIONAL = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "max_tokens"}
    | {"logprobs", "prompt_logprobs", "structured_output", "reasoning"}
)


@dataclass(frozen=True)
class StructuredOutput:
    """What the whole output must match, in one of these forms; see common.proto."""

    json_schema: str = ""
    regex: str = ""
    choice: tuple[str, ...] = ()
    grammar: str = ""

    @classmethod
    def from_proto(cls, message: common_pb2.StructuredOutput) -> StructuredOutput:
        return cls(message.json_schema, message.regex, tuple(message.choice), message.grammar)

    def validate(self) -> None:
        """Raises InvalidRequest unless it has exactly one form, of a valid size."""
        field, forms = "sampling.structured_output", tuple(vars(self))
        if sum(map(bool, vars(self).values())) != 1:
            raise InvalidRequest(f"give exactly one of {', '.join(forms)}, not empty", field)
        if not all(self.choice):
            raise InvalidRequest("a choice must not be empty", field)
        size = sum(map(len, (self.json_schema, self.regex, self.grammar, *self.choice)))
        if size > (most := MAX_STRUCTURED_OUTPUT_CHARS):
            raise InvalidRequest(f"structured output may have {most} characters, not {size}", field)


@dataclass(frozen=True)
class Reasoning:
    """The tokens that delimit reasoning, and its limit; see common.proto.

    `max_tokens`: most tokens between the two; None: no limit.
    """

    begin_token_id: int
    end_token_id: int
    begun: bool = False
    max_tokens: int | None = None

    @classmethod
    def from_proto(cls, message: common_pb2.Reasoning) -> Reasoning:
        most = message.max_tokens if message.HasField("max_tokens") else None
        return cls(message.begin_token_id, message.end_token_id, message.begun, most)


class ReasoningTracker:
    """Tracks the reasoning of one output."""

    def __init__(self, reasoning: Reasoning) -> None:
        self._reasoning = reasoning
        self._begins = not reasoning.begun  # whether the next token may open it
        self.inside = reasoning.begun
        self.num_tokens = 0  # includes the closing token, and the opening one if it is output

    def take(self, token_ids: Sequence[int], implied_end: int | None = None) -> int:
        """Counts the reasoning tokens at the beginning of the next tokens of the output.

        `implied_end`: a token that ends reasoning, too, and is not part of it.
        """
        if self._begins and token_ids:
            self._begins = False
            self.inside = token_ids[0] == self._reasoning.begin_token_id
        if not self.inside:
            return 0
        count = len(token_ids)
        for at, token_id in enumerate(token_ids):
            if token_id in (self._reasoning.end_token_id, implied_end):
                self.inside = False
                count = at + (token_id != implied_end)
                break
        self.num_tokens += count
        return count

    @property
    def may_begin(self) -> bool:
        """Whether the next token is the output's first, which may open the reasoning."""
        return self._begins

    @property
    def must_end(self) -> bool:
        """Whether the limit is reached, so that the next token must close the reasoning."""
        most = self._reasoning.max_tokens
        if not self.inside or most is None:
            return False
        return self.num_tokens - (not self._reasoning.begun) >= most


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings; common.proto documents each.

    `logprobs` and `prompt_logprobs` are off if None.
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
    reasoning: Reasoning | None = None  # if structured output follows it, or it has a limit
    prompt_logprobs: int | None = None
    allowed_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    embedding: bool = False
    classification: bool = False
    label_token_ids: tuple[int, ...] = ()

    @property
    def is_pooled(self) -> bool:
        """Whether the prompt's hidden states or logits are reported instead of an output."""
        return self.embedding or self.classification

    @cached_property
    def has_penalties(self) -> bool:
        """Whether logits depend on earlier tokens, a bias, or a set of allowed tokens."""
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
                max(self.allowed_token_ids, default=0) < vocab_size,
                "known tokens",
            ),
            (
                "label_token_ids",
                max(self.label_token_ids, default=0) < vocab_size,
                "known tokens",
            ),
            ("bad_words", all(self.bad_words), "not empty"),
            (
                "bad_words",
                all(max(w, default=0) < vocab_size for w in self.bad_words),
                "known tokens",
            ),
        )
        for name, valid, expected in checks:
            if not valid:
                value = getattr(self, name)
                if expected.endswith("known tokens"):
                    ids = chain(*value) if name == "bad_words" else value
                    value = sorted({token for token in ids if token >= vocab_size})
                raise InvalidRequest(
                    f"{name} must be {expected}, not {quoted(value)}", f"sampling.{name}"
                )
        if self.is_pooled and (self.max_tokens or self.prompt_logprobs is not None):
            name = "embedding" if self.embedding else "classification"
            raise InvalidRequest(
                f"{name} has no output: set max_tokens to 0, and leave prompt_logprobs out",
                f"sampling.{name}",
            )
        if self.embedding and self.classification:
            raise InvalidRequest(
                "give either embedding or classification", "sampling.classification"
            )
        if self.structured_output is not None:
            self.structured_output.validate()
            if self.ignore_eos:
                raise InvalidRequest(
                    "structured output ends with end-of-sequence, which ignore_eos would ignore: "
                    "leave one of them out",
                    "sampling.ignore_eos",
                )
        restricted = self.structured_output is not None or self.reasoning is not None
        if restricted and (self.allowed_token_ids or self.bad_words):
            raise InvalidRequest(
                "allowed_token_ids and bad_words do not work with structured output or "
                "max_thinking_tokens: leave them out",
                f"sampling.{'bad_words' if self.bad_words else 'allowed_token_ids'}",
            )
        if self.reasoning is not None:
            tokens = self.reasoning.begin_token_id, self.reasoning.end_token_id
            if max(tokens) >= vocab_size:
                raise InvalidRequest(
                    "reasoning tokens must be in the vocabulary", "sampling.reasoning"
                )

    def to_proto(self) -> common_pb2.SamplingParams:
        values = {name: getattr(self, name) for name in _NAMES}
        values["logit_bias"] = dict(self.logit_bias)
        for name in ("stop_token_ids", "allowed_token_ids", "label_token_ids"):
            values[name] = list(getattr(self, name))
        values["bad_words"] = [common_pb2.BadWord(token_ids=word) for word in self.bad_words]
        for name in ("structured_output", "reasoning"):
            if values[name] is not None:
                values[name] = vars(values[name])
        return common_pb2.SamplingParams(**values)

    @classmethod
    def from_proto(
        cls,
        message: common_pb2.SamplingParams,
        seed: int | None = None,
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> SamplingParams:
        """Converts a message; unset optional fields take `defaults`, else the class's.

        `seed` replaces the message's. A default `max_tokens` also replaces FILL_CONTEXT.

        Raises InvalidRequest for too many entries, before any is copied.
        """
        limits = (
            ("logit_bias", MAX_LOGIT_BIAS),
            ("stop_token_ids", MAX_STOP_TOKEN_IDS),
            ("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS),
            ("bad_words", 2 * MAX_BAD_WORDS),
            ("label_token_ids", MAX_LABEL_TOKEN_IDS),
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
        values = {**defaults, **values}
        if values.get("max_tokens") == FILL_CONTEXT:
            values["max_tokens"] = defaults.get("max_tokens", FILL_CONTEXT)
        if seed is not None:
            values["seed"] = seed
        values["logit_bias"] = MappingProxyType(dict(message.logit_bias))
        for name in ("stop_token_ids", "allowed_token_ids"):
            values[name] = frozenset(getattr(message, name))
        values["bad_words"] = tuple(tuple(word.token_ids) for word in message.bad_words)
        values["label_token_ids"] = tuple(message.label_token_ids)
        if output := values.get("structured_output"):
            values["structured_output"] = StructuredOutput.from_proto(output)
        if reasoning := values.get("reasoning"):
            values["reasoning"] = Reasoning.from_proto(reasoning)
        return cls(**values)


_NAMES = tuple(field.name for field in fields(SamplingParams))
