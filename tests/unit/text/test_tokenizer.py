"""Model directories of every shape load to the right tokenizer, or name the file that is wrong."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest
import tokenizers

from baton.errors import CheckpointError, InvalidRequest
from baton.text import Detokenizer, load_tokenizer, text_fingerprint


def assert_refused(tokenizer, text, match, *limit):
    """As a text and as a chat, naming the field; returns the last reason."""
    for encode, value, field in (
        (tokenizer.encode, text, "text"),
        (tokenizer.encode_chat, [{"role": "user", "content": text}], "chat"),
    ):
        with pytest.raises(InvalidRequest, match=match) as refused:
            encode(value, *limit)
        assert refused.value.field == field
    return str(refused.value)


TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"
CONFIG = {"vocab_size": 500, "max_position_embeddings": 2048, "eos_token_id": 1}


def test_reads_everything_a_directory_says(write):
    path = write(
        config=CONFIG,
        generation_config={"eos_token_id": [1, 3]},
        tokenizer_config={"bos_token": {"content": "<s>"}, "chat_template": TEMPLATE},
    )
    tokenizer = load_tokenizer(path)
    assert (tokenizer.vocab_size, tokenizer.max_context) == (500, 2048)
    assert tokenizer.eos_token_ids == {1, 3}
    assert tokenizer.has_text and tokenizer.has_chat_template
    assert tokenizer.encode_chat([{"role": "user", "content": "hello"}]) == [
        0,
        *tokenizer.encode("hello"),
    ]


def test_only_the_tokenizer_file_is_needed_and_its_training_limits_are_ignored(write):
    path = write()
    library = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    library.enable_truncation(2)
    library.enable_padding(length=64)
    library.save(str(path / "tokenizer.json"))
    tokenizer = load_tokenizer(path)
    assert tokenizer.vocab_size == library.get_vocab_size()
    assert (tokenizer.max_context, tokenizer.eos_token_ids) == (0, frozenset())
    ids = tokenizer.encode("hello brown fox 12")
    assert 2 < len(ids) < 64
    assert tokenizer.decode(ids) == "hello brown fox 12"
    with pytest.raises(InvalidRequest, match="no chat template") as refused:
        tokenizer.encode_chat([{"role": "user", "content": "x"}])
    assert refused.value.field == "chat"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": 3}, "config": CONFIG}, {3}),
        ({"generation_config": {}, "config": CONFIG}, {1}),
        ({"config": {"eos_token_id": None}, "tokenizer_config": {"eos_token": "<|im_end|>"}}, {3}),
        ({"tokenizer_config": {"eos_token": {"content": "</s>"}}}, {1}),
        ({"tokenizer_config": {"eos_token": "not a token"}}, set()),
    ],
)
def test_eos_comes_from_the_first_file_that_has_it(write, files, expected):
    assert load_tokenizer(write(**files)).eos_token_ids == expected


def test_encode_adds_special_tokens_and_encode_chat_does_not(write):
    path = write("byte_fallback", tokenizer_config={"chat_template": "{{ messages[0].content }}"})
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("hello")[0] == 1
    assert (
        tokenizer.encode_chat([{"role": "user", "content": "hello"}])
        == tokenizer.encode("hello")[1:]
    )


def test_a_text_that_is_too_long_is_not_tokenized_to_its_end(write):
    tokenizer = load_tokenizer(write(tokenizer_config={"chat_template": TEMPLATE}))
    assert_refused(tokenizer, "\ud800", "is not Unicode text")
    text = "hello wo " * 100_000
    num_tokens = len(tokenizer.encode(text))
    assert len(tokenizer.encode(text, num_tokens)) == num_tokens
    reason = assert_refused(tokenizer, text, "the context holds 1000", 1000)
    assert int(reason.split()[4]) < num_tokens / 2


def test_other_threads_run_while_a_long_text_is_tokenized(write):
    tokenizer, turns = load_tokenizer(write()), 0
    thread = threading.Thread(target=tokenizer.encode, args=["hello wo " * 100_000])
    thread.start()
    while thread.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 20  # about 1 where the interpreter lock is held


def test_named_templates_and_the_template_file(write):
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "from the list"},
    ]
    path = write(tokenizer_config={"chat_template": named})
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode_chat([{"role": "user", "content": "x"}]) == tokenizer.encode(
        "from the list"
    )
    (path / "chat_template.jinja").write_text("from the file")
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode_chat([{"role": "user", "content": "x"}]) == tokenizer.encode(
        "from the file"
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"model": {}}'),
        ("tokenizer.json", b"\xff\xfe"),
        ("config.json", "[]"),
        ("config.json", '{"vocab_size": "many"}'),
        ("config.json", '{"max_position_embeddings": -1}'),
        ("config.json", '{"vocab_size": 1' + "0" * 30 + "}"),
        ("config.json", '{"a":' * 100_000),
        ("generation_config.json", "{"),
        ("generation_config.json", '{"eos_token_id": ["</s>"]}'),
        ("tokenizer_config.json", '{"chat_template": 3}'),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}'),
        ("chat_template.jinja", "{{ x"),
    ],
)
def test_a_broken_file_is_named(write, name, content):
    path = write()
    (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError) as broken:
        load_tokenizer(path)
    assert name in str(broken.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_pipe_is_not_waited_for(write, name):
    path = write()
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    for read in (load_tokenizer, text_fingerprint):
        with pytest.raises(CheckpointError, match=f"{name}: .*not a regular file"):
            read(path)


@pytest.mark.parametrize("as_file", [True, False])
def test_a_config_alone_takes_token_ids_only(write, as_file):
    directory = write("", config=CONFIG)
    tokenizer = load_tokenizer(directory / "config.json" if as_file else directory)
    assert (tokenizer.vocab_size, tokenizer.max_context) == (500, 2048)
    assert tokenizer.eos_token_ids == {1}
    assert not tokenizer.has_text and not tokenizer.has_chat_template
    assert tokenizer.decode([1, 2]) == ""
    detokenizer = Detokenizer(tokenizer.pieces, [1, 2])
    assert detokenizer.push([3, 4]) + detokenizer.flush() == ""
    assert_refused(tokenizer, "x", "send token ids")


@pytest.mark.parametrize("files", [{}, {"config": {}}, {"config": {"vocab_size": 0}}])
def test_a_directory_with_neither_file_is_refused(write, files):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_tokenizer(write("", **files))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not found"):
        load_tokenizer(write("", config=CONFIG), required=True)


def test_the_fingerprint_changes_exactly_when_the_text_side_does(write):
    path = write(config=CONFIG, tokenizer_config={"bos_token": "<s>", "chat_template": TEMPLATE})
    original = text_fingerprint(path)
    (path / "config.json").write_text(json.dumps({**CONFIG, "torch_dtype": "float32"}))
    assert load_tokenizer(path).fingerprint == original == text_fingerprint(path)
    changes: list[tuple[str, object]] = [
        ("tokenizer_config", {"bos_token": "</s>", "chat_template": TEMPLATE}),
        ("tokenizer_config", {"bos_token": "<s>", "chat_template": "other"}),
        ("generation_config", {"eos_token_id": 2}),
    ]
    seen = {original}
    for name, content in changes:
        (path / f"{name}.json").write_text(json.dumps(content))
        seen.add(text_fingerprint(path))
    tokenizer_file = path / "tokenizer.json"
    tokenizer_file.write_text(tokenizer_file.read_text().replace("im_end", "in_end"))
    seen.add(text_fingerprint(path))
    assert len(seen) == 5


def test_no_text_is_a_beginning_of_sequence_where_there_is_one(write):
    assert load_tokenizer(write()).encode("") == []
    tokenizer = load_tokenizer(write(tokenizer_config={"bos_token": "<s>"}))
    assert tokenizer.encode("") == [0]


FILL = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - the model's
)


@pytest.mark.parametrize("names", FILL)
def test_the_middle_of_a_text_is_asked_for_with_the_models_own_tokens(write, names):
    path = write()
    with pytest.raises(InvalidRequest, match="middle of a text") as refused:
        load_tokenizer(path).encode_between("a", "b")
    assert refused.value.field == "suffix"
    library = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    library.add_special_tokens(list(names))
    library.save(str(path / "tokenizer.json"))
    first, second, last = map(library.token_to_id, names)
    tokenizer = load_tokenizer(path)
    before, after = tokenizer.encode("hello"), tokenizer.encode("fox")
    found = tokenizer.encode_between("hello", "fox")
    assert found == [first, *before, second, *after, last]


def test_bad_words_are_meant_with_and_without_a_space_before_them(write):
    tokenizer = load_tokenizer(write())
    plain, spaced = tokenizer.encode("fox"), tokenizer.encode(" fox")
    expected = [plain, *([spaced] if len(spaced) == len(plain) else [])]
    assert list(tokenizer.bad_words(["fox"])) == expected
