"""How single tokens are shown where log-probabilities are told, in OpenAI's two ways."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from baton.text import AnyTokenizer
from baton.v1 import common_pb2

_LEAST = -9999.0  # JSON has no infinity


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
    """The four parallel lists of /v1/completions; remembers how far the text has come."""

    def __init__(self, tokenizer: AnyTokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def told(self, positions: Iterable[common_pb2.PositionLogprobs]) -> dict[str, Any]:
        """What is told of these output positions, which follow those told before."""
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

    def told(self, positions: Iterable[common_pb2.PositionLogprobs]) -> dict[str, Any]:
        """What is told of these output positions."""
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


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
