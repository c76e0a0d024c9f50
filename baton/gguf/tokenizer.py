"""The tokenizer of a GGUF file, as the tokenizer.json that the library `tokenizers` reads.

The file has a vocabulary, merges of byte-level BPE or scores of SentencePiece, and a name for the
expression that texts are split by. The rest is what transformers' tokenizers of these models have
(`transformers.integrations.gguf`); which token begins a text is llama.cpp's rule.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from baton.errors import CheckpointError
from baton.gguf.reader import GgufFile

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # kinds of tokens
_SPACE = "\u2581"  # SentencePiece's

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2, _DIGITS = "", "digits"
# By `tokenizer.ggml.pre`: an expression, or GPT-2's, or GPT-2's with single digits.
_SPLITS = {
    **dict.fromkeys(("default", "gpt-2", "mpt", "olmo", "phi-2"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "exaone"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}
_NFC = ("qwen2", "qwen35")  # whose texts are normalised
# Those whose texts begin with a token unless the file says otherwise, and whose vocabulary takes
# precedence over merges.
_LLAMA_LIKE = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken")

_END_TEXTS = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<EOT>", "<|return|>", "<|call|>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
})  # fmt: skip
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def tokenizer_json(path: Path) -> str:
    """The text of tokenizer.json. Raises CheckpointError naming the file and the key."""
    return json.dumps(_tokenizer(GgufFile.load(path)), ensure_ascii=False)


def special_tokens(file: GgufFile) -> dict[str, str]:
    """Named special tokens, such as `bos_token`."""
    tokens = _tokens(file)
    ids = {name: _token_id(file, key, len(tokens)) for name, key in _NAMED.items()}
    return {f"{name}_token": tokens[token] for name, token in ids.items() if token is not None}


def eos_token_ids(file: GgufFile) -> frozenset[int]:
    """Tokens that end an output: those that keys name, and turns' ends by their text.

    As in llama.cpp, because files name one of them, and models have several.
    """
    tokens, kinds = _tokens(file), _kinds(file)
    named = (_token_id(file, key, len(tokens)) for key in ("eos", "eot", "eom"))
    ends = {token for token in named if token is not None}
    for token, (text, kind) in enumerate(zip(tokens, kinds, strict=False)):
        if kind in (_CONTROL, _USER_DEFINED) and text in _END_TEXTS:
            ends.add(token)
    return frozenset(ends)


def _tokenizer(file: GgufFile) -> dict[str, Any]:
    model = file.text("tokenizer.ggml.model")
    tokens = _tokens(file)
    kinds = _kinds(file) or [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise file.error("tokenizer.ggml.token_type", f"a number for each of {len(tokens)} tokens")
    if model == "gpt2":
        parts = _byte_level(file, tokens, kinds)
    elif model == "llama":
        parts = _sentencepiece(file, tokens, kinds)
    else:
        raise file.error("tokenizer.ggml.model", "gpt2, llama")
    named = {
        _token_id(file, _NAMED[name], len(tokens)) for name in ("bos", "eos", "unk")
    } if model == "llama" else set()  # fmt: skip
    added = [
        {
            "id": token, "content": text, "special": kind != _USER_DEFINED, "normalized": False,
            "single_word": False, "lstrip": False, "rstrip": False,
        }
        for token, (text, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED) or token in named
    ]  # fmt: skip
    return {
        "version": "1.0",
        "added_tokens": added,
        "post_processor": _post_processor(file, tokens, model),
        **parts,
    }


def _byte_level(file: GgufFile, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    """Byte-level BPE, whose tokens are texts of characters that stand for bytes."""
    pre = file.text("tokenizer.ggml.pre", "default")
    if pre not in _SPLITS:
        raise file.error("tokenizer.ggml.pre", ", ".join(_SPLITS))
    alphabet = _byte_alphabet()
    known = frozenset(alphabet.values())

    def spelled(text: str, kind: int) -> str:
        if kind in (_CONTROL, _USER_DEFINED) or known.issuperset(text):
            return text
        return "".join(alphabet[byte] for byte in text.encode())

    vocab = {
        spelled(text, kind): token
        for token, (text, kind) in enumerate(zip(tokens, kinds, strict=True))
    }
    split, byte_level = _SPLITS[pre], _step("ByteLevel", add_prefix_space=False, trim_offsets=True)
    steps = [byte_level | {"use_regex": split in (_GPT2, _DIGITS)}]
    if split == _DIGITS:
        steps.insert(0, _step("Digits", individual_digits=True))
    elif split != _GPT2:
        pattern = {"Regex": split}
        steps.insert(0, _step("Split", pattern=pattern, behavior="Isolated", invert=False))
    merges = [merge.split(" ") for merge in file.texts("tokenizer.ggml.merges")]
    for merge in merges:
        if len(merge) != 2 or not all(part in vocab for part in (*merge, "".join(merge))):
            raise CheckpointError(
                f"{file.path}: tokenizer.ggml.merges has {' '.join(merge)[:80]!r}, which are no "
                "two tokens that make one"
            )
    return {
        "normalizer": _step("NFC") if pre in _NFC else None,
        "pre_tokenizer": _step("Sequence", pretokenizers=steps),
        "decoder": byte_level | {"use_regex": True},
        "model": _bpe(vocab, merges, ignore_merges=pre in _LLAMA_LIKE),
    }


def _sentencepiece(file: GgufFile, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    """SentencePiece's BPE, whose merges follow from the tokens' scores."""
    scores: Any = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise file.error("tokenizer.ggml.scores", f"a number for each of {len(tokens)} tokens")
    replaced = _step("Replace", pattern={"String": " "}, content=_SPACE)
    decoders = [
        _step("Replace", pattern={"String": _SPACE}, content=" "),
        _step("ByteFallback"),
        _step("Fuse"),
    ]
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    if file.architecture.startswith("gemma"):
        # Runs of spaces are stored as spaces, and the order of merges is that of the tokens.
        tokens = [_SPACE * len(text) if text and not text.strip(" ") else text for text in tokens]
        scores = range(0, -len(tokens), -1)
        normalizer = replaced
        pre_tokenizer = _step(
            "Split", pattern={"String": " "}, behavior="MergedWithPrevious", invert=False
        )
    else:
        prefixed = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
        if prefixed:
            decoders.append(_step("Strip", content=" ", start=1, stop=0))
        if file.architecture == "phi3":
            steps = [_step("Prepend", prepend=_SPACE), replaced]
            normalizer = _step("Sequence", normalizers=steps if prefixed else steps[1:])
        else:
            scheme = "first" if prefixed else "never"
            pre_tokenizer = _step(
                "Metaspace", replacement=_SPACE, prepend_scheme=scheme, split=False
            )
    vocab = {text: token for token, text in enumerate(tokens)}
    merges = [merge.split(" ") for merge in file.texts("tokenizer.ggml.merges")] or [
        [*pair] for pair in _merges(vocab, scores, kinds)
    ]
    unknown = _token_id(file, "unknown", len(tokens))
    return {
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "decoder": _step("Sequence", decoders=decoders),
        "model": _bpe(
            vocab, merges, byte_fallback=True, fuse_unk=True,
            unk_token=None if unknown is None else tokens[unknown],
        ),
    }  # fmt: skip


def _merges(vocab: Mapping[str, int], scores: Any, kinds: list[int]) -> Iterator[tuple[str, str]]:
    """All pairs of tokens that make a token, the best score first; as transformers makes them."""
    found = []
    for text, token in vocab.items():
        if kinds[token] not in (_NORMAL, _USER_DEFINED):
            continue
        pairs = [
            (left, right)
            for at in range(1, len(text))
            if (left := text[:at]) in vocab and (right := text[at:]) in vocab
        ]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found += [(scores[token], len(left), len(right), left, right) for left, right in pairs]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return ((left, right) for _, _, _, left, right in found)


def _post_processor(file: GgufFile, tokens: list[str], model: str) -> dict[str, Any] | None:
    """What adds the tokens that begin and end a text; None where there are none."""
    default = model == "llama" or file.metadata.get("tokenizer.ggml.pre") in _LLAMA_LIKE
    text = {"Sequence": {"id": "A", "type_id": 0}}
    single, special = [text], {}
    for name, at, added in (("bos", 0, default), ("eos", 1, False)):
        token = _token_id(file, name, len(tokens))
        if token is None or not file.metadata.get(f"tokenizer.ggml.add_{name}_token", added):
            continue
        content = tokens[token]
        single.insert(at * len(single), {"SpecialToken": {"id": content, "type_id": 0}})
        special[content] = {"id": content, "ids": [token], "tokens": [content]}
    if not special:
        return None
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return _step("TemplateProcessing", single=single, pair=pair, special_tokens=special)


def _tokens(file: GgufFile) -> list[str]:
    """The texts of all tokens. Raises CheckpointError without them."""
    if not (tokens := file.texts("tokenizer.ggml.tokens")):
        raise file.error("tokenizer.ggml.tokens", "the texts of all tokens")
    return tokens


def _kinds(file: GgufFile) -> list[int]:
    """The kind of each token; empty where the file does not say."""
    kinds: Any = file.metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(kinds, list):
        raise file.error("tokenizer.ggml.token_type", "an array of numbers")
    return kinds


def _token_id(file: GgufFile, name: str, num_tokens: int) -> int | None:
    """The token that a key such as `tokenizer.ggml.bos_token_id` names, if it is there."""
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in file.metadata:
        return None
    token = file.number(key)
    if token >= num_tokens:
        raise file.error(key, f"a token of {num_tokens}")
    return token


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's character for each byte: itself if it can be seen, else the next from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {
        byte: chr(256 + at) for at, byte in enumerate(others)
    }


def _bpe(vocab: dict[str, int], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    unset = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    defaults = {"unk_token": None, "fuse_unk": False, "byte_fallback": False}
    model = {**unset, **defaults, "ignore_merges": False, **options}
    return {"type": "BPE", **model, "vocab": vocab, "merges": merges}


def _step(kind: str, **values: Any) -> dict[str, Any]:
    return {"type": kind, **values}
