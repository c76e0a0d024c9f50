"""Responses: a whole one, or one chunk of a stream, for completions and for chats.

Chunks are written by hand around the text: a stream is hundreds of them.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any, Protocol

from baton.text import AnyTokenizer
from baton.v1 import common_pb2

REASONS = {
    common_pb2.FINISH_REASON_UNSPECIFIED: None,
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}
DONE = b"data: [DONE]\n\n"
_MIN_LOGPROB = -9999.0  # JSON has no infinity


class Logprobs(Protocol):
    """Writes log-probabilities of one choice, in order."""

    def entries(self, positions: Sequence[common_pb2.PositionLogprobs]) -> dict[str, Any]: ...


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


@dataclass(frozen=True)
class ResponseFormat:
    """How one of the two APIs writes answers and chunks."""

    whole: str  # the answer's "object"
    chunk: str  # the same of a chunk
    prefix: str  # its id begins with this
    logprobs: Callable[[AnyTokenizer], Logprobs]  # those of one choice
    content: Callable[[str], dict[str, Any]]  # the members of a whole choice that hold its text
    # The same of a chunk's choice, written as JSON members; True for the choice's first chunk.
    piece: Callable[[str, bool], str]


@dataclass(frozen=True)
class ResponseHead:
    """What all chunks of an answer begin with."""

    format: ResponseFormat
    request_id: str
    created: int
    model: str

    def whole(
        self, choices: Sequence[Choice], n: int, *, token_ids: bool, echoes: Sequence[str]
    ) -> bytes:
        """The answer in one piece."""
        return json.dumps(
            {
                **self._members(self.format.whole),
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
            **self.format.content(echo + "".join(choice.text)),
            "logprobs": None if logprobs is None else logprobs.entries(choice.positions),
            "finish_reason": choice.reason,
            "stop_reason": choice.stop,
            **({"token_ids": choice.token_ids} if token_ids else {}),
        }

    def opening(self) -> str:
        """The text of a chunk up to its choices."""
        members = json.dumps(self._members(self.format.chunk), separators=(",", ":"))
        return f"data: {members[:-1]},"

    def usage_chunk(self, choices: Sequence[Choice], n: int) -> bytes:
        """The last chunk, without a choice."""
        usage = json.dumps(usage_of(choices, n), separators=(",", ":"))
        return f'{self.opening()}"choices":[],"usage":{usage}}}\n\n'.encode()

    def _members(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.format.prefix + self.request_id,
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


def text_of(tokenizer: AnyTokenizer, token_id: int) -> str:
    """A token as text: bytes that are no character as "bytes:\\x.."; without a text, its id."""
    if tokenizer.pieces is None:
        return f"token_id:{token_id}"
    text, piece = tokenizer.pieces.shown(token_id)
    if "\ufffd" in text:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
    return text


def bytes_of(tokenizer: AnyTokenizer, token_id: int) -> bytes:
    """A token's own bytes."""
    return b"" if tokenizer.pieces is None else tokenizer.pieces.shown(token_id)[1]


class CompletionLogprobs:
    """The four parallel lists of /v1/completions; keeps the offset in the text."""

    def __init__(self, tokenizer: AnyTokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def entries(self, positions: Sequence[common_pb2.PositionLogprobs]) -> dict[str, Any]:
        """For these output positions, which follow those of the last call."""
        offsets, tokens, chosen, top = [], [], [], []
        for position in positions:
            token_id = position.chosen.token_id
            text, logprob = text_of(self._tokenizer, token_id), _finite(position.chosen.logprob)
            others = {text_of(self._tokenizer, t.token_id): _finite(t.logprob)
                      for t in position.top}  # fmt: skip
            offsets.append(self._offset)
            tokens.append(text)
            chosen.append(logprob)
            top.append({text: logprob, **others})
            self._offset += len(self._utf8.decode(bytes_of(self._tokenizer, token_id)))
        return {
            "text_offset": offsets,
            "token_logprobs": chosen,
            "tokens": tokens,
            "top_logprobs": top,
        }


class ChatLogprobs:
    """One entry for each token, as /v1/chat/completions has it."""

    def __init__(self, tokenizer: AnyTokenizer) -> None:
        self._tokenizer = tokenizer

    def entries(self, positions: Sequence[common_pb2.PositionLogprobs]) -> dict[str, Any]:
        """For these output positions."""
        content = [
            {
                **self._entry(position.chosen),
                "top_logprobs": [self._entry(other) for other in position.top],
            }
            for position in positions
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: common_pb2.TokenLogprob) -> dict[str, Any]:
        return {
            "token": text_of(self._tokenizer, token.token_id),
            "logprob": _finite(token.logprob),
            "bytes": list(bytes_of(self._tokenizer, token.token_id)),
        }


def _completion_piece(text: str, first: bool) -> str:
    return f'"text":{encode_basestring(text)}'


def _chat_message(text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text, "refusal": None}}


def _chat_piece(text: str, first: bool) -> str:
    role = '"role":"assistant",' if first else ""
    return f'"delta":{{{role}"content":{encode_basestring(text)}}}'


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)


COMPLETION_FORMAT = ResponseFormat(
    "text_completion",
    "text_completion",
    "cmpl-",
    CompletionLogprobs,
    lambda text: {"text": text},
    _completion_piece,
)
CHAT_FORMAT = ResponseFormat(
    "chat.completion",
    "chat.completion.chunk",
    "chatcmpl-",
    ChatLogprobs,
    _chat_message,
    _chat_piece,
)
