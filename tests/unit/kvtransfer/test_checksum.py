"""What the checksums distinguish, and what they do not depend on."""

import pytest
import torch

from kvtransfer.checksum import (
    FACTOR,
    KEY_STEP,
    MULTIPLIER_STEP,
    STEP,
    Checksum,
    WordChecksum,
    word_sum,
)

MASK, WORD = (1 << 64) - 1, (1 << 32) - 1

kinds = pytest.mark.parametrize("kind", [Checksum, WordChecksum])


def by_hand(data, first=0):
    total = 0
    for place in range(len(data) // 4):
        word = int.from_bytes(data[4 * place : 4 * place + 4], "little")
        four, which = divmod(first + place, 4)
        t = four * STEP & MASK
        t = (t ^ t >> 32) * FACTOR & MASK
        key = t ^ t >> 32 ^ which * KEY_STEP
        multiplier = (t >> 32 | 1) ^ (which * MULTIPLIER_STEP & WORD)
        total += ((word ^ key) & WORD) * multiplier
    return total & MASK


@pytest.fixture
def data():
    return torch.randint(0, 256, (4 * 300,), dtype=torch.uint8, generator=torch.manual_seed(1))


@pytest.mark.parametrize("first", [0, 7, (1 << 31) - 2, 1 << 40])
def test_a_word_sum_is_what_its_formula_says(data, first):
    assert int(word_sum(data, first)) & MASK == by_hand(data.numpy().tobytes(), first)


@kinds
@pytest.mark.parametrize("cut", [0, 4, 400, 1196, 1200])
def test_chunks_do_not_matter(kind, cut, data, monkeypatch):
    monkeypatch.setattr("kvtransfer.checksum._WORDS_AT_ONCE", 64)
    whole, cuts = kind(), kind()
    whole.update(data)
    cuts.update(data[:cut])
    cuts.update(data[cut:])
    assert (cuts.value, cuts.num_bytes) == (whole.value, whole.num_bytes)
    assert whole.num_bytes == 1200
    assert 0 <= whole.value <= MASK


@kinds
def test_every_changed_bit_and_exchanged_block_changes_it(kind, data):
    variants = [data, torch.cat([data[400:800], data[:400], data[800:]]), data[:-4]]
    variants.append(torch.cat([data[4:8], data[:4], data[8:]]))
    variants += [torch.zeros(size, dtype=torch.uint8) for size in (8, 12)]
    for bit in range(8 * 40):
        variants.append(data.clone())
        variants[-1][bit // 8 * 30] ^= 1 << bit % 8
    values = set()
    for variant in variants:
        checksum = kind()
        checksum.update(variant)
        values.add(checksum.value)
    assert len(values) == len(variants)
