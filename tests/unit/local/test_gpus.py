"""GPUs are shared out: roles apart while they can be, nobody without one, all of it told."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from baton.config import EngineConfig
from baton.errors import ConfigError
from baton.local import cpus, gpus
from baton.local.cpus import Share
from baton.local.gpus import assign, devices, share_out

NAMES = ("prefill-0", "decode-0", "decode-1")


def test_everybody_has_one_of_his_own_when_there_are_enough() -> None:
    assert assign(1, 1, 2) == [0, 1]
    assert assign(1, 3, 4) == [0, 1, 2, 3]
    assert assign(2, 1, 8) == [0, 1, 2]


def test_roles_keep_apart_when_there_are_too_few() -> None:
    assert assign(2, 2, 2) == [0, 0, 1, 1]
    assert assign(1, 3, 2) == [0, 1, 1, 1]
    assert assign(3, 1, 2) == [0, 0, 0, 1]
    assert assign(2, 2, 3) == [0, 1, 2, 2]
    assert assign(1, 5, 4) == [0, 1, 2, 3, 1, 2]


@pytest.mark.parametrize("prefill", range(1, 6))
@pytest.mark.parametrize("decode", range(1, 6))
@pytest.mark.parametrize("number", range(1, 9))
def test_gpus_are_used_evenly(prefill: int, decode: int, number: int) -> None:
    chosen = assign(prefill, decode, number)
    assert len(chosen) == prefill + decode
    assert set(chosen) == set(range(min(number, prefill + decode)))
    first, second = chosen[:prefill], chosen[prefill:]
    if number > 1:
        assert not set(first) & set(second)
    for part in (first, second):
        each = Counter(part).values()
        assert max(each) - min(each) <= 1


def test_a_device_with_a_number_is_everybodys() -> None:
    engine = EngineConfig(device="cuda:3")
    assert devices(engine, 1, 2, 8) == devices(engine, 1, 2, 0) == ["cuda:3"] * 3


def test_cpus_are_used_where_no_gpu_is_to_be() -> None:
    assert devices(EngineConfig(), 1, 1, 0) == ["", ""]
    assert devices(EngineConfig(device="cpu"), 1, 1, 4) == ["", ""]
    assert devices(EngineConfig(simulate="1,1"), 1, 1, 4) == ["", ""]
    assert devices(EngineConfig(), 1, 1, 4) == ["cuda:0", "cuda:1"]
    with pytest.raises(ConfigError, match="--device cuda: torch sees no GPU here"):
        devices(EngineConfig(device="cuda"), 1, 1, 0)


def test_who_is_where_is_told_and_memory_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(30)))
    said: list[str] = []
    shares = share_out(EngineConfig(), NAMES, 1, 2, said.append)
    assert shares == [
        Share((), 4, "cuda:0", 0.9), Share((), 4, "cuda:1", 0.45), Share((), 4, "cuda:1", 0.45)
    ]  # fmt: skip
    assert said == [
        "GPUs: prefill-0 on cuda:0, decode-0 on cuda:1, decode-1 on cuda:1",
        "workers of one GPU divide --gpu-memory 0.9: down to 0.45 each",
    ]
    said.clear()
    shares = share_out(EngineConfig(threads=7), NAMES, 1, 3, said.append)
    assert {share.threads for share in shares} == {7}
    assert {share.gpu_memory for share in shares} == {0.9}
    assert len(said) == 1


def test_few_cores_mean_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    shares = share_out(EngineConfig(), NAMES, 1, 2, lambda text: None)
    assert [(share.cpus, share.threads) for share in shares] == [((), 1)] * 3


def test_without_a_gpu_cores_are_shared_out_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    said: list[str] = []
    assert share_out(EngineConfig(), NAMES, 1, 0, said.append) == cpus.divide(range(6), 3)
    assert said == []


def test_torch_is_asked_only_where_a_driver_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def wrong(*args: object, **kwargs: object) -> None:
        pytest.fail("a process was started")

    with monkeypatch.context() as patch:
        patch.setattr(gpus, "_DRIVER_FILES", (tmp_path / "none",))
        patch.setattr(gpus.subprocess, "run", wrong)
        assert gpus.count() == 0
    monkeypatch.setattr(gpus, "_DRIVER_FILES", (tmp_path / "none", tmp_path))
    monkeypatch.setattr(gpus, "_COUNT", "print(3)")
    assert gpus.count() == 3
    monkeypatch.setattr(gpus, "_COUNT", "import nonsense_that_is_not_there")
    assert gpus.count() == 0
