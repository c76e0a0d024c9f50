"""Model directories of every shape load to the right tokenizer, or name the file that is wrong."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest
import tokenizers
from transformers import AutoTokenizer

from baton.errors import CheckpointError, InternalError, InvalidRequest
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


# What multimodal models say of their text, and the template in the file of older processors.
MULTIMODAL = {"eos_token_id": 3, "text_config": CONFIG}
WITH_BOS = {"bos_token": {"content": "<s>"}, "chat_template": TEMPLATE}


@pytest.mark.parametrize(
    ("files", "ends", "begin"),
    [
        ({"config": CONFIG, "generation_config": {"eos_token_id": [1, 3]},
          "tokenizer_config": WITH_BOS}, {1, 3}, [0]),
        ({"config": MULTIMODAL, "chat_template": {"chat_template": TEMPLATE}}, {1}, []),
    ],
)  # fmt: skip
def test_reads_everything_a_directory_says(write, files, ends, begin):
    tokenizer = load_tokenizer(write(**files))
    assert (tokenizer.vocab_size, tokenizer.max_context) == (500, 2048)
    assert tokenizer.eos_token_ids == ends
    assert tokenizer.has_text and tokenizer.has_chat_template
    chat = [{"role": "user", "content": "hello"}]
    assert tokenizer.encode_chat(chat) == [*begin, *tokenizer.encode("hello")]


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
        # A token that the model has no row for.
        ({"tokenizer_config": {"eos_token": "no token"}, "config": {"vocab_size": 380}}, set()),
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


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
NAMED = [
    {"name": "tool_use", "template": "list {{ tools | length }}"},
    {"name": "rag", "template": "documents"},
    {"name": "default", "template": "list"},
]


@pytest.mark.parametrize(
    ("config", "files"),
    [
        (NAMED, {}),
        (NAMED[2:], {}),
        ("one {{ tools is none }}", {}),
        (NAMED, {"chat_template": "file {{ tools is none }}"}),
        ("one", {"chat_template": "file", "additional_chat_templates/tool_use": "file of tools"}),
        (None, {"chat_template": "file", "additional_chat_templates/rag": "documents"}),
        (NAMED[:1], {}),
        (None, {"additional_chat_templates/tool_use": "file of tools"}),
    ],
)
def test_of_several_templates_it_takes_the_one_that_transformers_takes(write, config, files):
    path = write(tokenizer_config={"chat_template": config})
    (path / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (path / f"{name}.jinja").write_text(text)
    ours, oracle = load_tokenizer(path), AutoTokenizer.from_pretrained(path)
    chat = [{"role": "user", "content": "x"}]
    for tools in (None, TOOLS):
        try:
            expected = oracle.apply_chat_template(chat, tools=tools, tokenize=False)
        except ValueError:  # none of its templates is for that
            with pytest.raises(InvalidRequest, match="no chat template for chats without tools"):
                ours.encode_chat(chat)
            continue
        found = ours.encode_chat(chat, variables={"tools": tools} if tools else None)
        assert ours.decode(found) == expected
    assert ours.has_chat_template


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize(
    "config",
    [
        {"additional_special_tokens": ["<|tool|>", "<|im_end|>"]},
        {"extra_special_tokens": {"image_token": "<|tool|>"}, "sep_token": "<tool call>"},
        {"extra_special_tokens": ["<|tool|>", {"__type": "AddedToken", "content": "Hello",
          "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}]},
        {"tool_token": "<|tool|>", "pad_token": "[PAD]", "unk_token": None},
        {"pad_token": {"__type": "AddedToken", "content": "fox", "lstrip": False,
          "rstrip": True, "normalized": True, "single_word": False}},
        {"added_tokens_decoder": {
            "411": {"content": "<|b|>", "special": True, "normalized": False, "lstrip": False,
                    "rstrip": False, "single_word": False},
            "380": {"content": "<|tool|>", "special": False, "normalized": True, "lstrip": False,
                    "rstrip": True, "single_word": False},
            "3": {"content": "<|im_start|>", "special": True, "normalized": False, "lstrip": True,
                  "rstrip": False, "single_word": False}}},
    ],
)  # fmt: skip
def test_tokens_that_only_the_config_has_are_added_as_transformers_adds_them(write, family, config):
    path = write(family, tokenizer_config=config)
    ours, oracle = load_tokenizer(path), AutoTokenizer.from_pretrained(path)
    for text in (
        *("<|tool|>", "a<|tool|>  b", "x  <|im_start|>y", "[PAD]fox  [PAD]", "Hello the fox"),
        *("<|b|><|tool|>", "a<tool call> b", " Hello Hello", "<s> <|im_end|>"),
    ):
        expected = oracle.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == expected
        assert ours.decode(expected) == oracle.decode(expected, skip_special_tokens=True)
    plain = write(family, tokenizer_config={})
    assert load_tokenizer(plain).fingerprint != ours.fingerprint


def test_tokens_of_the_config_that_the_tokenizer_has_change_nothing(write):
    path = write()
    before = text_fingerprint(path)
    oracle = AutoTokenizer.from_pretrained(path)
    decoder = {
        str(id): {name: getattr(token, name) for name in
                  ("content", "single_word", "lstrip", "rstrip", "normalized", "special")}
        for id, token in oracle.added_tokens_decoder.items()
    }  # fmt: skip
    (path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": decoder, "additional_special_tokens": ["<|im_end|>"]})
    )
    assert text_fingerprint(path) == before


@pytest.mark.parametrize("add_bos", ["<not there>", "<s>"])
def test_a_tokenizer_that_panics_is_refused_at_load(write, add_bos):
    path = write("byte_fallback", tokenizer_config={"chat_template": TEMPLATE})
    described = json.loads((path / "tokenizer.json").read_text())
    described["post_processor"]["single"][0]["SpecialToken"]["id"] = add_bos
    (path / "tokenizer.json").write_text(json.dumps(described))
    if add_bos == "<s>":
        assert load_tokenizer(path).encode("a")
        return
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: .*no entry found.*correct it"):
        load_tokenizer(path)


def test_a_panic_in_service_is_an_error_of_the_request(write, monkeypatch):
    class Panic(BaseException):
        pass

    class Panicking:
        def encode_batch_fast(self, *args, **options):
            raise Panic("no entry")

    tokenizer = load_tokenizer(write())
    tokenizer._library = Panicking()
    with pytest.raises(InternalError, match="no entry"):
        tokenizer.encode("a")


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
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": "x"}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": {"content": 2}}}'),
        ("tokenizer_config.json", '{"extra_special_tokens": [{"content": "x", "lstrip": 3}]}'),
        ("tokenizer_config.json", '{"extra_special_tokens": 3}'),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}'),
        ("chat_template.jinja", "{{ x"),
        ("chat_template.json", "[]"),
        ("chat_template.json", '{"chat_template": 3}'),
        ("config.json", '{"text_config": {"vocab_size": "many"}}'),
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
    assert tokenizer.bad_words(["fox"]) == tuple(map(tuple, expected))
