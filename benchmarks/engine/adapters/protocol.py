"""Protocol of adapters: JSON lines in and out. Needs only Python.

The first line is `{"ready": {...}}`, or `{"missing": reason}` if its library is not installed. It
then answers each of

    {"decode": [batch, context, steps]}
    {"prefill": [tokens]}

with `{"seconds": ..., "note": ...}`, or `{"error": reason}`, until its input ends.

decode: `batch` sequences have `context` different tokens each in the KV cache; measured are `steps`
steps that sample a token greedily for each. prefill: one prompt that no cache holds, measured from
its submission to its first token. Nothing is detokenized.
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

_FIRST_ID = 10  # of prompts; lower ids are special tokens
Timed = tuple[float, str]  # seconds, and the variant that was used


@dataclass(frozen=True)
class Setup:
    """The model to load, and sizes of the KV cache in tokens."""

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
        # Seeded with text, because different integers may give equal sequences.
        rng = random.Random(str(seed))
        return [rng.randrange(_FIRST_ID, self.vocab) for _ in range(length)]


class Adapter(abc.ABC):
    """An engine with the model in memory. `decode` and `prefill`: see the module's docstring."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._seeds = itertools.count(1 << 32)

    def new_prompt(self, tokens: int) -> list[int]:
        """A prompt that no cache holds."""
        return self.setup.prompt(tokens, next(self._seeds))

    @abc.abstractmethod
    def about(self) -> dict[str, str]:
        """Version and relevant settings."""

    @abc.abstractmethod
    def decode(self, batch: int, context: int, steps: int) -> Timed: ...

    @abc.abstractmethod
    def prefill(self, tokens: int) -> Timed: ...


def main(load: Callable[[Setup], Adapter]) -> None:
    """Loads the engine for the setup on the command line, and answers requests."""
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
