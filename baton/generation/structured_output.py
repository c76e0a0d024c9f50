"""Structured output: masks of the tokens that may come next, by llguidance. Torch-free.

A router compiles a grammar to refuse what cannot be compiled, a worker to mask logits; both in a
thread, within `LIMITS` of work and memory, because callers are not trusted. A matcher's state is a
function of the output's tokens, so it is never transferred.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer, grammar_from

from baton.checkpoint_files import MAX_TOKENIZER_BYTES, read_bytes
from baton.errors import BatonError, InvalidRequest, Overloaded
from baton.generation.json_schema import JSON_OPTIONS, LIMITS, parts, prepare_schema
from baton.generation.sampling_params import Reasoning, ReasoningTracker, StructuredOutput
from baton.gguf.reader import SUFFIX
from baton.gguf.tokenizer import tokenizer_json

T = TypeVar("T")
Words = npt.NDArray[np.int32]  # of a mask: token t is bit t % 32 of word t // 32

FIELD = "sampling.structured_output"
MAX_CHECKED = 256  # grammars that a router remembers as valid
MAX_WAITING = 64  # grammars waiting to be compiled
# llguidance recurses through chains of references, and a request holds thousands. Overflow of a
# thread's stack would end the process. Unused stack takes no memory.
_STACK_BYTES = 256 << 20
_PLACE_S = 0.25  # longest search for the place of a schema's error
_MAX_REASON_CHARS = 300
_REGEX_ERROR = re.compile(r"regex parse error:\n    .*\n    ( *)\^+\nerror: (.*)")
_LARK_ERROR = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)")
_TOO_COMPLEX = re.compile(r"too (many|big|large)|fuel|max is|precomputation", re.IGNORECASE)


class GrammarMatcher:
    """Follows the growing output of one sequence. For one thread at a time.

    The grammar applies behind the reasoning, which is free text, except that end-of-sequence cannot
    end it, and that it must end at its limit.
    """

    def __init__(
        self,
        matcher: LLMatcher | None,
        eos_token_ids: Collection[int],
        prompt_tokens: int,
        reasoning: Reasoning | None = None,
    ) -> None:
        """Without `matcher` only the length of reasoning is limited."""
        self._matcher = matcher
        self._eos_token_ids = frozenset(eos_token_ids)
        self._prompt_tokens = self._known = prompt_tokens
        self._reasoning = reasoning
        self._tracker = ReasoningTracker(reasoning) if reasoning else None
        # Why no token may follow: the output left the grammar, or reached a limit.
        self.failure = ""

    def advance(self, token_ids: Sequence[int], end: int) -> None:
        """Advances to the first `end` tokens of prompt and output."""
        if end == self._known:
            return
        new = list(token_ids[self._known : end])
        self._known = end
        if self._tracker:
            new = new[self._tracker.take(new) :]
        if new and self._matcher and not self.failure and not self._matcher.consume_tokens(new):
            self._fail(self._matcher)

    def fill(self, words: Words, guesses: Sequence[int] = ()) -> None:
        """Writes masks of the tokens that may follow the output, and each of `guesses`.

        Masks allow all tokens after a failure or a wrong guess, where samples are not used.
        """
        taken = self.accepts(guesses) if guesses else 0
        if self.failure or taken < len(guesses):
            words.fill(-1)
            return
        tracker, guessed = copy(self._tracker), list(guesses)
        if tracker:
            guessed = guessed[tracker.take(guessed) :]
            if tracker.inside:
                self._fill_reasoning(words, must_end=tracker.must_end)
                return
        if self._matcher is None:
            words.fill(-1)
            return
        matcher = self._matcher
        if guessed:  # in a copy: after computing a mask, llguidance's rollback corrupts later masks
            matcher = matcher.deep_copy()
            matcher.consume_tokens(guessed)
        # A tokenizer may have more tokens than the model has logits.
        words[:] = np.frombuffer(matcher.compute_bitmask(), np.int32)[: len(words)]
        if matcher.is_error():
            self._fail(matcher)
            words.fill(-1)
            return
        if tracker and tracker.may_begin and self._reasoning:
            _set_bit(words, self._reasoning.begin_token_id, True)

    def accepts(self, guesses: Sequence[int]) -> int:
        """Number of `guesses` that may follow the output, up to an end-of-sequence."""
        ends = (at for at, token in enumerate(guesses) if token in self._eos_token_ids)
        count = next(ends, len(guesses))
        if self.failure:
            return 0
        tracker, reasoned = copy(self._tracker), 0
        while tracker and reasoned < count and (tracker.inside or tracker.may_begin):
            must_end, token = tracker.must_end, guesses[reasoned]
            if not tracker.take([token]):
                break
            if must_end and tracker.inside:
                return reasoned
            reasoned += 1
        if self._matcher is None or reasoned == count:
            return count
        try:
            return reasoned + self._matcher.validate_tokens(list(guesses[reasoned:count]))
        except ValueError:  # a limit, which `fill` reports
            return reasoned

    def _fill_reasoning(self, words: Words, *, must_end: bool) -> None:
        assert self._reasoning is not None
        words.fill(0 if must_end else -1)
        _set_bit(words, self._reasoning.end_token_id, True)
        if self._matcher:
            for token in self._eos_token_ids:
                _set_bit(words, token, False)

    def _fail(self, matcher: LLMatcher) -> None:
        reason = _reason(matcher.get_error())
        output = self._known - self._prompt_tokens
        self.failure = f"structured output: behind {output} tokens of output: {reason}"


def _set_bit(words: Words, token: int, value: bool) -> None:
    bits, bit = words.view(np.uint32), np.uint32(1 << token % 32)
    bits[token // 32] = bits[token // 32] | bit if value else bits[token // 32] & ~bit


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary. Event-loop thread only.

    Each output has its own compiled matcher: copies would share the limit of lexer states, and an
    output would depend on others.
    """

    def __init__(self, path: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """`path`: the model's directory or GGUF file, which is read at the first use."""
        is_gguf = path.suffix == SUFFIX
        self._tokenizer_file = path if is_gguf else path / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._waiting: set[Future[Any]] = set()
        self._checked = lru_cache(MAX_CHECKED)(self._check)

    def compile(
        self,
        output: StructuredOutput | None,
        token_ids: Sequence[int],
        prompt_tokens: int,
        reasoning: Reasoning | None = None,
    ) -> Future[GrammarMatcher]:
        """Compiles a matcher that has read these tokens, prompt and output.

        Raises Overloaded if too many wait. The future fails with InvalidRequest, which names the
        place of the error.
        """
        return self._submit(lambda: self._matcher(output, token_ids, prompt_tokens, reasoning))

    def check(
        self,
        output: StructuredOutput,
        delivered: Sequence[int],
        reasoning: Reasoning | None = None,
    ) -> Future[None]:
        """Checks that a grammar compiles; raises as `compile` does."""
        return self._submit(lambda: self._checked(output, tuple(delivered), reasoning))

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        if len(self._waiting) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} grammars wait to be compiled", retry_after_s=1.0)
        future = self._thread.submit(work)
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        thread = ThreadPoolExecutor(1, "grammar")
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.submit(int)  # starts the thread
        finally:
            threading.stack_size(before)
        return thread

    # In the thread.

    def _matcher(
        self,
        output: StructuredOutput | None,
        token_ids: Sequence[int],
        prompt_tokens: int,
        reasoning: Reasoning | None,
    ) -> GrammarMatcher:
        compiled = self._compile(output) if output else None
        matcher = GrammarMatcher(compiled, self._eos_token_ids, prompt_tokens, reasoning)
        matcher.advance(token_ids, len(token_ids))
        if matcher.failure:
            raise InvalidRequest(matcher.failure, "resumed_token_ids")
        return matcher

    def _check(
        self, output: StructuredOutput, delivered: tuple[int, ...], reasoning: Reasoning | None
    ) -> None:
        self._matcher(output, delivered, 0, reasoning)

    def _compile(self, output: StructuredOutput) -> LLMatcher:
        if isinstance(self._vocabulary, InvalidRequest):
            raise self._vocabulary
        try:
            grammar = _grammar(output)
        except ValueError as error:
            why = f"{_form(output)} cannot be read: {_first_line(str(error))}"
            raise InvalidRequest(why, FIELD) from error
        matcher = LLMatcher(self._vocabulary, grammar, limits=LIMITS, log_level=0)
        if not matcher.is_error():
            # The first mask takes longest; its lexer states are shared with the copy.
            first = matcher.deep_copy()
            first.compute_bitmask()
            if not first.is_error():
                return matcher
            matcher = first
        raise InvalidRequest(_explained(output, matcher.get_error()), FIELD)

    @cached_property
    def _vocabulary(self) -> LLTokenizer | InvalidRequest:
        """The bytes of all tokens, or the reason why they are unknown."""
        file, needs = self._tokenizer_file, "structured output needs"
        if not self._eos_token_ids:
            return InvalidRequest(
                f"{needs} an end-of-sequence token, and the model has none", FIELD
            )
        try:
            if file.suffix == SUFFIX:
                return self._tokenizer(tokenizer_json(file))
            text = read_bytes(file, MAX_TOKENIZER_BYTES).decode().lstrip()
            if not text.startswith("{"):  # llguidance would read it as a name or a path
                raise ValueError("it is no JSON object")
            return self._tokenizer(text)
        except FileNotFoundError:
            reason = "it has none"
        except (BatonError, ValueError) as error:
            reason = _first_line(str(error))
        return InvalidRequest(f"{needs} the model's {file.name}: {reason}", FIELD)

    def _tokenizer(self, text: str) -> LLTokenizer:
        """Raises ValueError."""
        ends, size = sorted(self._eos_token_ids), self._vocab_size
        try:
            return LLTokenizer(text, size, ends)
        except ValueError:
            larger = LLTokenizer(text, None, ends)
            # Gemma 3's text models have no logits for the special token of an image.
            if all(map(larger.is_special_token, range(size, larger.vocab_size))):
                return larger
            raise


def _grammar(output: StructuredOutput) -> str:
    """Builds llguidance's grammar. Raises InvalidRequest or ValueError."""
    if output.json_schema:
        return _schema_grammar(_schema(output.json_schema))
    if output.regex:
        return LLMatcher.grammar_from_regex(output.regex)
    if output.choice:  # one terminal, because a grammar may have only some hundred alternatives
        return LLMatcher.grammar_from_regex("|".join(map(_literal, output.choice)))
    return grammar_from("grammar", output.grammar)


def _literal(text: str) -> str:
    """A regular expression that matches the text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise InvalidRequest(f"json_schema is not JSON at {place}: {error.msg}", FIELD) from error
    except (ValueError, RecursionError) as error:  # numbers with thousands of digits
        raise InvalidRequest(f"json_schema cannot be read: {error}", FIELD) from error
    if not isinstance(schema, dict):
        raise InvalidRequest("json_schema must be a JSON object", FIELD)
    prepare_schema(schema, field=FIELD)
    return schema


def _schema_grammar(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), JSON_OPTIONS)


def _form(output: StructuredOutput) -> str:
    return next(name for name, value in vars(output).items() if value)


def _explained(output: StructuredOutput, error: str) -> str:
    """llguidance's error with the place in the schema."""
    form, reason = _form(output), _reason(error)
    if output.json_schema and not _TOO_COMPLEX.search(error):
        form += f" at {_place_of_error(_schema(output.json_schema)) or 'its root'}"
    return f"{form}: {reason}"


def _reason(error: str) -> str:
    if found := _REGEX_ERROR.search(error):
        return f"at character {len(found[1]) + 1} of the pattern: {found[2]}"
    line = _first_line(error)
    if "NoExtension" in line:
        return "nothing matches it"
    if _TOO_COMPLEX.search(line):
        return f"it is too complex, make it simpler ({line})"
    if found := _LARK_ERROR.match(line):
        return f"line {found[1]}, column {found[2]}: {found[3]}"
    return line


def _first_line(text: str) -> str:
    return text.partition("\n")[0][:_MAX_REASON_CHARS]


def _place_of_error(schema: dict[str, Any]) -> str:
    """A JSON pointer to the smallest part of a schema that does not compile by itself."""
    ends = time.monotonic() + _PLACE_S
    shared = ("$defs", "definitions")
    definitions: dict[str, Any] = {key: schema[key] for key in shared if key in schema}

    def wrong(part: Any) -> bool:
        if not isinstance(part, dict):
            return False
        grammar = _schema_grammar({**definitions, **part})
        return LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)[0]

    place, part = "", dict[str, Any](schema)
    while time.monotonic() < ends:
        found = next(((key, one) for key, one in parts(part) if wrong(one)), None)
        if found is None:
            break
        place += f"/{found[0]}"
        part = found[1]
    return place
