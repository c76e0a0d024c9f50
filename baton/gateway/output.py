"""The output of one choice: sent in chunks, or collected for a whole answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import NoneType
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from baton.client.results import transport_name
from baton.gateway import answers, sse
from baton.generation.enum_names import FINISH_REASONS
from baton.generation.tool_call import ToolCallDelta
from baton.text import Tokenizer
from baton.v1 import common_pb2, inference_pb2
from router.output.output_parser import ParsedOutput
from router.output.sink import Piece

MIN_LOGPROB = -9999.0  # JSON has no infinity
Position = tuple[int, float, int, list[tuple[int, float]]]
_STOPPED = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_TOOL_CALLS
_encode = msgspec.json.Encoder().encode
_PHASES = ("queue_ms", "ttft_ms", "transfer_ms", "tpot_ms", "e2e_ms")


@dataclass
class PromptOutput:
    """One prompt, shared by its choices; the first choice receives the log-probabilities."""

    echo: str = ""  # text that each output begins with
    echoed_top: int | None = (
        None  # alternatives of the echoed prompt in `logprobs`; None: not echoed
    )
    top: int | None = None  # alternatives in the member `prompt_logprobs`; None: no member
    logprobs: common_pb2.PromptLogprobs | None = None

    @property
    def size(self) -> int:
        """Number of log-probabilities, alternatives included."""
        found = self.logprobs
        return 0 if found is None else len(found.logprobs) + len(found.top_ids)

    def member(self, show: Callable[[int], str]) -> answers.PromptLogprobs | UnsetType:
        """The member `prompt_logprobs`, as in vLLM; `show` returns a token's text."""
        if self.top is None:
            return UNSET
        entries: answers.PromptLogprobs = [None]  # the first token has none
        for token_id, logprob, rank, top in self.positions(self.top):
            tokens = {other: (value, at) for at, (other, value) in enumerate(top, 1)}
            tokens.setdefault(token_id, (logprob, rank))
            entries.append(
                {
                    str(other): answers.PromptToken(max(value, MIN_LOGPROB), at, show(other))
                    for other, (value, at) in tokens.items()
                }
            )
        return entries

    def positions(self, top: int) -> Iterator[Position]:
        """Id, log-probability, rank and likeliest alternatives of each token but the first."""
        found = self.logprobs
        assert found is not None, "log-probabilities arrive before any output"
        width = len(found.top_ids) // max(1, len(found.logprobs))
        likeliest = list(zip(found.top_ids, found.top_logprobs, strict=True))
        rows = zip(found.token_ids[1:], found.logprobs, found.ranks, strict=True)
        for first, row in enumerate(rows):
            yield *row, likeliest[first * width : first * width + min(top, width)]


@dataclass(eq=False)
class ChoiceOutput(ABC):
    """The sink of one choice. Subclasses write it as a completion's or a chat's."""

    id_prefix: ClassVar[str]
    answer: ClassVar[type[answers.Completion] | type[answers.ChatCompletion]]
    chunk_object: ClassVar[Any]

    index: int
    tokenizer: Tokenizer
    _: KW_ONLY
    with_logprobs: bool
    with_token_ids: bool
    with_reasoning: bool = True
    with_usage: bool = False  # in each chunk, of the output so far
    as_token_ids: bool = False  # show tokens of log-probabilities as ids
    prompt_output: PromptOutput = field(default_factory=PromptOutput)
    stop_token_ids: Collection[int] = ()
    custom_tools: Collection[str] = ()  # names of the tools whose calls have a text as input
    on_prompt: Callable[[int], None] = lambda size: None  # receives the number of log-probabilities
    start: Callable[[inference_pb2.Started], None] = lambda started: None
    event: Callable[[Any], bytes] = msgspec.json.encode  # encodes the event of a choice
    send: Callable[[bytes], None] | None = (
        None  # sends an event; None: output is collected for `whole`
    )

    def __post_init__(self) -> None:
        # What stands before and after the text in events that have nothing else.
        self._text_template: tuple[bytes, bytes] | None = None
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self.num_tokens = 0
        self._positions: list[common_pb2.PositionLogprobs] = []
        self._parsed: list[ParsedOutput] = []
        self._begun = False
        self.end = inference_pb2.Finish()

    def prompt(self, logprobs: common_pb2.PromptLogprobs) -> None:
        self.prompt_output.logprobs = logprobs
        self.on_prompt(self.prompt_output.size)

    def put(self, piece: Piece) -> None:
        text, token_ids, logprobs, reason, stop, parsed = piece
        self.num_tokens += len(token_ids)
        if parsed is not None and not self.with_reasoning:
            parsed = parsed._replace(reasoning="")
        if self.send is None:
            self._text.append(text)
            self._token_ids.extend(token_ids)
            self._positions.extend(logprobs)
            if parsed is not None:
                self._parsed.append(parsed)
            return
        has_parsed = parsed is not None and any(parsed)
        if self._text_template is not None and not (reason or has_parsed):
            if text or parsed is None:
                before, after = self._text_template
                self.send(before + sse.one_line(_encode(text)) + after)
            return
        if not has_parsed:
            parsed = None
        elif parsed is not None and len(parsed.tool_calls) > 1:
            # One chunk for each call: some clients read only a chunk's first one.
            for call in parsed.tool_calls[:-1]:
                one = ParsedOutput(parsed.reasoning, (call,))
                self.put(Piece(text, parsed=one))
                text, parsed = "", ParsedOutput("", parsed.tool_calls[-1:])
        members = self._members(logprobs, list(token_ids), reason)
        if not self._begun:
            text = self.prompt_output.echo + text
        if reason:
            members["stop_reason"] = self._stop_reason(reason, stop, token_ids)
        self.send(self.event(self._chunk(text, parsed, **members)))
        if not self._begun:
            self._begun = True
            if not (reason or self.with_logprobs or self.with_token_ids or self.with_usage):
                before, after = self.event(self._chunk("", None, **members)).split(b':""')
                self._text_template = before + b":", after

    async def finish(self, finish: inference_pb2.Finish) -> None:
        self.end = finish

    def whole(self) -> Any:
        """Builds the choice of a whole answer."""
        text, reason = self.prompt_output.echo + "".join(self._text), self.end.reason
        members = self._members(self._positions, self._token_ids, reason)
        stop_reason = self._stop_reason(reason, self.end.stop, self._token_ids)
        reasoning = "".join(parsed.reasoning for parsed in self._parsed)
        calls = [call for parsed in self._parsed for call in parsed.tool_calls]
        parsed = ParsedOutput(reasoning, calls)
        return self._whole(text, parsed, stop_reason=stop_reason, **members)

    @property
    def cumulative_logprob(self) -> float:
        """The sum over all tokens; needs log-probabilities."""
        return sum(position.chosen.logprob for position in self._positions)

    def prompt_logprobs(self) -> answers.PromptLogprobs | UnsetType:
        """The member `prompt_logprobs`, if requested."""
        return self.prompt_output.member(lambda token_id: self.token_text(token_id)[0])

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """A token's text and bytes."""
        text, piece = token_text(self.tokenizer, token_id)
        return f"token_id:{token_id}" if self.as_token_ids else text, piece

    @classmethod
    def answer_members(cls, outputs: Sequence[ChoiceOutput]) -> dict[str, Any]:
        """Members of a whole answer in addition to choices and usage."""
        return {}

    def _stop_reason(self, reason: int, stop: str, token_ids: Sequence[int]) -> str | int | None:
        """The stop string or stop token that ended the output, as in vLLM."""
        if reason not in _STOPPED or stop or not token_ids:
            return stop or None
        return token_ids[-1] if token_ids[-1] in self.stop_token_ids else None

    def _members(
        self, positions: Sequence[common_pb2.PositionLogprobs], token_ids: list[int], reason: int
    ) -> dict[str, Any]:
        """Members that completions and chats share."""
        return {
            "index": self.index,
            "logprobs": self.logprobs(positions) if self.with_logprobs else None,
            "finish_reason": FINISH_REASONS[reason],
            "token_ids": token_ids if self.with_token_ids else UNSET,
        }

    @abstractmethod
    def logprobs(self, positions: Sequence[common_pb2.PositionLogprobs]) -> Any:
        """Formats log-probabilities of the next positions of the output."""

    @abstractmethod
    def _chunk(self, text: str, parsed: ParsedOutput | None, **members: Any) -> Any:
        """Builds the choice of a chunk."""

    @abstractmethod
    def _whole(self, text: str, parsed: ParsedOutput, **members: Any) -> Any:
        """Builds the choice of a whole answer from all of its text."""


class ItemSink(ABC):
    """The sink that splits one output into items: reasoning, text and calls.

    An item ends where the next one begins. Subclasses create items and write their events.
    """

    reasoning_type: ClassVar[type]
    text_type: ClassVar[type]

    def __init__(self, on_start: Callable[[inference_pb2.Started], None]) -> None:
        self._on_start = on_start
        self.request_id = ""
        self.items: list[Any] = []
        self.end = inference_pb2.Finish()
        self._open: Any = None  # the last item, until it is complete
        self._pieces: list[str] = []  # text of the open item

    def start(self, started: inference_pb2.Started) -> None:
        self.request_id = started.request_id
        self._on_start(started)

    def prompt(self, logprobs: common_pb2.PromptLogprobs) -> None:
        raise AssertionError("these APIs have no log-probabilities of prompts")

    def put(self, piece: Piece) -> None:
        reasoning, calls = piece.parsed or ParsedOutput()
        if reasoning:
            self._add(self.reasoning_type, reasoning)
        if calls and not calls[0].id:  # continues the open call, which text would end
            self._extend(calls[0].arguments)
            calls = calls[1:]
        if piece.text:
            self._add(self.text_type, piece.text)
        for call in calls:
            if call.id:
                self._begin(self.new_call(call))
            if call.arguments:
                self._extend(call.arguments)
        if reason := piece.finish_reason:
            # Behind a call, a stop that is no end of calls is a stop string within it.
            is_call = not isinstance(self._open, NoneType | self.reasoning_type | self.text_type)
            cut_in_call = is_call and reason == common_pb2.FINISH_REASON_STOP
            self._finish(cut=reason == common_pb2.FINISH_REASON_LENGTH or cut_in_call)

    async def finish(self, finish: inference_pb2.Finish) -> None:
        self.end = finish

    @abstractmethod
    def new_item(self, kind: type) -> Any:
        """Creates an item of reasoning or text."""

    @abstractmethod
    def new_call(self, call: ToolCallDelta) -> Any:
        """Creates an item of a call."""

    @abstractmethod
    def on_begin(self, item: Any) -> None:
        """Called when an item, the last of `items`, begins."""

    @abstractmethod
    def on_text(self, item: Any, text: str) -> None:
        """Called with the next text of the item."""

    @abstractmethod
    def on_end(self, item: Any, text: str, *, cut: bool) -> None:
        """Called with the whole text of an item that is complete, or was `cut`."""

    def _finish(self, *, cut: bool) -> None:
        self._close(cut=cut)

    def _add(self, kind: type, text: str) -> None:
        if not isinstance(self._open, kind):
            self._begin(self.new_item(kind))
        self._extend(text)

    def _begin(self, item: Any) -> None:
        self._close()
        self._open = item
        self.items.append(item)
        self.on_begin(item)

    def _extend(self, text: str) -> None:
        self._pieces.append(text)
        self.on_text(self._open, text)

    def _close(self, *, cut: bool = False) -> None:
        item, text = self._open, "".join(self._pieces)
        self._open, self._pieces = None, []
        if item is not None:
            self.on_end(item, text, cut=cut)


def usage_of(
    ends: Sequence[inference_pb2.Finish], n: int, *, with_routes: bool
) -> answers.CompletionUsage:
    """The usage of a request: each prompt once, the output of every choice."""
    usages = [end.usage for end in ends]
    prompt = sum(usage.prompt_tokens for usage in usages[::n])
    output = sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages[::n])
    details = answers.PromptTokensDetails(cached)
    reasoning = sum(usage.reasoning_tokens for usage in usages)
    reasoned = answers.CompletionTokensDetails(reasoning) if reasoning else UNSET
    served = [_served_by(end) for end in ends] if with_routes else UNSET
    return answers.CompletionUsage(prompt, output, prompt + output, details, reasoned, served)


def _served_by(finish: inference_pb2.Finish) -> answers.ServedBy:
    route, timing = finish.route, finish.timing
    return answers.ServedBy(
        prefill=route.prefill or None,
        decode=route.decode or None,
        transport=transport_name(route.transport),
        attempts=route.attempts,
        transfer_bytes=timing.transfer_bytes,
        cached_tokens=finish.usage.cached_tokens,
        **{name: round(getattr(timing, name), 3) for name in _PHASES},
    )


def token_text(tokenizer: Tokenizer, token_id: int) -> tuple[str, bytes]:
    """A token's text and bytes.

    Bytes that are not a whole character are shown as "bytes:\\x..", tokens without a text as ids.
    """
    if not tokenizer.has_text:
        return f"token_id:{token_id}", b""
    text, piece = tokenizer.pieces.shown(token_id)
    if "\ufffd" in text:
        text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
    return text, piece
