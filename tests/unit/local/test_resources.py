"""Cores and GPUs are divided evenly, roles share no GPU while they can, and shortages are said."""

import itertools
import os
from collections import Counter

import pytest

from baton.config import EngineConfig
from baton.errors import ConfigError
from baton.local import resources
from baton.local.resources import Share, devices, divide_cores, shares

NAMES = ("prefill-0", "decode-0", "decode-1")


def test_cores_are_divided_disjoint_even_and_completely():
    for workers, cores in itertools.product(range(7), range(1, 18)):
        cpus = [3 * i for i in range(cores)]
        divided = divide_cores(cpus, workers)
        assert len(divided) == workers
        if cores < workers or not workers:
            assert set(divided) <= {Share((), 1)}
            continue
        assert list(itertools.chain.from_iterable(share.cpus for share in divided)) == cpus
        sizes = [share.threads for share in divided]
        assert sizes == [len(share.cpus) for share in divided]
        assert max(sizes) - min(sizes) <= 1


def test_gpus_are_used_evenly():
    known = {(1, 3, 2): [0, 1, 1, 1], (2, 2, 3): [0, 1, 2, 2], (1, 5, 4): [0, 1, 2, 3, 1, 2]}
    for prefill, decode, number in itertools.product(range(1, 6), range(1, 6), range(1, 9)):
        named = devices(EngineConfig(device="cuda"), prefill, decode, number)
        chosen = [int(name.removeprefix("cuda:")) for name in named]
        assert chosen == known.get((prefill, decode, number), chosen)
        assert len(chosen) == prefill + decode
        assert set(chosen) == set(range(min(number, prefill + decode)))
        first, second = chosen[:prefill], chosen[prefill:]
        assert number == 1 or not set(first) & set(second)
        for part in (first, second):
            each = Counter(part).values()
            assert max(each) - min(each) <= 1


def test_devices():
    for engine, gpus, expected in (
        (EngineConfig(device="cuda:3"), 0, ["cuda:3"] * 2),
        (EngineConfig(), 0, ["", ""]),
        (EngineConfig(device="cpu"), 4, ["", ""]),
        (EngineConfig(simulate="1,1"), 4, ["", ""]),
        (EngineConfig(), 4, ["cuda:0", "cuda:1"]),
    ):
        assert devices(engine, 1, 1, gpus) == expected
    ranked = devices(EngineConfig(), 2, 2, 8, (1, 1, 3, 3))
    assert ranked == ["cuda:0", "cuda:1", "cuda:2", "cuda:5"], "no rank shares a GPU"
    with pytest.raises(ConfigError, match="need 8 GPUs, one a rank, and torch sees 7"):
        devices(EngineConfig(), 2, 2, 7, (1, 1, 3, 3))
    with pytest.raises(ConfigError, match="--device cuda: torch sees no GPU"):
        devices(EngineConfig(device="cuda"), 1, 1, 0)


ON_TWO = [
    "GPUs: prefill-0 on cuda:0, decode-0 on cuda:1, decode-1 on cuda:1",
    "workers on one GPU share --gpu-memory 0.9: at least 0.45 each",
]


@pytest.mark.parametrize(
    ("cores", "gpus", "threads", "expected", "lines"),
    [
        (6, 0, 0, [Share((0, 1), 2), Share((2, 3), 2), Share((4, 5), 2)], []),
        (9, 0, 3, [Share((), 3)] * 3, []),
        (2, 0, 0, [Share((), 1)] * 3, ["warning: 3 workers use 3 threads on 2 cores"]),
        (2, 2, 0, [Share((), 1, "cuda:0", 0.9), *[Share((), 1, "cuda:1", 0.45)] * 2], ON_TWO),
        (30, 2, 0, [Share((), 4, "cuda:0", 0.9), *[Share((), 4, "cuda:1", 0.45)] * 2], ON_TWO),
        (30, 3, 7, [Share((), 7, f"cuda:{number}", 0.9) for number in range(3)], ["GPUs: "]),
    ],
)
def test_shares_of_cores_and_gpus_are_said(cores, gpus, threads, expected, lines, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    said: list[str] = []
    assert shares(EngineConfig(threads=threads), NAMES, 1, gpus, said.append) == expected
    assert len(said) == len(lines)
    assert all(line.startswith(start) for line, start in zip(said, lines, strict=True))


def test_torch_is_started_only_where_a_driver_is(monkeypatch, tmp_path):
    for code, driver, count in (
        ("raise SystemExit(print(7))", "none", 0),
        ("print(3)", "", 3),
        ("import nonsense_that_is_not_there", "", 0),
    ):
        monkeypatch.setattr(resources, "_DRIVER_FILES", (tmp_path / "none", tmp_path / driver))
        monkeypatch.setattr(resources, "_COUNT", code)
        assert resources.count_gpus() == count
