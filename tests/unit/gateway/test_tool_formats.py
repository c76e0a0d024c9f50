"""Outputs in the formats of families of models, whole and streamed.

What Responses and Messages make of a call, in whatever format it was written, their tests say.
"""

import json

import pytest

from baton.text.tool_parsers import FORMATS
from baton.text.tool_parsers.harmony import HARMONY
from tests.unit.text.tool_outputs import written

PATH = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
ARGUMENTS = {"city": 'Par"is', "days": 3}
CHAT = "{% for m in messages %}{{ m }}{% endfor %}{# tools #}"
HARMONY_SAYS = (
    "<|channel|>analysis<|message|>Which city? END<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    f"<|constrain|>json<|message|>{json.dumps(ARGUMENTS)}"
)


def template_of(form):
    """A template that belongs to the format, and shows its input."""
    return CHAT + "{#" + " ".join(form.templates[0]) + "#}"


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
async def test_a_call_in_each_format_whole_and_streamed(says, form):
    gateway = await says(
        written(form, ("weather", ARGUMENTS)), template=template_of(form), added=form.markers
    )
    asked = {"tools": TOOLS, "ignore_eos": False, "max_tokens": None}
    (choice,) = (await gateway.chat(**asked)).json()["choices"]
    assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    if form.name == "kimi_k2":
        assert call["id"] == "functions.weather:0"
    chunks = await gateway.events(PATH, **asked)
    pieces = [
        piece for chunk in chunks for piece in chunk["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert pieces[0]["function"] == {"name": "weather", "arguments": ""} and len(pieces) > 5
    streamed = "".join(piece["function"]["arguments"] for piece in pieces)
    assert streamed == call["function"]["arguments"]
    again = await gateway.post("/tokenize", {"messages": [choice["message"]], "tools": TOOLS})
    assert again.status_code == 200
    assert str(ARGUMENTS) in gateway.tokenizer.decode(again.json()["tokens"])


async def test_channels_become_reasoning_content_and_calls(says):
    gateway = await says(HARMONY_SAYS, template=template_of(HARMONY), added=HARMONY.markers)
    asked = {"tools": TOOLS, "ignore_eos": False, "max_tokens": None}
    answer = (await gateway.chat(**asked, stop=["END", "final"])).json()
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == "Which city? END" and message["content"] == "Let me see."
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
    tokens = len("Which city? END")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": tokens}
    chunks = await gateway.events(PATH, **asked)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Which city? END"
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me see."
    asked = {"model": "tiny", "input": "Hi", "tools": [{"type": "function", **FUNCTION}]}
    output = (await gateway.post("/v1/responses", asked)).json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
