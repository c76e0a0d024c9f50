"""How much of JSON Schema structured output takes, and whether it keeps to what it takes.

`--suite` is a folder of the JSON Schema Test Suite, as its tests/draft2020-12, which jsonschema's
source distribution holds too. Each schema is compiled as for a request to the demo model. Those
that are accepted get every instance of the suite, token by token: one that is valid should be
accepted, one that is not has to be refused. Random outputs, walks over their masks, have to satisfy
jsonschema.
"""

from __future__ import annotations

import argparse
import decimal
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator

from baton.config import DEMO_MODEL
from baton.errors import InvalidRequest
from baton.generation.sampling_params import StructuredOutput
from baton.generation.structured_output import GrammarCompiler, GrammarMatcher
from baton.text import load_tokenizer

_CLOSING = '"]}'  # ends an output that became long, wherever it may
_LONG, _LONGEST = 60, 200  # tokens


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", type=Path, required=True, help="folder of its .json files")
    parser.add_argument("--samples", type=int, default=1000, help="random outputs: 1000")
    parser.add_argument("--seed", type=int, default=0, help="of the random outputs: 0")


class Vocabulary:
    """The demo model's tokens, and what restricts them."""

    def __init__(self) -> None:
        tokenizer = load_tokenizer(DEMO_MODEL)
        self._tokenizer, self._size = tokenizer, tokenizer.vocab_size
        (self._eos,) = tokenizer.eos_token_ids
        self._compiler = GrammarCompiler(DEMO_MODEL, self._size, {self._eos})
        self._first = [tokenizer.decode([token])[:1] for token in range(self._size)]
        self._closing = {self._eos, *(self._tokens(character)[-1] for character in _CLOSING)}

    def matcher(self, schema: Any) -> GrammarMatcher:
        """Raises InvalidRequest."""
        output = StructuredOutput(json_schema=json.dumps(schema))
        return self._compiler.compile(output, (), 0).result()

    def accepts(self, matcher: GrammarMatcher, text: str) -> bool:
        """Whether a text is a whole output."""
        tokens = self._tokens(text)
        taken = matcher.accepts(tokens) == len(tokens)
        return taken and self._eos in self._allowed(matcher, tokens)

    def sample(self, matcher: GrammarMatcher, rng: random.Random) -> str | None:
        """A random walk over the masks; None where it does not end within `_LONGEST` tokens.

        A character is chosen first, and then one of the tokens that begin with it.
        """
        tokens = list[int]()
        while len(tokens) < _LONGEST:
            choices = self._allowed(matcher)
            if len(tokens) >= _LONG:
                choices = [token for token in choices if token in self._closing] or choices
            first = rng.choice(sorted({self._first[token] for token in choices}))
            token = rng.choice([token for token in choices if self._first[token] == first])
            if token == self._eos:
                return self._tokenizer.decode(tokens)
            tokens.append(token)
            matcher.advance(tokens, len(tokens))
        return None

    def _tokens(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)[1:]  # without the start of a prompt

    def _allowed(self, matcher: GrammarMatcher, tokens: Sequence[int] = ()) -> list[int]:
        words = np.zeros(-(-self._size // 32), np.int32)
        matcher.fill(words, tokens)
        assert not matcher.failure, matcher.failure
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        return [int(token) for token in np.flatnonzero(bits)]


def main(args: argparse.Namespace) -> int:
    """1 where something was accepted that breaks its schema."""
    vocabulary, rng = Vocabulary(), random.Random(args.seed)
    accepted, refused, counts = list[Any](), Counter[str](), Counter[str]()
    files = sorted(args.suite.glob("*.json"))
    groups = [group for file in files for group in json.loads(file.read_text("utf-8"))]
    for group in groups:
        schema = group["schema"]
        try:
            matcher = vocabulary.matcher(schema)
        except InvalidRequest as error:
            refused.update(_subjects(str(error)))
            continue
        accepted.append(schema)
        for test in group["tests"]:
            text = json.dumps(test["data"], ensure_ascii=False)
            taken = vocabulary.accepts(matcher, text)
            kind = f"{'valid' if test['valid'] else 'invalid'}, {'taken' if taken else 'refused'}"
            counts[f"instances {kind}"] += 1
            if taken != test["valid"]:
                print(f"{kind}: {text} by {json.dumps(schema)}")
    for schema in itertools.islice(itertools.cycle(accepted), args.samples):
        output = vocabulary.sample(vocabulary.matcher(schema), rng)
        counts[f"random outputs {(verdict := _verdict(schema, output))}"] += 1
        if verdict == "invalid":
            print(f"random output: {output} by {json.dumps(schema)}")
    print(f"schemas: {len(accepted)} of {len(groups)} accepted")
    for count in (refused, counts):
        print("\n".join(f"{number:6} {what}" for what, number in count.most_common()))
    return int(bool(counts["instances invalid, taken"] or counts["random outputs invalid"]))


def _subjects(error: str) -> list[str]:
    """What a refusal is about: keywords, else its text without the part that varies."""
    reason = error.partition(": ")[2] or error
    if "Unimplemented keys" in reason:
        return re.findall(r'"(\$?\w+)"', reason)
    return [re.split(r"[:'/(]", reason)[0].strip()]


def _verdict(schema: Any, text: str | None) -> str:
    if text is None:
        return "without an end"
    decimal.getcontext().prec = 1000  # so that multipleOf is exact
    try:
        value = json.loads(text, parse_float=Decimal)
        exact = json.loads(json.dumps(schema), parse_float=Decimal)
        return "valid" if Draft202012Validator(exact).is_valid(value) else "invalid"
    except decimal.InvalidOperation:
        return "with numbers that are too large to judge"
