"""A candidate's end of the conversation: JSON lines in, JSON lines out. Needs only Python.

The first line it writes is `{"ready": {...}}`, or `{"missing": why}` where its library is not
installed. It then answers each of

    {"do": "decode", "batch": 8, "context": 512, "steps": 32}
    {"do": "prefill", "tokens": 2048}

with `{"seconds": ..., "note": ...}`, or `{"error": why}`, until its input ends.

decode: `batch` sequences have `context` tokens each in the KV cache, all of them different; the
clock runs over `steps` steps that draw a token greedily for each. prefill: one prompt that is in no
cache, from its submission to its first token. Nothing is turned into text.
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

_FIRST_ID = 10  # of prompts: below lie what tokenizers keep for themselves


@dataclass(frozen=True)
class Setup:
    """What a candidate is to load, and how large its cache must be. Sizes are tokens."""

    directory: str
    vocab: int
    threads: int
    cpus: tuple[int, ...]
    max_batch: int
    max_context: int  # of a decoding sequence, its steps included
    max_prefill: int
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: str) -> Setup:
        """As `to_json` wrote it."""
        values = json.loads(text)
        return cls(**{**values, "cpus": tuple(values["cpus"])})

    def to_json(self) -> str:
        """One argument of a command line."""
        return json.dumps({**self.__dict__, "options": dict(self.options)})

    @property
    def cache_tokens(self) -> int:
        """What the KV cache must hold: all decoding sequences and a prompt, and as much again."""
        return 2 * (self.max_batch * self.max_context + self.max_prefill)

    def prompt(self, length: int, seed: int) -> list[int]:
        """Random token ids, the same for the same seed."""
        # Of a text: numbers of different lengths may give equal sequences (1 << 32 | 2 does as 2).
        dice = random.Random(str(seed))
        return [dice.randrange(_FIRST_ID, self.vocab) for _ in range(length)]


@dataclass(frozen=True)
class Timed:
    """How long it took; `note` says how it was done where there was a choice."""

    seconds: float
    note: str = ""


class Candidate(Protocol):
    """One engine with the model in memory."""

    def about(self) -> dict[str, str]:
        """What it is: version and settings that matter."""

    def decode(self, batch: int, context: int, steps: int) -> Timed:
        """See the head of this module."""

    def prefill(self, tokens: int) -> Timed:
        """See the head of this module."""


def main(load: Callable[[Setup], Candidate]) -> None:
    """Loads the candidate that the command line asks for and answers until the input ends."""
    setup = Setup.from_json(sys.argv[1])
    os.sched_setaffinity(0, setup.cpus)
    # Libraries print: what they write must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        candidate = load(setup)
        _write(answers, {"ready": candidate.about()})
    except ImportError as error:
        _write(answers, {"missing": str(error)})
        return
    except Exception as error:
        traceback.print_exc()
        _write(answers, {"error": _told(error)})
        return
    for line in sys.stdin:
        _write(answers, answer(candidate, json.loads(line)))


def answer(candidate: Candidate, request: Mapping[str, Any]) -> dict[str, Any]:
    """Does what one line asks for."""
    try:
        if request["do"] == "decode":
            timed = candidate.decode(request["batch"], request["context"], request["steps"])
        elif request["do"] == "prefill":
            timed = candidate.prefill(request["tokens"])
        else:
            return {"error": f"unknown: {request['do']}"}
    except Exception as error:
        traceback.print_exc()
        return {"error": _told(error)}
    return {"seconds": timed.seconds, "note": timed.note}


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _write(out: TextIO, message: Mapping[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()
