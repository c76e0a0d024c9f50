"""What single token ids stand for: bytes where the tokenizer works in bytes, else nothing certain.

Shared by everything that turns ids into text; built once for a tokenizer and filled in as ids are
seen. It knows no request.
"""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

_WORD_START = "\u2581"  # SentencePiece's space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenPieces:
    """The bytes of single tokens, and how the library decodes the tokens that are not bytes.

    `byte_level` says that every token is bytes (GPT-2, Llama 3, Qwen), so a text is just the
    UTF-8 of its tokens' bytes. Otherwise only `<0xNN>` tokens are (Llama 2, Mistral), and another
    token's text can depend on the tokens before it.
    """

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library
        decoders = _decoders(library)
        self.byte_level = [decoder["type"] for decoder in decoders] == ["ByteLevel"]
        self._byte_fallback = any(decoder["type"] == "ByteFallback" for decoder in decoders)
        added = library.get_added_tokens_decoder()
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        self._known: dict[int, bytes | None] = {}

    def piece(self, token: int) -> bytes | None:
        """The token's bytes, b"" for one that is no text, None where only `decode` can tell."""
        try:
            return self._known[token]
        except KeyError:
            piece = self._known[token] = self._find(token)
            return piece

    def shown(self, token: int) -> tuple[str, bytes]:
        """A token by itself, as lists of tokens show it: its text, or its name, and its bytes.

        Bytes that are no text by themselves become U+FFFD; special tokens have a name.
        """
        piece = self.piece(token)
        if piece:
            return piece.decode("utf-8", "replace"), piece
        text = (self._library.id_to_token(token) or "").replace(_WORD_START, " ")
        return text, text.encode() if piece is None else b""

    def decode(self, tokens: list[int]) -> str:
        """The library's text of `tokens`, special tokens and unknown ids left out."""
        return self._library.decode(tokens, skip_special_tokens=True)

    def _find(self, token: int) -> bytes | None:
        name = self._library.id_to_token(token)
        if name is None or token in self._special:
            return b""
        if self.byte_level:
            return _byte_level_bytes(name)
        match = _BYTE_TOKEN.fullmatch(name) if self._byte_fallback else None
        return bytes.fromhex(match[1]) if match else None


def _decoders(library: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The steps of the decoder, as tokenizer.json describes them."""
    if library.decoder is None:
        return []
    # What a decoder is pickled to is that description; the whole file would take a second.
    decoder = json.loads(library.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _byte_level_bytes(name: str) -> bytes:
    """An added token may hold characters that stand for no byte; then it is plain text."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in name)
    except KeyError:
        return name.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the rest follows from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF_CHAR = _byte_alphabet()
