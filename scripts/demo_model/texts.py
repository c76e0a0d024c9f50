"""The corpus as token streams, and the windows each training step reads from them."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
from corpus import SourceFile
from tokenizer import BOS_ID, EOS_ID, token_sizes
from tokenizers import Tokenizer

Tokens = npt.NDArray[np.int64]


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
        self.token_sizes: Tokens = np.array(token_sizes(tokenizer), dtype=np.int64)


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
