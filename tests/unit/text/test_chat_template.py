"""Templates render as in transformers, refuse with their own words, and stay in the sandbox."""

from __future__ import annotations

import time

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from baton.errors import CheckpointError, InvalidRequest
from baton.text import ChatTemplate, chat_template

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

FEATURES = """\
{{- bos_token }}{% if tools is not none %}{{ raise_exception('no tools') }}{% endif %}
{{- "Year: " + strftime_now("%Y") + "\\n" }}
{%- macro turn(role, text) %}<{{ role }}>{{ text ~ '|' ~ 3 }}{{ caller() if caller }}{% endmacro %}
{%- set block %}{% for message in messages %}{{ loop.index }}/{{ loop.length }}{% endfor %}
{%- endset %}
{{- block | replace('/', ' of ') }}
{%- for message in messages if message.role != 'assistant' %}
    {{- turn(message.role, message.content.replace('e', '3') | trim | upper) }}
    {{- ', ' if not loop.last else '%s.' % loop.revindex }}
{%- endfor %}
{%- for item in [1, [2, [3]]] recursive %}
    {{- item if item is number else loop(item) }}
{%- endfor %}
{{- messages | map(attribute='role') | join('+') }}{{ '{:>8}'.format('x') }}{{ 'y' | center(5) }}
{{- [1, 2] + [3] }}{{ 2 ** 10 * 3 % 7 }}{{ ['-'] * 3 }}{{ messages[::-1] | length }}
{{- {'b': 1, 'a': [none, 1.5]} | tojson(indent=2) }}{{ dict.fromkeys(['a', 'b'], 0) | tojson }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}{% continue %}{% endif %}
{{ dict(turn=loop.index, **message) | tojson }}
{% endfor %}
"""


def chat_of(*turns):
    return [{"role": role, "content": content} for role, content in turns]


CHATS = [
    chat_of(("user", "Hi")),
    chat_of(
        *(("system", " Be brief. "), ("user", 'a <b> & "ü"\n'), ("assistant", "ok")),
        ("user", "世界"),
    ),
    chat_of(("user", "one"), ("assistant", "two"), ("user", "{{ three }}")),
]


@pytest.fixture(scope="module")
def transformers_tokenizer():
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    return PreTrainedTokenizerFast(tokenizer_object=library, **SPECIAL)


@pytest.mark.parametrize(
    ("source", "chat"),
    [
        *((source, chat) for source in (CHATML, FEATURES) for chat in CHATS),
        *((MISTRAL, chat) for chat in CHATS if chat[0]["role"] != "system"),
    ],
)
def test_renders_as_transformers_does(transformers_tokenizer, source, chat):
    expected = transformers_tokenizer.apply_chat_template(
        chat,
        chat_template=source,
        tokenize=False,
        add_generation_prompt=True,
    )
    assert ChatTemplate(source, SPECIAL, "test").render(chat) == expected


def refusal(source, chat):
    with pytest.raises(InvalidRequest) as refused:
        ChatTemplate(source, SPECIAL, "test").render(chat)
    assert refused.value.field == "chat"
    return str(refused.value)


@pytest.mark.parametrize(
    ("source", "chat", "reason"),
    [
        (MISTRAL, chat_of(("user", "a"), ("user", "b")), "roles must alternate"),  # its own words
        (CHATML, [], "at least one"),
        ("{{ missing.x }}", CHATS[0], "chat template refused"),
        ("{{ 1 // 0 }}", CHATS[0], "chat template refused"),
        ("{{ messages[0].role + 1 }}", CHATS[0], "chat template refused"),
    ],
)
def test_a_template_refuses_a_chat(source, chat, reason):
    assert reason in refusal(source, chat)
    assert len(refusal("{{ raise_exception('x' * 100000) }}", CHATS[0])) < 2000


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
def test_a_template_cannot_leave_the_sandbox(source):
    refusal(source, CHATS[0])


def test_output_is_bounded(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 100)
    source = "{% for i in range(90000) %}{{ 'xxxxxxxx' }}{% endfor %}"
    assert "over 100 characters" in refusal(source, CHATS[0])


NESTED = "{% set ns = namespace(l=[1]) %}" + "{% set ns.l = [ns.l, ns.l] %}" * 60
WITHOUT_BOUNDS = [
    "{{ 10**1000000 }}",
    "{% set n = 1000000 %}{{ (10 ** n) | length }}",
    "{% set ns = namespace(x=9) %}" + "{% set ns.x = ns.x * ns.x %}" * 60,
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% set x %}{% for i in range(99999) %}" + "y" * 9999 + "{% endfor %}{% endset %}",
    "{% set x = 'ab' %}" + "{% set x = x + x %}" * 60,
    "{% set x = 'ab' %}" + "{% set x = x ~ x %}" * 60,
    "{% set x = 'ab' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "{{ 'x' * 10000000000 }}",
    "{{ ([1] * 10000000000) | length }}",
    "{{ 'x' | center(3000000000) }}",
    "{{ 'x'.ljust(3000000000) }}",
    "{{ (1).to_bytes(3000000000, 'big') }}",
    "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "{{ (['x' * 100000] * 10000) | join }}",
    "{{ range(99999) | map('center', 99999) | join }}",
    "{{ '%3000000000d' % 1 }}",
    "{{ '%*d' | format(3000000000, 1) }}",
    "{{ '{:{}}'.format(1, 3000000000) }}",
    "{{ 1.5 | round(1000000000, 'ceil') }}",
    "{{ [[1]] | tojson(indent=3000000000) }}",
    NESTED + "{{ ns.l }}",
    NESTED + "{{ ns }}",
    NESTED + "{{ ns.l | tojson }}",
    NESTED + "{{ ns.l | upper }}",
    NESTED + "{{ 'x' ~ ns.l }}",
]


@pytest.mark.parametrize("source", WITHOUT_BOUNDS, ids=range(len(WITHOUT_BOUNDS)))
def test_a_template_without_bounds_is_refused_at_load(source):
    """In seconds, whatever it is; each would take minutes, or gigabytes."""
    began = time.thread_time()
    with pytest.raises(CheckpointError, match=r"template\.jinja: chat template without bounds"):
        ChatTemplate(source, SPECIAL, "template.jinja")
    assert time.thread_time() - began < 10


def test_a_template_that_a_message_makes_endless_is_stopped(monkeypatch):
    source = "{% if messages[0].content == 'go' %}" + WITHOUT_BOUNDS[3] + "{% endif %}fine"
    template = ChatTemplate(source, SPECIAL, "test")
    monkeypatch.setattr(chat_template, "MAX_RENDERING", (0.1, 1 << 20))
    with pytest.raises(InvalidRequest, match=r"template was stopped: it takes over 0\.1 s"):
        template.render([{"role": "user", "content": "go"}])
    assert template.render([{"role": "user", "content": "x"}], at_once=True) == "fine"
    with pytest.raises(TimeoutError):
        template.render([{"role": "user", "content": "go"}], at_once=True)


PARTS = """\
{%- for message in messages %}{{ message['role'] | capitalize }}:
{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}<image>{% endif %}
{%- if part['type'] == 'text' %}{{ ' ' + part['text'] }}{% endif %}
{%- endfor %}<end>
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""
EITHER = """\
{%- for message in messages %}{% if message['content'] is string %}{{ message['content'] }}
{%- else %}{% for part in message['content'] %}[{{ part['text'] }}]{% endfor %}{% endif %};
{%- endfor %}"""


def test_a_template_that_shows_only_parts_gets_parts(transformers_tokenizer):
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": " So "},
    ]
    typed = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in chat]
    template = ChatTemplate(PARTS, SPECIAL, "template.jinja")
    expected = transformers_tokenizer.apply_chat_template(
        typed, chat_template=PARTS, tokenize=False, add_generation_prompt=True
    )
    assert template.render(chat) == expected
    assert template.render(chat, continue_final_message=True).endswith("Assistant:  So")
    either = ChatTemplate(EITHER, SPECIAL, "template.jinja")
    assert either.render(chat) == "Be brief.;Why?; So ;"


@pytest.mark.parametrize("final", ["<", "|>", "end", "im_end", " So", "assistant"])
def test_the_last_message_is_continued_where_it_ends(final):
    """Not where the template's own text is the same."""
    template = ChatTemplate(CHATML, SPECIAL, "template.jinja")
    text = template.render(chat_of(("user", "Why?"), ("assistant", final)), {}, True)
    assert text.endswith("Why?<|im_end|>\n\n<|im_start|>assistant\n" + final)


def test_long_chats_are_within_bounds():
    """A megabyte in 2,000 turns, in templates that copy them several times."""
    roles = ("user", "assistant") * 1000
    chat = chat_of(*((role, "some words " * 50) for role in roles))
    for source in (CHATML, MISTRAL, FEATURES):
        assert len(ChatTemplate(source, SPECIAL, "test").render(chat)) > 500_000


BROKEN = ["{% for %}", "{{ x", "{% unknown %}", "{% break %}"]
UNUSUAL = ["{{ x }}" * 20_000, "{{ " + "9" * 5000 + " }}"]


@pytest.mark.parametrize("source", BROKEN + UNUSUAL, ids=range(6))
def test_a_broken_or_oversized_template_is_refused_at_load(source):
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: "):
        ChatTemplate(source, SPECIAL, "tokenizer_config.json")
