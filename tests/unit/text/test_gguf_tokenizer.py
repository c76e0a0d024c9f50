"""The tokenizers of GGUF files give what transformers makes of them."""

import gguf
import pytest
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from baton.errors import CheckpointError
from baton.generation.generation_config import sampling_defaults
from baton.gguf.tokenizer import tokenizer_json
from baton.text import load_tokenizer, text_fingerprint

TEXTS = (
    "Hello, W\u00f6rld!\n 12345  it's  DON'T\r\n\r\n\u4f60\u597d \U0001f600 a1b22c333",
    "  two spaces before and after  ",
    "<s>user</s> <think>low lower lowest</think>",
    "a\tb   c",
)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
WORDS = ("lo", "low", "er", "lower", "es", "est", "lowest", "it", "us", "user")


def write(file, architecture, model, tokens, kinds, **keys):
    """A file of a tokenizer and an embedding."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(512)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for key, value in {"bos_token_id": 0, "eos_token_id": 1, **keys}.items():
        getattr(writer, f"add_{key}")(value)
    writer.add_tensor("token_embd.weight", gguf.np.zeros((len(tokens), 32), "float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def byte_level(file, pre, architecture="llama", **keys):
    """Byte-level BPE with merges."""
    merges = ["l o", "lo w", "e r", "low er", "e s", "es t", "low est", "i t", "u s", "us er"]
    merges += ["\u0120 lo", "1 2", "12 3", "\u0120 \u0120"]
    tokens = ["<s>", "</s>", "<think>", *bytes_to_unicode().values()]
    tokens += [merge.replace(" ", "") for merge in merges]
    kinds = [CONTROL, CONTROL, USER_DEFINED] + [NORMAL] * (len(tokens) - 3)
    keys = {"tokenizer_pre": pre, "token_merges": merges, **keys}
    write(file, architecture, "gpt2", tokens, kinds, **keys)


def sentencepiece(file, architecture="llama", **keys):
    """SentencePiece's BPE with bytes, and scores by the order of its words."""
    space = "  " if architecture.startswith("gemma") else "\u2581\u2581"
    tokens = ["<s>", "</s>", "<unk>", "<think>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [CONTROL, CONTROL, UNKNOWN, USER_DEFINED] + [BYTE] * 256
    pieces = [space, *WORDS, "\u2581lo", "\u2581low", "\u2581" + "a", *"lowerstiu\u2581abHdW123"]
    tokens += pieces
    kinds += [NORMAL] * len(pieces)
    scores = [0.0] * 260 + [-float(at) for at in range(len(pieces))]
    keys = {"token_scores": scores, "unk_token_id": 2, "pad_token_id": 0, **keys}
    write(file, architecture, "llama", tokens, kinds, **keys)


def assert_equal(file):
    expected = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer = load_tokenizer(file)
    for text in TEXTS:
        ids = expected.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == expected.decode(ids, skip_special_tokens=True), text
    text_fingerprint(file)


@pytest.mark.parametrize(
    "pre", ["gpt-2", "default", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o"]
)
def test_byte_level_tokens_are_those_of_transformers(pre, tmp_path):
    byte_level(file := tmp_path / "model.gguf", pre)
    assert_equal(file)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3", "phi3"])
def test_sentencepiece_tokens_are_those_of_transformers(architecture, tmp_path):
    sentencepiece(file := tmp_path / "model.gguf", architecture)
    assert_equal(file)


def test_digits_are_apart_where_the_model_learned_it(tmp_path):
    byte_level(file := tmp_path / "model.gguf", "smollm")
    tokenizer = load_tokenizer(file)
    assert len(tokenizer.encode("1234", add_special_tokens=False)) == 4


@pytest.mark.parametrize(
    ("make", "keys", "first"),
    [
        (sentencepiece, {}, 0),
        (sentencepiece, {"add_bos_token": False}, None),
        (lambda file, **keys: byte_level(file, "gpt-2", **keys), {}, None),
        (lambda file, **keys: byte_level(file, "llama-bpe", **keys), {}, 0),
        (lambda file, **keys: byte_level(file, "gpt-2", **keys), {"add_bos_token": True}, 0),
    ],
)
def test_texts_begin_with_a_token_where_llama_cpp_adds_it(make, keys, first, tmp_path):
    make(file := tmp_path / "model.gguf", **keys)
    tokenizer = load_tokenizer(file)
    plain = tokenizer.encode("low", add_special_tokens=False)
    assert tokenizer.encode("low") == ([] if first is None else [first]) + plain


def test_templates_ends_and_sampling_are_read(tmp_path):
    template = "{% for m in messages %}<s>{{ m.content }}{% endfor %}{{ eos_token }}"
    byte_level(
        file := tmp_path / "model.gguf", "gpt-2", chat_template=template, eot_token_id=2,
        sampling_temp=0.5, sampling_top_k=7,
    )  # fmt: skip
    tokenizer = load_tokenizer(file)
    assert tokenizer.eos_token_ids == {1, 2}
    assert tokenizer.max_context == 512
    ids = tokenizer.encode_chat([{"role": "user", "content": "low"}])
    assert ids == [0, *tokenizer.encode("low", add_special_tokens=False), 1]
    assert sampling_defaults(file) == {"temperature": 0.5, "top_k": 7}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tokenizer_pre": "other"}, "tokenizer.ggml.pre is 'other'; supported: default, gpt-2"),
        ({"tokenizer_model": "bert"}, "tokenizer.ggml.model is 'bert'; supported: gpt2, llama"),
        ({"eos_token_id": 9999}, "tokenizer.ggml.eos_token_id is 9999; supported: a token of"),
        ({"token_merges": ["l q"]}, "tokenizer.ggml.merges has 'l q'"),
        ({"token_types": [1]}, "tokenizer.ggml.token_type is .*; supported: a number for each"),
    ],
)
def test_what_is_not_supported_is_named(keys, message, tmp_path, monkeypatch):
    added = gguf.GGUFWriter.add_key_value

    def replaced(self, key, value, *rest, **options):
        for name, other in keys.items():
            method = {"token_merges": "merges", "token_types": "token_type"}.get(
                name, name.removeprefix("tokenizer_")
            )
            value = other if key == f"tokenizer.ggml.{method}" else value
        added(self, key, value, *rest, **options)

    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", replaced)
    byte_level(file := tmp_path / "model.gguf", "gpt-2")
    with pytest.raises(CheckpointError, match=f"model.gguf: {message}"):
        tokenizer_json(file)
