"""Cores and GPUs are divided evenly, roles share no GPU while they can, and shortages are said."""

import os
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest

from baton.config import EngineConfig
from baton.errors import ConfigError
from baton.local import resources
from baton.local.resources import Share, assign_gpus, devices, divide_cores, shares

NAMES = ("prefill-0", "decode-0", "decode-1")


@pytest.mark.parametrize("cores", range(1, 18))
@pytest.mark.parametrize("workers", range(7))
def test_cores_are_divided_disjoint_even_and_completely(cores: int, workers: int) -> None:
    cpus = [3 * i for i in range(cores)]
    divided = divide_cores(cpus, workers)
    assert len(divided) == workers
    if cores < workers or not workers:
        assert set(divided) <= {Share((), 1)}
        return
    assert list(chain.from_iterable(share.cpus for share in divided)) == cpus
    assert all(share.threads == len(share.cpus) for share in divided)
    sizes = [share.threads for share in divided]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("prefill", "decode", "number", "expected"),
    [
        (1, 1, 2, [0, 1]),
        (1, 3, 4, [0, 1, 2, 3]),
        (2, 1, 8, [0, 1, 2]),
        (2, 2, 2, [0, 0, 1, 1]),
        (1, 3, 2, [0, 1, 1, 1]),
        (3, 1, 2, [0, 0, 0, 1]),
        (2, 2, 3, [0, 1, 2, 2]),
        (1, 5, 4, [0, 1, 2, 3, 1, 2]),
    ],
)
def test_workers_and_their_gpus(
    prefill: int, decode: int, number: int, expected: list[int]
) -> None:
    assert assign_gpus(prefill, decode, number) == expected


@pytest.mark.parametrize("prefill", range(1, 6))
@pytest.mark.parametrize("decode", range(1, 6))
def test_gpus_are_used_evenly(prefill: int, decode: int) -> None:
    for number in range(1, 9):
        chosen = assign_gpus(prefill, decode, number)
        assert len(chosen) == prefill + decode
        assert set(chosen) == set(range(min(number, prefill + decode)))
        first, second = chosen[:prefill], chosen[prefill:]
        assert number == 1 or not set(first) & set(second)
        for part in (first, second):
            each = Counter(part).values()
            assert max(each) - min(each) <= 1


@pytest.mark.parametrize(
    ("engine", "gpus", "expected"),
    [
        ({"device": "cuda:3"}, 8, ["cuda:3"] * 2),
        ({"device": "cuda:3"}, 0, ["cuda:3"] * 2),
        ({}, 0, ["", ""]),
        ({"device": "cpu"}, 4, ["", ""]),
        ({"simulate": "1,1"}, 4, ["", ""]),
        ({}, 4, ["cuda:0", "cuda:1"]),
    ],
)
def test_devices(engine: dict[str, str], gpus: int, expected: list[str]) -> None:
    assert devices(EngineConfig(**engine), 1, 1, gpus) == expected  # type: ignore[arg-type]


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="--device cuda: torch sees no GPU here"):
        devices(EngineConfig(device="cuda"), 1, 1, 0)


def test_the_placement_is_said_and_memory_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(30)))
    said: list[str] = []
    assert shares(EngineConfig(), NAMES, 1, 2, said.append) == [
        Share((), 4, "cuda:0", 0.9), Share((), 4, "cuda:1", 0.45), Share((), 4, "cuda:1", 0.45)
    ]  # fmt: skip
    assert said == [
        "GPUs: prefill-0 on cuda:0, decode-0 on cuda:1, decode-1 on cuda:1",
        "workers of one GPU divide --gpu-memory 0.9: down to 0.45 each",
    ]
    said.clear()
    divided = shares(EngineConfig(threads=7), NAMES, 1, 3, said.append)
    assert {(share.threads, share.gpu_memory) for share in divided} == {(7, 0.9)}
    assert len(said) == 1


@pytest.mark.parametrize(
    ("cores", "gpus", "threads", "expected", "warning"),
    [
        (6, 0, 0, [Share((0, 1), 2), Share((2, 3), 2), Share((4, 5), 2)], ""),
        (2, 2, 0, [Share((), 1, "cuda:0", 0.9), *[Share((), 1, "cuda:1", 0.45)] * 2], "GPUs: "),
        (9, 0, 3, [Share((), 3)] * 3, ""),
        (2, 0, 0, [Share((), 1)] * 3, "warning: 3 workers use 3 threads on 2 cores"),
    ],
)
def test_cores_and_threads(
    cores: int,
    gpus: int,
    threads: int,
    expected: list[Share],
    warning: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    said: list[str] = []
    assert shares(EngineConfig(threads=threads), NAMES, 1, gpus, said.append) == expected
    assert said[0].startswith(warning) if warning else not said


def test_torch_is_started_only_where_a_driver_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def wrong(*args: object, **kwargs: object) -> None:
        pytest.fail("a process was started")

    with monkeypatch.context() as patch:
        patch.setattr(resources, "_DRIVER_FILES", (tmp_path / "none",))
        patch.setattr(resources.subprocess, "run", wrong)
        assert resources.count_gpus() == 0
    monkeypatch.setattr(resources, "_DRIVER_FILES", (tmp_path / "none", tmp_path))
    monkeypatch.setattr(resources, "_COUNT", "print(3)")
    assert resources.count_gpus() == 3
    monkeypatch.setattr(resources, "_COUNT", "import nonsense_that_is_not_there")
    assert resources.count_gpus() == 0
