"""Templates render as in transformers, refuse with their own words, and stay in the sandbox."""

from __future__ import annotations

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from baton.errors import CheckpointError, InvalidRequest
from baton.text import ChatTemplate, chat_template
from baton.v1 import inference_pb2

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """\
{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{% endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if tools is not none %}{{ raise_exception('no tools') }}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Year: " + strftime_now("%Y") + "\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/...') }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}
        {%- generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
"""

JSON_LINES = """\
{%- for message in messages %}
{{ dict(turn=loop.index, **message) | tojson }}
{% endfor %}
{{ messages | tojson(indent=2) }}
{{ dict.fromkeys(['a', 'b'], 0) | tojson }}
"""

CHATS = [
    [("user", "Hi")],
    [("system", " Be brief. "), ("user", 'a <b> & "ü"\n'), ("assistant", "ok"), ("user", "世界")],
    [("user", "one"), ("assistant", "two"), ("user", "{{ three }}")],
]


@pytest.fixture(scope="module")
def transformers_tokenizer() -> PreTrainedTokenizerFast:
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    return PreTrainedTokenizerFast(tokenizer_object=library, **SPECIAL)


@pytest.mark.parametrize(
    ("source", "chat"),
    [
        *((source, chat) for source in (CHATML, LLAMA3, JSON_LINES) for chat in CHATS),
        *((MISTRAL, chat) for chat in CHATS if chat[0][0] != "system"),
    ],
)
def test_renders_as_transformers_does(
    transformers_tokenizer: PreTrainedTokenizerFast, source: str, chat: list[tuple[str, str]]
) -> None:
    expected = transformers_tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in chat],
        chat_template=source,
        tokenize=False,
        add_generation_prompt=True,
    )
    assert ChatTemplate(source, SPECIAL, "test").render(chat) == expected


def test_takes_protobuf_messages() -> None:
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="Hi")])
    template = ChatTemplate(CHATML, SPECIAL, "test")
    assert template.render(chat.messages) == template.render([("user", "Hi")])


def refusal(source: str, chat: list[tuple[str, str]]) -> str:
    with pytest.raises(InvalidRequest) as refused:
        ChatTemplate(source, SPECIAL, "test").render(chat)
    assert refused.value.field == "chat"
    return str(refused.value)


def test_a_templates_own_refusal_is_passed_on() -> None:
    assert "roles must alternate" in refusal(MISTRAL, [("user", "a"), ("user", "b")])


def test_an_empty_conversation_is_refused() -> None:
    assert "at least one" in refusal(CHATML, [])


@pytest.mark.parametrize(
    "source", ["{{ missing.x }}", "{{ 1 // 0 }}", "{{ messages[0].role + 1 }}"]
)
def test_a_template_that_fails_refuses_the_chat(source: str) -> None:
    assert "chat template refused" in refusal(source, CHATS[0])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ dict.mro() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ '{0.__class__.__mro__}'.format(1).x }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self.__init__.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{{ dict.update(messages[0], role='system') }}",
        "{{ messages[0].update(role='system') }}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{% include 'other' %}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    refusal(source, CHATS[0])


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 100)
    source = "{% for i in range(90000) %}{{ 'xxxxxxxx' }}{% endfor %}"
    assert "over 100 characters" in refusal(source, CHATS[0])


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% unknown %}", "{% break %}"])
def test_a_broken_template_is_refused_at_load(source: str) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        ChatTemplate(source, SPECIAL, "tokenizer_config.json")
