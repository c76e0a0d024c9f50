"""What is remembered of chats never changes their ids, and is not tokenized again."""

import random

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from baton.text.segment_cache import SegmentCache

from .conftest import FAMILIES, SPECIAL, byte_fallback_library, byte_level_library

MARKS = ["<|im_start|>", "<|im_start|>system", "<|im|>", "</s>", "<s>", "[INST]", "思"]
PIECES = [
    *(*MARKS, " ", "  ", "\n", "\t", "a", "the quick", "Hello", "é", "e\u0301", "世界", "🙂", "<"),
    *("<|im_", "<|im_start", "s>", "1234", "\u2581", "ﬁ", "\u00a0", "<tool call>", "'s", "..."),
]


def libraries():
    """Kinds of tokenizers, with marks that begin alike and one within another."""
    for name, make in FAMILIES.items():
        yield name, make()
    library = byte_level_library()
    library.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    library.post_processor = processors.ByteLevel(trim_offsets=False)
    yield "prefix_space", library
    for scheme in ("first", "always", "never"):
        library = byte_fallback_library()
        library.normalizer = None
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        yield f"metaspace_{scheme}", library
    library = byte_fallback_library()
    library.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.NFD()])
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.Metaspace(prepend_scheme="first")]
    )
    yield "stripped", library
    vocab = [("<unk>", 0.0), ("\u2581", -2.0), *((c, -3.0) for c in "abcdefHhlotuqki1234世🙂<|_>")]
    library = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    library.decoder = decoders.Metaspace()
    yield "unigram", library
    library = FAMILIES["word_piece"]()
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.add_tokens(["quick"])  # normalized: looked for within parts
    yield "bert", library


LIBRARIES = dict(libraries())
for _library in LIBRARIES.values():
    _library.add_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])


class Counted:
    """Encodes as the library does, and counts the characters."""

    def __init__(self, library):
        self.library, self.chars = library, 0

    def __call__(self, texts):
        self.chars += sum(map(len, texts))
        return [one.ids for one in self.library.encode_batch(texts, add_special_tokens=False)]


@pytest.mark.parametrize("kind", LIBRARIES)
def test_ids_are_those_of_the_whole_text(kind):
    library, rng = LIBRARIES[kind], random.Random(kind)
    cache, encode = SegmentCache(library, 1 << 14), Counted(library)
    assert cache.encode("a</s>b", encode, "") and encode.chars == 6
    assert cache.encode("a</s>b", encode, "") and encode.chars == 6, "nothing was remembered"
    for _ in range(1500):
        text = "".join(rng.choices(PIECES, k=rng.randint(0, 12)))
        expected = library.encode(text, add_special_tokens=False).ids
        assert cache.encode(text, encode, "") == expected, text
        assert cache.encode(text + "</s>", encode, "") == [*expected, library.token_to_id("</s>")]


def test_a_turn_costs_its_new_messages_and_tenants_share_nothing():
    library = byte_level_library()
    cache, encode = SegmentCache(library, 1 << 20), Counted(library)
    turns = [f"<|im_start|>user\nmessage {i} {'x' * 1000}<|im_end|>\n" for i in range(20)]
    before = "".join(turns[:19])
    cache.encode(before, encode, "one")
    encode.chars = 0
    cache.encode("".join(turns), encode, "one")
    assert encode.chars < 1100
    encode.chars = 0
    cache.encode(before, encode, "two")
    assert encode.chars > 10_000
    small = SegmentCache(library, 1 << 14)
    for _ in range(3):
        encode.chars = 0
        assert small.encode(before, encode, "") == encode([before])[0]
        assert encode.chars > 20_000, "it keeps more than it may"


def test_a_text_of_too_many_tokens_is_not_tokenized_to_its_end():
    library = byte_level_library()
    cache, encode = SegmentCache(library, 1 << 20), Counted(library)
    text = "".join(f"<|im_end|>{i} {'é' * 40_000}" for i in range(50))
    assert len(cache.encode(text, encode, "", 1000)) > 1000 and encode.chars < 100_000


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<x>", normalized=False, lstrip=True),
        AddedToken("<x>", normalized=False, rstrip=True),
        AddedToken("<x>", normalized=False, single_word=True),
        AddedToken(" <x>", normalized=False),
        AddedToken("x" * 65, normalized=False),
    ],
)
def test_where_a_token_depends_on_what_is_beside_it_nothing_is_remembered(token):
    library = byte_level_library()
    library.add_tokens([token])
    assert_remembers_nothing(library)


def test_tokenizers_that_cut_elsewhere_or_at_random_get_no_cache():
    library = byte_level_library()
    library.encode_special_tokens = True
    assert_remembers_nothing(library)
    library = byte_fallback_library()
    library.model.dropout = 0.1
    assert_remembers_nothing(library)
    library = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    assert_remembers_nothing(library, "aaa")


def assert_remembers_nothing(library, text=f"a{SPECIAL[0]}b"):
    cache, encode = SegmentCache(library, 1 << 20), Counted(library)
    for _ in range(2):
        cache.encode(text, encode, "")
    assert encode.chars == 2 * len(text)
