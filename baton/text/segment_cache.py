"""A cache of the token ids of chats' segments, so that a turn costs only its new messages.

Tokenizers split a text at their added tokens first, and tokenize the segments between them
independently, so the ids of the text are those of its segments. The conditions are in
`_cut_pattern`; other tokenizers have no cache.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Any

import tokenizers

_MAX_TOKEN_CHARS = 64  # of an added token at which texts are split
_ENTRY_BYTES = 256  # approximate size of an entry without its ids
_GROUP_CHARS = 1 << 16  # of segments tokenized in one call
# Steps that process segments independently. Steps at the beginning of a text (Metaspace "first")
# apply to its first segment only, because others begin with an added token.
_NORMALIZERS = frozenset(
    (
        *("BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt"),
        *("Precompiled", "Prepend", "Replace", "Strip", "StripAccents"),
    )
)
_PRE_TOKENIZERS = frozenset(
    (
        *("BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Metaspace"),
        *("Punctuation", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"),
    )
)
# These change no ids if no special tokens are added.
_POST_PROCESSORS = frozenset(
    ("BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing")
)

Encode = Callable[[list[str]], list[list[int]]]  # from texts to ids, without special tokens


class SegmentCache:
    """An LRU cache of `max_bytes`. For one thread at a time."""

    def __init__(self, library: tokenizers.Tokenizer, max_bytes: int) -> None:
        self._cut = _cut_pattern(library)
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._ids: dict[bytes, array[int]] = {}  # by salted hash, least recently used first

    def encode(self, text: str, encode: Encode, salt: str, max_tokens: int = 0) -> list[int]:
        """Token ids of a text without special tokens, equal to `encode([text])[0]`.

        Entries are shared only within a salt, so timing reveals nothing about other salts' texts.
        Stops early, with more than `max_tokens` ids, if there are more; 0: no limit.
        """
        if self._cut is None:
            return encode([text])[0]
        starts = [match.start() for match in self._cut.finditer(text)]
        parts = [text[a:b] for a, b in pairwise([0, *starts, len(text)]) if a < b]
        salted = hashlib.blake2b(salt.encode(), digest_size=16)
        keys = [_key(salted, part) for part in parts]
        by_key = dict(zip(keys, parts, strict=True))
        found = {key: self._ids.pop(key) for key in by_key if key in self._ids}
        self._num_bytes -= sum(map(_size, found.values()))
        missing = {key: part for key, part in by_key.items() if key not in found}
        count = sum(map(len, found.values()))
        for group in _groups(missing):
            if max_tokens and count > max_tokens:
                break
            for key, ids in zip(group, encode(list(group.values())), strict=True):
                found[key] = array("I", ids)
                count += len(ids)
        self._keep(found)
        return [token for key in keys for token in found.get(key, ())]

    def _keep(self, found: dict[bytes, array[int]]) -> None:
        self._ids |= found
        self._num_bytes += sum(map(_size, found.values()))
        while self._num_bytes > self._max_bytes:
            oldest = next(iter(self._ids))
            self._num_bytes -= _size(self._ids.pop(oldest))


def _key(salted: Any, part: str) -> bytes:
    digest = salted.copy()
    digest.update(part.encode())
    key: bytes = digest.digest()
    return key


def _size(ids: array[int]) -> int:
    return _ENTRY_BYTES + ids.itemsize * len(ids)


def _groups(parts: dict[bytes, str]) -> list[dict[bytes, str]]:
    """The segments in order, grouped to save calls of the library."""
    groups, chars = [dict[bytes, str]()], 0
    for key, part in parts.items():
        if chars and chars + len(part) > _GROUP_CHARS:
            groups.append({})
            chars = 0
        groups[-1][key] = part
        chars += len(part)
    return groups


def _cut_pattern(library: tokenizers.Tokenizer) -> re.Pattern[str] | None:
    """Matches the added tokens at which the library splits every text; None if uncertain.

    The library first looks for those that are not normalized, in the original text: the leftmost,
    then the longest. None of them may strip or require adjacent white space.
    """
    tokens = [
        token
        for token in library.get_added_tokens_decoder().values()
        if token.content and not token.normalized
    ]
    sound = (
        tokens
        and not library.encode_special_tokens
        and not getattr(library.model, "dropout", None)
        and _steps(library.normalizer, "normalizers") <= _NORMALIZERS
        and _steps(library.pre_tokenizer, "pretokenizers") <= _PRE_TOKENIZERS
        and _steps(library.post_processor, "processors") <= _POST_PROCESSORS
        and not any(token.lstrip or token.rstrip or token.single_word for token in tokens)
        and all(len(token.content) <= _MAX_TOKEN_CHARS for token in tokens)
        and all(token.content.strip() == token.content for token in tokens)
    )
    return re.compile(_longest_of([token.content for token in tokens])) if sound else None


def _steps(step: Any, parts: str) -> set[str]:
    """The types of the steps in a component of the library."""
    if step is None:
        return set()
    # Pickling returns its description.
    left, found = [json.loads(step.__getstate__())], set[str]()
    while left:
        described = left.pop()
        left += described.get(parts, ()) if described["type"] == "Sequence" else ()
        if described["type"] != "Sequence":
            found.add(described["type"])
    return found


def _longest_of(words: Collection[str]) -> str:
    """A pattern of the longest of these words, which reads each character once."""
    behind = defaultdict[str, list[str]](list)
    for word in words:
        if word:
            behind[word[0]].append(word[1:])
    if not behind:
        return ""
    branches = "|".join(re.escape(char) + _longest_of(rest) for char, rest in behind.items())
    return f"(?:{branches}){'?' if '' in words else ''}"
