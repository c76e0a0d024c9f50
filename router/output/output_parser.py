"""Splits one request's output into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.generation.sampling_params import ReasoningTracker
from baton.generation.tool_call import ToolCallDelta
from baton.text import Detokenizer
from baton.text.reasoning import TextReasoning
from router.request import OutputFormat


class ParsedOutput(NamedTuple):
    """The parts of an output, or of a piece of it, that are not content."""

    reasoning: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()


class OutputParser:
    """Splits an output into reasoning, content and tool calls; a function of its tokens.

    White space around reasoning belongs to the model's format and is dropped.
    """

    def __init__(self, output: OutputFormat, implied_end: int | None) -> None:
        self.tracker = ReasoningTracker(output.reasoning) if output.reasoning else None
        self._begin = output.reasoning.begin_token_id if output.reasoning else -1
        self.tools = (
            output.tools.parser(output.tool_schemas, single=output.single_tool_call)
            if output.tools
            else None
        )
        self._end = output.reasoning.end_token_id if output.reasoning else -1
        self._implied_end = implied_end
        self.splitter = TextReasoning(output.text_reasoning) if output.text_reasoning else None
        self._reasoning = ""  # text of the last tokens
        self._space: str | None = None  # trailing white space, not sent yet; None before reasoning
        self._behind_reasoning = False

    @property
    def calls_tools(self) -> bool:
        """Whether there are calls, and the output does not end within the last one."""
        return self.tools is not None and self.tools.num_calls > 0 and not self.tools.call_is_cut

    def push_reasoning(
        self, token_ids: Sequence[int], detokenizer: Detokenizer, *, last: bool
    ) -> int:
        """Returns how many of the next tokens are reasoning; `parse` returns their text."""
        self._reasoning = ""
        tracker = self.tracker
        if tracker is None:
            return 0
        was_inside, count = tracker.inside, tracker.take(token_ids, self._implied_end)
        ends = bool(was_inside or count) and not tracker.inside
        if not (count or ends or (last and tracker.inside)):
            return 0
        tokens = [one for one in token_ids[:count] if one not in (self._begin, self._end)]
        text = detokenizer.push(tokens)
        if ends or last:
            text += detokenizer.flush()
        self._behind_reasoning = ends
        if self._space is not None or (text := text.lstrip()):
            text = (self._space or "") + text
            self._reasoning = text.rstrip()
            self._space = text[len(self._reasoning) :]
        return count

    def split(self, text: str, *, last: bool = False, cut: bool = False) -> str:
        """The content of text with reasoning between texts; `parse` returns the reasoning."""
        if self.splitter is None:
            return text
        reasoning, content = self.splitter.push(text, last=last, cut=cut)
        self._reasoning += reasoning
        return content

    def parse(self, text: str, *, last: bool, cut: bool) -> tuple[str, ParsedOutput]:
        """Content, and the other parts; see `ToolParser.push`."""
        if self._behind_reasoning and (text := text.lstrip()):
            self._behind_reasoning = False
        calls: Sequence[ToolCallDelta] = ()
        if self.tools is not None:
            text, calls, _ = self.tools.push(text, last=last, cut=cut)
        return text, ParsedOutput(self._reasoning, calls)
