"""Converts a growing list of token ids to text, at a bounded cost for each token.

The library's DecodeStream raises on bytes that are not UTF-8, which models generate, holds text
back without limit, and cannot be flushed. Here, text does not depend on how tokens are grouped, and
invalid bytes become U+FFFD, one for each maximal invalid part (Unicode Standard, 3.9).
"""

from __future__ import annotations

import codecs
import contextlib
import json
import re
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Any

import tokenizers

_WORD_START = "\u2581"  # SentencePiece's space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"
_UTF8_MOST_BYTES = 4
# For decoders that hide bytes: most tokens that a trailing U+FFFD may wait to be completed.
_MOST_PENDING = 8


class TokenPieces:
    """A cache of the bytes of tokens, one for each tokenizer.

    `byte_level`: all tokens are bytes (GPT-2, Llama 3, Qwen), so the text is the UTF-8 of their
    bytes. That also holds if tokens other than `<0xNN>` have a fixed text (Llama 2, Mistral,
    Gemma), except for a space at the beginning. With other decoders, the text of a token may depend
    on the tokens before it.
    """

    def __init__(self, library: tokenizers.Tokenizer, shown: Collection[int] = ()) -> None:
        """Special tokens have no text, except those in `shown`."""
        self._library = library
        self._named = frozenset(shown)
        decoders = _decoders(library)
        self.byte_level = [decoder["type"] for decoder in decoders] == ["ByteLevel"]
        self._byte_fallback = any(decoder["type"] == "ByteFallback" for decoder in decoders)
        self._replaced = _replaced(decoders) if self._byte_fallback else None
        added = library.get_added_tokens_decoder()
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        self._known: dict[int, bytes | None] = {}
        self._decoded: dict[int, str] = {}
        # Texts of seen tokens that are whole characters in any context.
        self.texts: dict[int, str] = {}

    def showing(self, special: Collection[int]) -> TokenPieces:
        """A variant in which these special tokens have text."""
        return TokenPieces(self._library, special) if special else self

    @cached_property
    def showing_all(self) -> TokenPieces:
        """A variant in which all special tokens have text."""
        return self.showing(self._special)

    def piece(self, token: int) -> bytes | None:
        """The token's bytes; b"" if it has no text, None if they depend on its context."""
        if token not in self._known:
            piece = self._known[token] = self._find(token)
            if piece is not None and (self.byte_level or self._replaced is not None):
                with contextlib.suppress(UnicodeDecodeError):
                    self.texts[token] = piece.decode()
        return self._known[token]

    def shown(self, token: int) -> tuple[str, bytes]:
        """A token by itself, for lists of tokens: its text, or a special token's name, and bytes.

        Invalid bytes become U+FFFD.
        """
        piece = self.piece(token)
        if piece:
            return piece.decode("utf-8", "replace"), piece
        text = (self._library.id_to_token(token) or "").replace(_WORD_START, " ")
        return text, text.encode() if piece is None else b""

    def decode(self, tokens: list[int]) -> str:
        """Decodes `tokens` by the library, without special tokens and unknown ids."""
        if len(tokens) != 1:
            return str(self._library.decode(tokens, skip_special_tokens=True))
        (token,) = tokens
        if token not in self._decoded:
            self._decoded[token] = str(self._library.decode(tokens, skip_special_tokens=True))
        return self._decoded[token]

    def _find(self, token: int) -> bytes | None:
        name = self._library.id_to_token(token)
        if name is not None and token in self._named:
            return name.encode()
        if name is None or token in self._special:
            return b""
        if self.byte_level:
            return _byte_level_bytes(name)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(name)):
            return bytes.fromhex(match[1])
        if self._replaced is None:
            return None
        for old, new in self._replaced:
            name = name.replace(old, new)
        return name.encode()


def _decoders(library: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The steps of the decoder, as in tokenizer.json."""
    if library.decoder is None:
        return []
    # Pickling a decoder returns its description; parsing the whole file would take a second.
    decoder = json.loads(library.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _replaced(decoders: list[dict[str, Any]]) -> list[tuple[str, str]] | None:
    """The replacements in tokens' texts; None if texts depend on their context."""
    replaced = []
    for decoder in decoders:
        kind, pattern = decoder["type"], decoder.get("pattern", {})
        if kind == "Replace" and "String" in pattern:
            replaced.append((pattern["String"], decoder["content"]))
        elif kind == "Strip":
            if (decoder["content"], decoder["start"], decoder["stop"]) != (" ", 1, 0):
                return None
        elif kind not in ("ByteFallback", "Fuse"):
            return None
    return replaced


def _byte_level_bytes(name: str) -> bytes:
    """The bytes of a byte-level token; an added token may also be plain text."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in name)
    except KeyError:
        return name.encode()


# GPT-2's alphabet: printable Latin-1 is itself, other bytes are characters from U+0100 on.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
_BYTE_OF_CHAR = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + index): byte for index, byte in enumerate(_OTHERS)
}


class Detokenizer:
    """Converts one request's output to text. Special tokens and unknown ids have none.

    A character that begins at the end of the prompt is returned when it is complete, or as U+FFFD
    if it never is. Bytes go to a UTF-8 decoder; other tokens are decoded after their predecessors,
    and add the new part of the text:

        context   pending   token
        [ ... ]   [ ... ]   [ . ]
        decode(context) is a prefix of decode(context + pending + token); the rest is new text

    Byte tokens are excluded, because the library decodes a run of them at once.
    """

    def __init__(self, pieces: TokenPieces, prompt_ids: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._utf8 = _utf8_after(pieces, prompt_ids)
        last = next((token for token in reversed(prompt_ids) if pieces.piece(token) != b""), None)
        self._context = [] if last is None else [last]
        self._pending: list[int] = []
        self._between = False  # whether it is between whole characters, after the first one

    def push(self, token_ids: Iterable[int]) -> str:
        """Adds tokens; returns the text that is certain, in whole characters."""
        parts = []
        for token in token_ids:
            text = self._pieces.texts.get(token) if self._between else None
            parts.append(self._push(token) if text is None else text)
        return "".join(parts)

    def flush(self) -> str:
        """The rest of the text, at the end of the output; an incomplete character is U+FFFD."""
        return self._utf8.decode(b"", True) + self._release()

    def _push(self, token: int) -> str:
        piece = self._pieces.piece(token)
        if piece == b"":
            return ""
        if piece is None:
            return self._utf8.decode(b"", True) + self._push_text(token)
        released = self._release()
        text = self._utf8.decode(piece)
        if not (self._context or self._pieces.byte_level) and piece.startswith(b" "):
            # Some decoders drop the space that their tokenizers put before a text.
            text = self._pieces.decode([token])
        self._context = [token]
        self._between = not self._utf8.getstate()[0]
        return released + text

    def _push_text(self, token: int) -> str:
        self._pending.append(token)
        text = self._pending_text()
        if text.endswith(_REPLACEMENT) and len(self._pending) < _MOST_PENDING:
            return ""
        self._context, self._pending = self._pending, []
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


def decode(pieces: TokenPieces, token_ids: Sequence[int]) -> str:
    """The text of `token_ids`, equal to that of a Detokenizer without a prompt.

    The library is faster, but turns a whole run of byte tokens with an invalid byte into U+FFFD;
    then this decodes by itself.
    """
    text = pieces.decode(list(token_ids))
    if pieces.byte_level or _REPLACEMENT not in text:
        return text
    detokenizer = Detokenizer(pieces)
    return detokenizer.push(token_ids) + detokenizer.flush()


def _utf8_after(pieces: TokenPieces, prompt_ids: Sequence[int]) -> codecs.IncrementalDecoder:
    """A UTF-8 decoder that has read an incomplete character at the end of the prompt."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    tail = b""
    for token in reversed(prompt_ids):
        piece = pieces.piece(token)
        if piece is None or len(tail) >= _UTF8_MOST_BYTES:
            break
        tail = piece + tail
    # From the last lead byte of a character of several bytes; earlier ones are complete.
    start = max((i for i, byte in enumerate(tail) if byte >= 0xC0), default=len(tail))
    decoder.decode(tail[start:])
    return decoder
