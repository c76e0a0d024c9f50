"""How families of models delimit reasoning: by two tokens, or by texts."""

from __future__ import annotations

from dataclasses import dataclass

from baton.text.tool_parsers.parser import Steps, ToolParser


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers of a family.

    `always`: outputs begin with reasoning whatever the prompt ends with. `is_text`: the markers are
    texts, which are found in the detokenized output; else each is a token. `answer`: texts around
    the answer behind the reasoning. `models`: for documentation. `templates`: texts of the chat
    templates it belongs to; by default its end.
    """

    begin: str
    end: str
    always: bool = False
    is_text: bool = False
    answer: tuple[str, str] | None = None
    models: str = ""
    templates: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end, *(self.answer or ()))

    def belongs_to(self, template: str) -> bool:
        return all(text in template for text in self.templates or (self.end,))


_THINK = ("<think>", "</think>")
# A template belongs to the first format of which it has the texts.
REASONING_FORMATS = {
    "apriel": ReasoningFormat(
        "Here are my reasoning steps:",
        "[BEGIN FINAL RESPONSE]",
        is_text=True,
        answer=("", "[END FINAL RESPONSE]"),
        models="Apriel",
    ),
    "granite": ReasoningFormat(
        "Here is my thought process:",
        "Here is my response:",
        is_text=True,
        models="Granite 3.2",
    ),
    "hunyuan_a13b": ReasoningFormat(
        *_THINK,
        is_text=True,
        answer=("<answer>", "</answer>"),
        models="Hunyuan-A13B",
        templates=("</think>", "<answer>"),
    ),
    "ernie45": ReasoningFormat(
        *_THINK,
        is_text=True,
        answer=("<response>", "</response>"),
        models="ERNIE 4.5 Thinking, Granite 3.3",
        templates=("</think>", "<response>"),
    ),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>", is_text=True, models="Gemma 4"),
    "qwen3": ReasoningFormat(
        *_THINK,
        models="Qwen3, DeepSeek, GLM, Kimi, MiniMax, Nemotron, Phi-4-reasoning, LFM2.5, Step",
    ),
    # Older templates do not open it, and models omit the first token.
    "deepseek_r1": ReasoningFormat(
        *_THINK, always=True, models="DeepSeek R1: every output begins with reasoning"
    ),
    "olmo3": ReasoningFormat(
        *_THINK, is_text=True, models="Olmo 3, and others whose markers are not tokens"
    ),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", models="Magistral, Ministral 3"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>", models="Seed-OSS"),
}


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """The format of that name; for "auto", the one of the chat template."""
    if name != "auto":
        return REASONING_FORMATS.get(name)
    return next((one for one in REASONING_FORMATS.values() if one.belongs_to(template)), None)


class TextReasoning:
    """Splits an output, in pieces, into reasoning between texts and the answer behind it.

    Results do not depend on how the text is cut. White space around reasoning is dropped.
    """

    def __init__(self, form: ReasoningFormat) -> None:
        self._form = form
        self._parser = ToolParser(self._steps, {}, str)
        self._space: str | None = None  # trailing white space of reasoning; None before its text
        self._has_answer = False
        self.has_reasoning = False  # whether the output began with reasoning
        self.is_open = True  # whether the text so far may be reasoning

    def push(self, text: str, *, last: bool = False, cut: bool = False) -> tuple[str, str]:
        """Adds text; returns the reasoning and the answer that are certain, all if `last`.

        If the output is `cut` there, a possible beginning of a marker is dropped.
        """
        answer, _, reasoning = self._parser.push(text, last=last, cut=cut)
        if self._space is not None or (reasoning := reasoning.lstrip()):
            reasoning = (self._space or "") + reasoning
            shown = reasoning.rstrip()
            self._space, reasoning = reasoning[len(shown) :], shown
        if self.has_reasoning and not self._has_answer:
            answer = answer.lstrip()
        self._has_answer = self._has_answer or bool(answer)
        return reasoning, answer

    def _steps(self, parser: ToolParser) -> Steps:
        form = self._form
        opened = yield from parser.goes_on_with(form.begin)
        if opened or form.always:
            self.has_reasoning = True
            yield from parser.text_until((form.end,), parser.think)
        self.is_open = False
        if form.answer:
            before, behind = form.answer
            if before:
                yield from parser.goes_on_with(before)
            yield from parser.text_until((behind,), parser.put, markers_are_rare=True)
            yield from parser.stop()
        while True:
            parser.put(parser.take_all())
            yield
