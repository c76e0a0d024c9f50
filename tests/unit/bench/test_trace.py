"""Public traces, scaled to a machine."""

import json
import time

import pytest

from baton.bench.trace_workload import Scale, demands
from baton.bench.workload import Workload
from baton.errors import ConfigError

IDS = range(100, 4000)
ROWS = [
    (0, 1000, 80, [1, 2]),
    (3000, 1100, 80, [1, 2, 3]),
    (3000, 600, 8, [4, 2]),
    (9000, 5, 1, [5]),
]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture
def mooncake(tmp_path):
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(dict(zip(names, r, strict=True))) + "\n" for r in ROWS))
    return path


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ({}, [(0, 1000, 80), (3, 1100, 80), (3, 600, 8), (9, 5, 1)]),
        (
            {"rate": 4, "length": 0.125},
            [(0, 125, 10), (0.75, 138, 10), (0.75, 75, 1), (2.25, 1, 1)],
        ),
        (
            {"max_prompt": 520, "max_output": 20},
            [(0, 520, 20), (3, 520, 20), (3, 520, 8), (9, 5, 1)],
        ),
    ],
)
def test_times_and_lengths_are_scaled(mooncake, scale, expected):
    found = demands(mooncake, Scale(**scale))
    assert [(d.at_s, d.prompt_tokens, d.new_tokens) for d in found] == expected


@pytest.mark.parametrize("length", [0.01, 0.0999, 0.125, 0.3, 1, 1.7])
def test_equal_ids_at_equal_places_are_equal_text_at_every_scale(mooncake, length):
    first, second, third, _ = (d.prompt(IDS) for d in demands(mooncake, Scale(length=length)))
    assert len(second) == round(1100 * length)
    shared = min(len(first), round(1024 * length))
    assert first[:shared] == second[:shared]  # the second goes on in the same 512 tokens
    block = round(512 * length)
    assert third[:block] != first[:block]
    if length == 1:
        assert third[512:] == first[512:600]  # a hash id stands for text, wherever it is


def test_azure_and_rows_without_ids_share_nothing(tmp_path):
    path = tmp_path / "t"
    row = {"timestamp": 0, "input_length": 40, "output_length": 2}
    path.write_text(json.dumps(row) + "\n" + json.dumps(row))
    one, other = (d.prompt(IDS) for d in demands(path, Scale()))
    assert len(one) == 40 and one != other
    path.write_text(
        f"{AZURE}2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
        "2023-11-16 18:15:51.2225670,879,55\n"
    )
    found = demands(path, Scale(rate=0.5))
    assert [d.at_s for d in found] == pytest.approx([0, 8.629158, 9.083954], abs=1e-5)
    assert [(d.prompt_tokens, d.new_tokens) for d in found] == [(374, 44), (396, 109), (879, 55)]
    assert len({d.parts for d in found}) == 3
    load = Workload(trace=path, duration_s=2.2).at(2.0)  # twice the rate
    assert load.label == "2x trace" and [d.new_tokens for d in load.demands()] == [44, 109]


@pytest.fixture(params=["CET-1CEST,M3.5.0,M10.5.0/3", "UTC"])
def time_zone(request, monkeypatch):
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("time_zone")
@pytest.mark.parametrize("offset", ["", "+00:00"])
def test_azure_times_are_the_same_in_every_time_zone(tmp_path, offset):
    """In central Europe the hour after 02:00 does not exist on this day."""
    times = ("01:59:59.5", "02:00:00.5", "03:00:00.5", "03:30:00.5")
    rows = "".join(f"2024-03-31 {at}{offset},9,1\n" for at in times)
    (tmp_path / "t").write_text(AZURE + rows)
    assert [d.at_s for d in demands(tmp_path / "t", Scale())] == [0, 1, 3601, 5401]


def test_spaces_around_azure_columns_are_ignored(tmp_path):
    text = " TIMESTAMP , ContextTokens,GeneratedTokens \n2024-03-31 01:00:00 , 374,44 \n"
    (tmp_path / "t").write_text(text)
    (found,) = demands(tmp_path / "t", Scale())
    assert (found.prompt_tokens, found.new_tokens) == (374, 44)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("hello\n", "neither a JSON object nor the columns"),
        ('{"timestamp": 1}\n', "line 1, is no request"),
        ('{"timestamp": 0, "input_length": 4, "output_length": 1}\n{"timestamp"', "line 2"),
        ('{"timestamp": 0, "input_length": -4, "output_length": 1}\n', "line 1"),
        (f"{AZURE}2023-11-16 18:15:46,x,1\n", "line 2"),
        (AZURE, "has no requests"),
        ("", "neither"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, text, error):
    if text is not None:
        (tmp_path / "t").write_text(text)
    with pytest.raises(ConfigError, match=error):
        demands(tmp_path / "t", Scale())
