"""The adapter's end of the pipe: JSON lines in, JSON lines out. Needs only Python.

The first line it writes is `{"ready": {...}}`, or `{"missing": why}` where its library is not
installed. It then answers each of

    {"decode": [batch, context, steps]}
    {"prefill": [tokens]}

with `{"seconds": ..., "note": ...}`, or `{"error": why}`, until its input ends.

decode: `batch` sequences have `context` tokens each in the KV cache, all of them different; the
clock runs over `steps` steps that sample a token greedily for each. prefill: one prompt that is in
no cache, from its submission to its first token. Nothing is turned into text.
"""

from __future__ import annotations

import abc
import itertools
import json
import os
import random
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.child import messages

_FIRST_ID = 10  # of prompts: below lie what tokenizers keep for themselves
Timed = tuple[float, str]  # seconds, and how it was done where there was a choice


@dataclass(frozen=True)
class Setup:
    """What an adapter loads, and how large its cache must be. Sizes are tokens."""

    directory: str
    vocab: int
    threads: int
    cpus: Sequence[int]
    max_batch: int
    max_context: int  # of a decoding sequence, its steps included
    max_prefill: int
    options: dict[str, Any] = field(default_factory=dict)

    def prompt(self, length: int, seed: int) -> list[int]:
        """Random token ids, the same for the same seed."""
        # Seeded with a text: integers of different lengths may give equal sequences.
        rng = random.Random(str(seed))
        return [rng.randrange(_FIRST_ID, self.vocab) for _ in range(length)]


class Adapter(abc.ABC):
    """One engine with the model in memory. `decode` and `prefill`: see the head of this module."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._seeds = itertools.count(1 << 32)

    def new_prompt(self, tokens: int) -> list[int]:
        """One that is in no cache."""
        return self.setup.prompt(tokens, next(self._seeds))

    @abc.abstractmethod
    def about(self) -> dict[str, str]:
        """Its version and the settings that matter."""

    @abc.abstractmethod
    def decode(self, batch: int, context: int, steps: int) -> Timed: ...

    @abc.abstractmethod
    def prefill(self, tokens: int) -> Timed: ...


def main(load: Callable[[Setup], Adapter]) -> None:
    """Loads the engine for the setup on the command line and answers until the input ends."""
    setup, write = Setup(**json.loads(sys.argv[1])), messages()
    os.sched_setaffinity(0, setup.cpus)
    try:
        adapter = load(setup)
        write({"ready": adapter.about()})
    except ImportError as error:
        write({"missing": str(error)})
        return
    except Exception as error:
        write(_failure(error))
        return
    for line in sys.stdin:
        ((kind, sizes),) = json.loads(line).items()
        try:
            seconds, note = (adapter.decode if kind == "decode" else adapter.prefill)(*sizes)
            write({"seconds": seconds, "note": note})
        except Exception as error:
            write(_failure(error))


def _failure(error: Exception) -> dict[str, Any]:
    traceback.print_exc()
    return {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
