"""The demo model's training text, its tokenizer, and the windows each training step reads.

The text is the Python standard library's own source: every CPython carries it, so the model can be
made again without a download. Generated tables, files with the building machine's settings and
deliberately broken test data are left out.

The tokenizer is byte-fallback BPE, fitted to Python's layout. A newline and the indentation after
it are separate tokens: joined they would be shorter, but a prompt that ends in a newline would then
ask the model for an unindented line.
"""

import ast
import hashlib
import json
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

Tokens = npt.NDArray[np.int64]

BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 0, 1
# The special tokens and one token for each byte come before what is learned.
_RESERVED = 2 + 256
# Runs of newlines; indentation; a word with its leading space; one digit; punctuation.
_PIECES = r"\n+| {2,}|\t+| ?_*[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+| "
_ALPHABET = [*map(chr, range(32, 127)), "\n", "\t"]
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "data"}
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "bad_", "badsyntax_", "config-")
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
# Below this share of letters, underscores and white space a file is a table, not a program.
_PROSE_SHARE_MIN = 0.70
# One file in fifty is held out: about 2 % of the text.
_HELD_OUT_ONE_IN = 50


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus; `path` is relative to the standard library's folder."""

    path: str
    text: str

    @property
    def is_test(self) -> bool:
        """Whether the file belongs to the library's test suites."""
        return not _TEST_FOLDERS.isdisjoint(self.path.split("/"))

    @property
    def is_held_out(self) -> bool:
        """Whether the file is kept from training; decided by its path alone."""
        digest = hashlib.sha256(self.path.encode()).digest()
        return int.from_bytes(digest[:4], "big") % _HELD_OUT_ONE_IN == 0


def read_corpus() -> list[SourceFile]:
    """Returns the running Python's library sources, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _is_skipped(relative):
            continue
        text = _read_program(path)
        if text is not None:
            files.append(SourceFile(relative.as_posix(), text))
    return sorted(files, key=lambda file: file.path)


def fingerprint(files: list[SourceFile]) -> str:
    """Returns a hex digest of the corpus, which tells whether two machines have the same text."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.path.encode() + b"\0" + file.text.encode() + b"\0")
    return digest.hexdigest()[:16]


def _is_skipped(relative: Path) -> bool:
    folders_skipped = not _SKIPPED_FOLDERS.isdisjoint(relative.parts[:-1])
    return folders_skipped or any(part.startswith(_SKIPPED_PREFIXES) for part in relative.parts)


def _read_program(path: Path) -> str | None:
    """Returns the file's text, or None where it is empty, not UTF-8, no valid Python or a table."""
    try:
        text = path.read_bytes().decode()
        ast.parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError):
        return None
    text = text.replace("\r\n", "\n")
    plain = sum(c.isascii() and (c.isalpha() or c.isspace() or c == "_") for c in text)
    return text if text.strip() and plain >= _PROSE_SHARE_MIN * len(text) else None


def make_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Returns a tokenizer of `vocab_size` tokens: 2 special, 256 bytes, then learned pieces.

    Any text without the literal special tokens decodes to itself: a character outside the
    alphabet becomes its UTF-8 bytes, one `<0xNN>` token each.
    """
    reserved = [BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256))]
    learned, merges = _learn(texts, vocab_size - _RESERVED)
    vocab = {token: index for index, token in enumerate([*reserved, *learned])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    # Only these two are special. The byte tokens must not be: a text that spells out "<0x41>"
    # would then be read as the byte.
    tokenizer.add_special_tokens([BOS, EOS])
    return tokenizer


def _learn(texts: Iterable[str], size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns `size` tokens in order of their learning, and the merges that make them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=_ALPHABET,
        limit_alphabet=len(_ALPHABET),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    state = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    return tokens, [(left, right) for left, right in state["merges"]]


class Texts:
    """What to train on, and what is held out; each stream is `[tokens]`."""

    def __init__(self, files: list[SourceFile], tokenizer: Tokenizer) -> None:
        train = [file for file in files if not file.is_held_out]
        held_out = [file for file in files if file.is_held_out]
        self.all = _encode(tokenizer, train)
        self.library = _encode(tokenizer, [file for file in train if not file.is_test])
        self.held_out = {
            "library": _encode(tokenizer, [file for file in held_out if not file.is_test]),
            "tests": _encode(tokenizer, [file for file in held_out if file.is_test]),
        }


def windows(stream: Tokens, window: int, first: int, count: int, seed: int) -> Tokens:
    """Returns windows `first` to `first + count` of the endless shuffled reading of `stream`.

    The result is `[count, window + 1]`: the last token of a row is only predicted. Each epoch
    reads the stream once, from a new offset and in a new order, and repeats nothing.
    """
    starts = (_window_start(len(stream), window, first + i, seed) for i in range(count))
    return np.stack([stream[start : start + window + 1] for start in starts])


def _window_start(stream_tokens: int, window: int, index: int, seed: int) -> int:
    epoch_windows = (stream_tokens - 1) // window - 1
    epoch, place = divmod(index, epoch_windows)
    order, offset = _epoch_order(epoch_windows, window, epoch, seed)
    return int(order[place]) * window + offset


@lru_cache(maxsize=4)
def _epoch_order(epoch_windows: int, window: int, epoch: int, seed: int) -> tuple[Tokens, int]:
    chance = np.random.default_rng([seed, window, epoch])
    return chance.permutation(epoch_windows), int(chance.integers(window))


def _encode(tokenizer: Tokenizer, files: list[SourceFile]) -> Tokens:
    # A file that spells out a special token's text must not begin or end there.
    tokenizer.encode_special_tokens = True
    encoded = tokenizer.encode_batch([file.text for file in files], add_special_tokens=False)
    tokenizer.encode_special_tokens = False
    return np.concatenate([[BOS_ID, *piece.ids, EOS_ID] for piece in encoded])
