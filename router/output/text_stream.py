"""Turns one request's tokens into text: detokenizing, stop strings, reasoning and tool calls.

It belongs to the request and not to an attempt, so a worker's failure never loses part of a
character or of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.text import Detokenizer, StopStrings, Tokenizer
from baton.text.tool_parsers import ParsedText, ToolParser
from baton.text.tool_parsers.harmony import MESSAGE
from router.output.output_parser import OutputParser, ParsedOutput
from router.request import TokenizedRequest


class TextStream:
    """Turns one request's tokens, in order, into text; `stop` is set once a stop string was met.

    The text is content. The other parts, if the request has an output format, are in `parsed`;
    stop strings are not searched for in reasoning.
    """

    def __init__(self, tokenizer: Tokenizer, request: TokenizedRequest) -> None:
        output = request.output_format
        pieces = output.pieces if output else tokenizer.pieces
        if request.show_special_tokens:
            pieces = pieces.showing_all
        self._detokenizer = Detokenizer(pieces, request.prompt)
        self._stops = StopStrings(request.stop, request.include_stop)
        self._singly = bool(request.stop)
        # Workers that limit reasoning, or apply a grammar behind it, know its own end only.
        implied_end = output.implied_end if output and not request.params.reasoning else None
        self._parser = OutputParser(output, implied_end) if output else None
        # With channels: their parser, whether the next token is of a header, and reasoning tokens.
        has_channels = output is not None and output.has_channels
        self._channels = self._parser.tools if self._parser and has_channels else None
        self._in_header = False
        self._num_reasoning = 0
        self.stop: str | None = None
        self.parsed: ParsedOutput | None = None  # of the last tokens; None without a format
        if request.resumed:
            self.advance(request.resumed, None)  # the interrupted stream has sent their text

    @property
    def calls_tools(self) -> bool:
        return self._parser is not None and self._parser.calls_tools

    @property
    def reasoning_tokens(self) -> int:
        if self._parser is None:
            return 0
        splitter, tracker = self._parser.splitter, self._parser.tracker
        if splitter is not None:
            return self._num_reasoning if splitter.has_reasoning else 0
        return tracker.num_tokens if tracker else self._num_reasoning

    def advance(self, token_ids: Sequence[int], finish_reason: str | None) -> tuple[str, int]:
        """Content that is final with these tokens, and how many tokens precede a stop string's end.

        With a `finish_reason` they are the last tokens, and all remaining content is returned. A
        token that ended the sequence by itself ("stop") has no text.
        """
        parser = self._parser
        if parser is None:
            return self._content(token_ids, finish_reason)
        if self._channels is not None:
            return self._of_channels(self._channels, token_ids, finish_reason)
        shown = token_ids[:-1] if finish_reason == "stop" else token_ids
        count = parser.push_reasoning(shown, self._detokenizer, last=finish_reason is not None)
        text, num_content = self._content(token_ids[count:], finish_reason)
        cut = finish_reason == "length" or self.stop is not None
        text, self.parsed = parser.parse(text, last=cut or finish_reason is not None, cut=cut)
        return text, count + num_content

    def _of_channels(
        self, parser: ToolParser, token_ids: Sequence[int], finish_reason: str | None
    ) -> tuple[str, int]:
        """As `advance`, for a format with channels; stop strings are searched for in content."""
        text, parts, count = "", list[ParsedText](), 0
        shown = token_ids[:-1] if finish_reason == "stop" else token_ids
        for token in shown:
            text = self._detokenizer.push([token])
            if is_marker := text.endswith(parser.markers):
                self._in_header = not text.endswith(MESSAGE)
                text = self._stops.flush() + text
            elif not self._in_header and parser.part == "content":
                text, self.stop = self._stops.push(text)
            count += 1
            parts.append(parser.push(text, cut=self.stop is not None, last=self.stop is not None))
            self._num_reasoning += parser.part == "reasoning" and not (is_marker or self._in_header)
            if self.stop is not None:
                break
        else:
            count = len(token_ids)
            if finish_reason is not None:
                rest = self._detokenizer.flush()
                if parser.part == "content" and not self._in_header:
                    rest, self.stop = self._stops.push(rest)
                rest += "" if self.stop is not None else self._stops.flush()
                cut = finish_reason == "length" or self.stop is not None
                parts.append(parser.push(rest, last=True, cut=cut))
        reasoning = "".join(part.reasoning for part in parts)
        calls = [call for part in parts for call in part.tool_calls]
        self.parsed = ParsedOutput(reasoning, calls)
        return "".join(part.content for part in parts), count

    def _content(self, token_ids: Sequence[int], finish_reason: str | None) -> tuple[str, int]:
        if finish_reason is None and not self._singly:
            return self._text(token_ids), len(token_ids)
        shown = token_ids[:-1] if finish_reason == "stop" else token_ids
        text, count = "", 0
        for tokens in ([token] for token in shown) if self._singly else (shown,):
            final, self.stop = self._stops.push(self._text(tokens))
            text, count = text + final, count + len(tokens)
            if self.stop is not None:
                return text, count
        if finish_reason is not None:
            rest = self._detokenizer.flush()
            if self._parser is not None:
                rest = self._parser.split(rest, last=True, cut=finish_reason == "length")
            rest, self.stop = self._stops.push(rest)
            text += rest + ("" if self.stop is not None else self._stops.flush())
        return text, len(token_ids)

    def _text(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without reasoning between texts."""
        parser = self._parser
        if parser is None or parser.splitter is None:
            return self._detokenizer.push(token_ids)
        text = ""
        for token in token_ids:
            self._num_reasoning += parser.splitter.is_open
            text += parser.split(self._detokenizer.push([token]))
        return text
