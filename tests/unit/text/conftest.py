"""Real tokenizers of four families, trained here in milliseconds, as model directories."""

from __future__ import annotations

import functools
import json

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from baton.text import load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "Hello world, hello there! 1234 + 5678 = 6912",
    "def f(x):\n    return x * 2\n\tprint('hi')",
    "naïve café, Übergrößen, señor",
] * 3
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_level_library():
    """As GPT-2, Llama 3 and Qwen: every token is bytes."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    # Characters outside the byte alphabet make an added token plain text.
    library.add_tokens(["<tool call>", "<思考>"])
    return library


def byte_fallback_library():
    """As Llama 2 and Mistral: pieces with a leading space, bytes for what is in no piece."""
    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    library.decoder = decoders.Sequence(
        [
            *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    reserved = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    library.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=411, special_tokens=reserved, show_progress=False),
    )
    described = json.loads(library.to_str())
    described["pre_tokenizer"] = None  # words were only for learning
    described["added_tokens"] = described["added_tokens"][: 1 + len(SPECIAL)]  # bytes are plain
    library = tokenizers.Tokenizer.from_str(json.dumps(described))
    # Looks like half a character, and is a whole one.
    library.add_tokens([tokenizers.AddedToken("\ufffd", normalized=False)])
    return library


def hidden_bytes_library():
    """Byte level, behind a decoder that does not say so."""
    library = byte_level_library()
    library.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return library


def word_piece_library():
    """As BERT: a decoder whose every token depends on its place, and that knows no bytes."""
    library = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.decoder = decoders.WordPiece()
    library.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]"], show_progress=False),
    )
    return library


FAMILIES = {
    "byte_level": byte_level_library,
    "byte_fallback": byte_fallback_library,
    "hidden_bytes": hidden_bytes_library,
    "word_piece": word_piece_library,
}


def write_model(directory, library, **files):
    """A model directory; `files` are the contents of NAME.json."""
    directory.mkdir(exist_ok=True)
    if library is not None:
        library.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.fixture(scope="session")
def tokenizer_of(tmp_path_factory):
    """Loads the tokenizer of a family by name."""

    @functools.cache
    def load(family):
        return load_tokenizer(write_model(tmp_path_factory.mktemp(family), FAMILIES[family]()))

    return load


@pytest.fixture
def write(tmp_path):
    """Writes a model directory of a family ("" for none) under the test's own path."""

    def write_family(family="byte_level", **files):
        library = FAMILIES[family]() if family else None
        return write_model(tmp_path / "model", library, **files)

    return write_family
