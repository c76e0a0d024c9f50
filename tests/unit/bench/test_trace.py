"""Public traces, scaled to a machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.bench.request import IdRange
from baton.bench.trace import Scale, demands
from baton.errors import ConfigError

IDS = IdRange(100, 4000)
ROWS = [
    (0, 1000, 80, [1, 2]),
    (3000, 1100, 80, [1, 2, 3]),
    (3000, 600, 8, [4, 2]),
    (9000, 5, 1, [5]),
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2225670,879,55
"""


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(dict(zip(names, r, strict=True))) + "\n" for r in ROWS))
    return path


def test_as_it_was(mooncake: Path) -> None:
    found = demands(mooncake, Scale())
    assert [(d.at_s, d.prompt_tokens, d.new_tokens) for d in found] == [
        (0, 1000, 80), (3, 1100, 80), (3, 600, 8), (9, 5, 1),
    ]  # fmt: skip


def test_equal_ids_at_equal_places_are_equal_text(mooncake: Path) -> None:
    first, second, third, _ = (d.prompt(IDS) for d in demands(mooncake, Scale()))
    assert first == second[:1000]  # the second goes on in the same 512 tokens
    assert third[:512] != first[:512]
    assert third[512:] == first[512:600]  # a hash id stands for text, wherever it is


def test_scaled(mooncake: Path) -> None:
    """Lengths an eighth, four times the rate; shares of prefixes stay."""
    found = demands(mooncake, Scale(rate=4, length=0.125))
    assert [d.at_s for d in found] == [0, 0.75, 0.75, 2.25]
    assert [d.prompt_tokens for d in found] == [125, 138, 75, 1]
    assert [d.new_tokens for d in found] == [10, 10, 1, 1]
    assert found[0].parts == ((1, 64), (2, 61))
    assert found[1].parts == ((1, 64), (2, 64), (3, 10))


@pytest.mark.parametrize("length", [0.01, 0.0999, 0.3, 1.7])
def test_prefixes_survive_odd_scales(mooncake: Path, length: float) -> None:
    first, second, *_ = (d.prompt(IDS) for d in demands(mooncake, Scale(length=length)))
    assert len(second) == round(1100 * length)
    shared = min(len(first), round(1024 * length))
    assert first[:shared] == second[:shared]


def test_cut_and_skipped(mooncake: Path) -> None:
    found = demands(mooncake, Scale(skip=1, max_prompt=520, max_output=20))
    assert [d.at_s for d in found] == [0, 0, 6]
    assert [(d.prompt_tokens, d.new_tokens) for d in found] == [(520, 20), (520, 8), (5, 1)]


def test_ties_are_spread_up_to_the_next(mooncake: Path) -> None:
    found = demands(mooncake, Scale(spread_ties=True))
    assert [d.at_s for d in found] == [0, 3, 6, 9]


def test_without_ids_nothing_is_shared(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 40, "output_length": 2}
    (tmp_path / "t").write_text(json.dumps(row) + "\n" + json.dumps(row))
    one, other = demands(tmp_path / "t", Scale())
    assert len(one.prompt(IDS)) == 40
    assert one.prompt(IDS) != other.prompt(IDS)


def test_azure(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(AZURE)
    found = demands(tmp_path / "t.csv", Scale(rate=0.5))
    times = pytest.approx([0, 8.629158, 9.083954], abs=1e-5)
    assert [d.at_s for d in found] == times
    assert [(d.prompt_tokens, d.new_tokens) for d in found] == [(374, 44), (396, 109), (879, 55)]
    assert len({d.parts for d in found}) == 3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("hello\n", "neither a JSON object nor the columns"),
        ('{"timestamp": 1}\n', "line 1, is no request"),
        ('{"timestamp": 0, "input_length": 4, "output_length": 1}\n{"timestamp"', "line 2"),
        ('{"timestamp": 0, "input_length": -4, "output_length": 1}\n', "line 1"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,x,1\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        ("", "neither"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(ConfigError, match=told):
        demands(tmp_path / "t", Scale())


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        demands(tmp_path / "none", Scale())
