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
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

Tokens = npt.NDArray[np.int64]

BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 0, 1
_RESERVED = [BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256))]  # before what is learned
# Runs of newlines; indentation; a word with its leading space; one digit; punctuation.
_PIECES = r"\n+| {2,}|\t+| ?_*[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+| "
_ALPHABET = [*map(chr, range(32, 127)), "\n", "\t"]
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "data"}
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "bad_", "badsyntax_", "config-")
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
_PROSE_SHARE_MIN = 0.70  # of letters, underscores and white space: with fewer a file is a table
_HELD_OUT_ONE_IN = 50  # files: about 2 % of the text


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
    """The running Python's library sources, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        is_skipped = not _SKIPPED_FOLDERS.isdisjoint(parts[:-1])
        is_skipped |= any(part.startswith(_SKIPPED_PREFIXES) for part in parts)
        if not is_skipped and (text := _read_program(path)):
            files.append(SourceFile("/".join(parts), text))
    return sorted(files, key=lambda file: file.path)


def _read_program(path: Path) -> str:
    """The file's text; empty where it is not UTF-8, no valid Python or a table."""
    try:
        text = path.read_bytes().decode()
        ast.parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError):
        return ""
    text = text.replace("\r\n", "\n")
    plain = sum(c.isascii() and (c.isalpha() or c.isspace() or c == "_") for c in text)
    return text if text.strip() and plain >= _PROSE_SHARE_MIN * len(text) else ""


def fingerprint(files: list[SourceFile]) -> str:
    """A hex digest of the corpus, by which two machines can check that they have the same text."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.path.encode() + b"\0" + file.text.encode() + b"\0")
    return digest.hexdigest()[:16]


def make_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of `vocab_size` tokens: 2 special, 256 bytes, then learned pieces.

    Any text without the literal special tokens decodes to itself: a character outside the
    alphabet becomes its UTF-8 bytes, one `<0xNN>` token each.
    """
    pieces = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    learning = Tokenizer(models.BPE())
    learning.pre_tokenizer = pieces
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(_RESERVED),
        initial_alphabet=_ALPHABET,
        limit_alphabet=len(_ALPHABET),
        show_progress=False,
    )
    learning.train_from_iterator(texts, trainer)
    learned = json.loads(learning.to_str())["model"]
    tokens = [*_RESERVED, *sorted(learned["vocab"], key=learned["vocab"].__getitem__)]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [(left, right) for left, right in learned["merges"]]

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    tokenizer.pre_tokenizer = pieces
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    # Only these two are special. The byte tokens must not be: a text that spells out "<0x41>"
    # would then be read as the byte.
    tokenizer.add_special_tokens([BOS, EOS])
    return tokenizer


def encode(tokenizer: Tokenizer, files: Iterable[SourceFile]) -> Tokens:
    """The files one after the other, each between BOS and EOS: `[tokens]`."""
    # A file that spells out a special token's text must not begin or end there.
    tokenizer.encode_special_tokens = True
    encoded = tokenizer.encode_batch([file.text for file in files], add_special_tokens=False)
    tokenizer.encode_special_tokens = False
    return np.concatenate([[BOS_ID, *piece.ids, EOS_ID] for piece in encoded])


def windows(stream: Tokens, window: int, first: int, count: int, seed: int) -> Tokens:
    """Windows `first` to `first + count` of the endless shuffled reading of `stream` `[tokens]`.

    The result is `[count, window + 1]`: the last token of a row is only predicted. Each epoch
    reads the stream once, from a new offset and in a new order, and repeats nothing.
    """
    epoch_windows = (len(stream) - 1) // window - 1
    rows = []
    for index in range(first, first + count):
        epoch, place = divmod(index, epoch_windows)
        chance = np.random.default_rng([seed, window, epoch])
        start = chance.permutation(epoch_windows)[place] * window + chance.integers(window)
        rows.append(stream[start : start + window + 1])
    return np.stack(rows)
