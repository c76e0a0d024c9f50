"""Makes the demo model's tokenizer: byte-fallback BPE, fitted to Python's layout.

A newline and the indentation after it are separate tokens on purpose. Joined, they would be
shorter, but a prompt that ends in a newline would then ask the model for an unindented line.
"""

import json
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 0, 1
# The special tokens and one token for each byte come before what is learned.
_RESERVED = 2 + 256
# Runs of newlines; indentation; a word with its leading space; one digit; punctuation.
_PIECES = r"\n+| {2,}|\t+| ?_*[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+| "
_ALPHABET = [*map(chr, range(32, 127)), "\n", "\t"]


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


def token_sizes(tokenizer: Tokenizer) -> list[int]:
    """Returns how many bytes of text each token stands for; a special token stands for none."""
    vocab = tokenizer.get_vocab()
    learned = sorted(vocab, key=vocab.__getitem__)[_RESERVED:]
    return [0, 0, *([1] * 256), *(len(token.encode()) for token in learned)]
