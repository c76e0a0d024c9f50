"""What answers look like: a whole one, or one chunk of a stream, for completions and for chats.

Chunks are written by hand around the text: a stream is hundreds of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any, Protocol

from baton.gateway.tokens import ChatLogprobs, CompletionLogprobs
from baton.text import AnyTokenizer
from baton.v1 import common_pb2

REASONS = {
    common_pb2.FINISH_REASON_UNSPECIFIED: None,
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}
DONE = b"data: [DONE]\n\n"


class Logprobs(Protocol):
    """Tells log-probabilities of one choice, in order."""

    def told(self, positions: Sequence[common_pb2.PositionLogprobs]) -> dict[str, Any]: ...


@dataclass
class Choice:
    """One choice as far as it has come."""

    logprobs: Logprobs | None
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    positions: list[common_pb2.PositionLogprobs] = field(default_factory=list)
    reason: str | None = None
    stop: str | None = None
    usage: common_pb2.Usage | None = None
    begun: bool = False  # a chunk of it was sent


class Shape(Protocol):
    """One of the two APIs."""

    whole: str  # the answer's "object"
    chunk: str  # the same of a chunk
    prefix: str  # its id begins with this

    def logprobs(self, tokenizer: AnyTokenizer) -> Logprobs:
        """Tells the log-probabilities of one choice."""

    def content(self, text: str) -> dict[str, Any]:
        """The members of a whole choice that hold its text."""

    def piece(self, text: str, first: bool) -> str:
        """The same of a chunk's choice, written as JSON members."""


class CompletionShape:
    """/v1/completions."""

    whole = chunk = "text_completion"
    prefix = "cmpl-"

    def logprobs(self, tokenizer: AnyTokenizer) -> Logprobs:
        """The four parallel lists."""
        return CompletionLogprobs(tokenizer)

    def content(self, text: str) -> dict[str, Any]:
        """The text."""
        return {"text": text}

    def piece(self, text: str, first: bool) -> str:
        """The new text."""
        return f'"text":{encode_basestring(text)}'


class ChatShape:
    """/v1/chat/completions."""

    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def logprobs(self, tokenizer: AnyTokenizer) -> Logprobs:
        """One entry for each token."""
        return ChatLogprobs(tokenizer)

    def content(self, text: str) -> dict[str, Any]:
        """The assistant's message."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def piece(self, text: str, first: bool) -> str:
        """What the message gains."""
        role = '"role":"assistant",' if first else ""
        return f'"delta":{{{role}"content":{encode_basestring(text)}}}'


@dataclass(frozen=True)
class Head:
    """What all chunks of an answer begin with."""

    shape: Shape
    request_id: str
    created: int
    model: str

    def whole(
        self, choices: Sequence[Choice], n: int, *, token_ids: bool, echoes: Sequence[str]
    ) -> bytes:
        """The answer in one piece."""
        return json.dumps(
            {
                **self._members(self.shape.whole),
                "choices": [
                    self._choice(index, choice, token_ids, echoes[index // n] if echoes else "")
                    for index, choice in enumerate(choices)
                ],
                "usage": usage_of(choices, n),
            },
            ensure_ascii=False,
            separators=(",", ":"),
        ).encode()

    def _choice(self, index: int, choice: Choice, token_ids: bool, echo: str) -> dict[str, Any]:
        logprobs = choice.logprobs
        return {
            "index": index,
            **self.shape.content(echo + "".join(choice.text)),
            "logprobs": None if logprobs is None else logprobs.told(choice.positions),
            "finish_reason": choice.reason,
            "stop_reason": choice.stop,
            **({"token_ids": choice.token_ids} if token_ids else {}),
        }

    def opening(self) -> str:
        """The text of a chunk up to its choices."""
        members = json.dumps(self._members(self.shape.chunk), separators=(",", ":"))
        return f"data: {members[:-1]},"

    def usage_chunk(self, choices: Sequence[Choice], n: int) -> bytes:
        """The last chunk, without a choice."""
        usage = json.dumps(usage_of(choices, n), separators=(",", ":"))
        return f'{self.opening()}"choices":[],"usage":{usage}}}\n\n'.encode()

    def _members(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.shape.prefix + self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }


def usage_of(choices: Sequence[Choice], n: int) -> dict[str, Any]:
    """Tokens of the whole request: each prompt once, every choice's output."""
    usages = [choice.usage or common_pb2.Usage() for choice in choices]
    prompt = sum(usage.prompt_tokens for usage in usages[::n])
    output = sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages[::n])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
