"""Reasoning between texts, however an output is cut."""

import pytest

from baton.config import REASONING_PARSERS
from baton.text.reasoning import REASONING_FORMATS, TextReasoning, reasoning_format

APRIEL = "Here are my reasoning steps:"
# Outputs as the makers publish them, and their reasoning and answer.
OUTPUTS = {
    "hunyuan": (
        "hunyuan_a13b",
        "<think>\nA < b.\n</think>\n<answer>\nYes, a<b.\n\nReally.\n</answer>",
        ("A < b.", "Yes, a<b.\n\nReally.\n"),
    ),
    "hunyuan without reasoning": (
        "hunyuan_a13b", "<think>\n\n</think>\n<answer>\nYes.</answer>", ("", "Yes."),
    ),
    "hunyuan in calls": (
        "hunyuan_a13b",
        "<think>Hm.</think>\n<tool_calls>[]</tool_calls>",
        ("Hm.", "<tool_calls>[]</tool_calls>"),
    ),
    "apriel": (
        "apriel",
        f"{APRIEL}\nOne.\n\nTwo.\n[BEGIN FINAL RESPONSE]\n3 [x]\n[END FINAL RESPONSE]\n<|end|>",
        ("One.\n\nTwo.", "3 [x]\n"),
    ),
    "ernie": (
        "ernie45", "<think>\nHm.\n</think>\n\n<response>\nYes.\n</response>\n", ("Hm.", "Yes.\n"),
    ),
    "granite": (
        "granite",
        "Here is my thought process: Hm.\n\nHere is my response: Here is it.",
        ("Hm.", "Here is it."),
    ),
    "gemma": (
        "gemma4", "<|channel>thought\nHm.\n<channel|>Yes.", ("Hm.", "Yes."),
    ),
    "olmo": ("olmo3", "<think>Hm. </ think></think>\n\nYes.", ("Hm. </ think>", "Yes.")),
    "not reasoning": ("olmo3", "  <thinking> is not it. ", ("", "  <thinking> is not it. ")),
    "open": ("olmo3", "<think> Hm. ", ("Hm.", "")),
}  # fmt: skip


def split(form, pieces, **ends):
    splitter = TextReasoning(form)
    parts = [splitter.push(piece) for piece in pieces[:-1]]
    parts.append(splitter.push(pieces[-1], last=True, **ends))
    return tuple("".join(part) for part in zip(*parts, strict=True))


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_is_split_the_same_however_it_is_cut(name):
    parser, text, expected = OUTPUTS[name]
    form = REASONING_FORMATS[parser]
    assert split(form, [text]) == expected
    assert split(form, [*text, ""]) == expected
    for i in range(len(text)):
        for j in range(i, len(text)):
            assert split(form, [text[:i], text[i:j], text[j:]]) == expected


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_that_its_length_cuts_has_a_beginning_of_its_parts(name):
    parser, text, (reasoning, answer) = OUTPUTS[name]
    form = REASONING_FORMATS[parser]
    for end in range(len(text)):
        begun = split(form, [text[:end]], cut=True)
        assert split(form, [*text[:end], ""], cut=True) == begun
        assert reasoning.startswith(begun[0].rstrip("<[")) and answer.startswith(
            begun[1].rstrip("<[").rstrip()
        )


def test_templates_belong_to_formats_and_each_has_a_name():
    assert {"auto", "none", *REASONING_FORMATS} == set(REASONING_PARSERS)
    for template, name in (
        ("</think>", "qwen3"), ("</think><answer>", "hunyuan_a13b"), ("[/THINK]", "mistral"),
        ("[BEGIN FINAL RESPONSE]", "apriel"), ("</think> <response>", "ernie45"),
        ("<channel|>", "gemma4"), ("Here is my response:", "granite"),
    ):  # fmt: skip
        assert reasoning_format("auto", template) is REASONING_FORMATS[name]
    assert reasoning_format("auto", "abc") is None
