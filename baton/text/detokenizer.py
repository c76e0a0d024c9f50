"""Turns a growing list of token ids into text, piece by piece, at a bounded cost for each token.

A character can be spread over several tokens, and a token's text can depend on the one before it
(a leading space), so a token alone does not tell its text. The library's own DecodeStream is not
used: it raises on byte sequences that are not UTF-8, which a model is free to generate, holds text
back without bound until they end, and cannot be flushed.

How the output is cut into pushes never changes the text. Bytes that are not UTF-8 become U+FFFD,
one for each maximal invalid part, as in the Unicode Standard, section 3.9.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from baton.text.token_pieces import TokenPieces

_REPLACEMENT = "\ufffd"
_UTF8_MOST_BYTES = 4
# For decoders that hide their bytes: how long a trailing U+FFFD may be a character to come.
_MOST_PENDING = 8


class HasPieces(Protocol):
    """A tokenizer; `pieces` is None for a model that has none."""

    @property
    def pieces(self) -> TokenPieces | None: ...


class Detokenizer:
    """The text of one request's output. Special tokens and unknown ids have no text.

    A character whose first bytes end the prompt is given whole once it is complete, or as U+FFFD
    when it never is.
    """

    def __init__(self, tokenizer: HasPieces, prompt_ids: Sequence[int] = ()) -> None:
        self._stream = _stream(tokenizer.pieces, prompt_ids)

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that `token_ids` make certain, whole characters only; often empty."""
        if self._stream is None:
            return ""
        return "".join(map(self._stream.push, token_ids))

    def flush(self) -> str:
        """The rest, at the end of the output: an unfinished character becomes U+FFFD."""
        return "" if self._stream is None else self._stream.flush()


def decode(pieces: TokenPieces, token_ids: Sequence[int]) -> str:
    """The whole text of `token_ids`, equal to what a Detokenizer without a prompt makes of them.

    The library is faster, and differs only when bytes that are not UTF-8 come as byte tokens: one
    bad byte turns the whole run of byte tokens around it into U+FFFD, good characters included.
    """
    text = pieces.decode(list(token_ids))
    if pieces.byte_level or _REPLACEMENT not in text:
        return text
    stream = _WindowStream(pieces, ())
    return "".join(map(stream.push, token_ids)) + stream.flush()


def _stream(
    pieces: TokenPieces | None, prompt_ids: Sequence[int]
) -> _ByteStream | _WindowStream | None:
    if pieces is None:
        return None
    kind = _ByteStream if pieces.byte_level else _WindowStream
    return kind(pieces, prompt_ids)


class _ByteStream:
    """For tokenizers whose every token is bytes: one UTF-8 decoder tells all."""

    def __init__(self, pieces: TokenPieces, prompt_ids: Sequence[int]) -> None:
        self._piece = pieces.piece
        self._utf8 = _utf8_after(pieces, prompt_ids)

    def push(self, token: int) -> str:
        # A piece is None only where pieces.byte_level is not set.
        return self._utf8.decode(self._piece(token) or b"")

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class _WindowStream:
    """For all others: decode a token behind its predecessor, and take what it adds.

        context   pending   token
        [ ... ]   [ ... ]   [ . ]
        decode(context) is a prefix of decode(context + pending + token); the rest is new text

    Byte tokens are kept out of that, because the library judges a run of them as a whole.
    """

    def __init__(self, pieces: TokenPieces, prompt_ids: Sequence[int]) -> None:
        self._pieces = pieces
        self._utf8 = _utf8_after(pieces, prompt_ids)
        last = next((token for token in reversed(prompt_ids) if pieces.piece(token) != b""), None)
        self._context: list[int] = [] if last is None else [last]
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        piece = self._pieces.piece(token)
        if piece == b"":
            return ""
        if piece is None:
            return self._utf8.decode(b"", True) + self._push_text(token)
        return self._release() + self._push_byte(token, piece)

    def flush(self) -> str:
        return self._utf8.decode(b"", True) + self._release()

    def _push_text(self, token: int) -> str:
        self._pending.append(token)
        text = self._pending_text()
        if text.endswith(_REPLACEMENT) and len(self._pending) < _MOST_PENDING:
            return ""
        self._context, self._pending = self._pending, []
        return text

    def _push_byte(self, token: int, piece: bytes) -> str:
        text = self._utf8.decode(piece)
        if piece == b" " and not self._context:
            # Some decoders drop the space that their tokenizer puts before a text.
            text = self._pieces.decode([token])
        self._context = [token]
        return text

    def _release(self) -> str:
        if not self._pending:
            return ""
        text = self._pending_text()
        self._context, self._pending = self._pending, []
        return text

    def _pending_text(self) -> str:
        decode = self._pieces.decode
        return decode(self._context + self._pending)[len(decode(self._context)) :]


def _utf8_after(pieces: TokenPieces, prompt_ids: Sequence[int]) -> codecs.IncrementalDecoder:
    """A UTF-8 decoder that has read the character which the prompt may have left unfinished."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    tail = b""
    for token in reversed(prompt_ids):
        piece = pieces.piece(token)
        if piece is None or len(tail) >= _UTF8_MOST_BYTES:
            break
        tail = piece + tail
    # From the last byte that begins a character of several; what is before it is complete.
    start = max((i for i, byte in enumerate(tail) if byte >= 0xC0), default=len(tail))
    decoder.decode(tail[start:])
    return decoder
