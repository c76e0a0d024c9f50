"""Which configuration a launch gets, and how measured ones come to be."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from baton.engine.kernels.triton import __main__ as command
from baton.engine.kernels.triton import launch_configs, tuning
from baton.engine.kernels.triton.launch_configs import Configs, choose
from baton.engine.kernels.triton.specs import (
    Config,
    KernelSpec,
    Key,
    Outputs,
    Trial,
    specs_in,
    text_of,
)
from baton.engine.kernels.triton.tuning import tune

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
SPECS = {spec.name: spec for spec in specs_in()}
SHIPPED = sorted(launch_configs.SHIPPED.glob("*.json"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user without measured configurations; nothing remembered before or after."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    launch_configs.forget()
    yield
    launch_configs.forget()


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Has torch say that the GPU is of some capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU (80 GB)/x")
    launch_configs.forget()


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_every_shipped_file_has_every_tuned_kernel_with_the_sizes_that_are_tried(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_configs, "in_effect", lambda device: [file])
    configs = launch_configs.read(file)
    tuned = [spec for spec in SPECS.values() if spec.configs]
    assert not configs.measured
    assert set(configs.kernels) == {spec.name for spec in tuned}
    for spec in tuned:
        for shape in spec.shapes:
            key = spec.trial(shape, torch.device("meta")).key
            assert spec.configs
            tried, found = spec.configs(key), configs.nearest(spec.name, key)
            assert tried and len(set(map(text_of, tried))) == len(tried)
            own = [one for one in tried if "LIBRARY" not in one]
            assert found and ("LIBRARY" in found or all(set(one) <= set(found) for one in own))


@pytest.mark.parametrize(
    ("capability", "file"),
    [((8, 0), 80), ((8, 9), 80), ((9, 0), 90), ((10, 0), 100), ((12, 1), 100), ((7, 5), 80)],
)
def test_an_unknown_gpu_gets_the_nearest_older_ones(
    capability: tuple[int, int], file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, capability)
    expected, key = launch_configs.SHIPPED / f"sm_{file}.json", {"rows": 8192, "size": 4096}
    assert launch_configs.in_effect(GPU)[0] == expected
    assert choose("act_mul", key, GPU) == launch_configs.read(expected).nearest("act_mul", key)
    assert choose("act_mul", key, CPU)["BLOCK"] <= 64, "the interpreter has sizes of its own"
    with pytest.raises(LookupError, match="no configuration of nothing"):
        choose("nothing", {}, CPU)


def test_the_nearest_shape_is_taken_and_the_first_of_equals() -> None:
    shapes = ((1, "bf16"), (64, "bf16"), (64, "bf16"), (4, "fp32"))
    entries: list[tuple[Key, Config]] = [
        ({"rows": rows, "type": kind}, {"num_warps": number})
        for number, (rows, kind) in enumerate(shapes, 1)
    ]
    configs = Configs(measured=False, kernels={"k": entries})
    for rows, kind, number in ((4, "bf16", 1), (20, "bf16", 2), (9999, "fp32", 4), (0, "bf16", 1)):
        assert configs.nearest("k", {"rows": rows, "type": kind}) == {"num_warps": number}
    assert configs.nearest("k", {"rows": 1, "type": "fp16"}) is None
    assert configs.nearest("other", {"rows": 1}) is None


def test_what_a_user_measured_goes_first_near_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0))
    measured = {"num_warps": 8, "num_stages": 7, "BLOCK": 99}
    near, far = {"rows": 100, "size": 4096}, {"rows": 8192, "size": 4096}
    shipped = choose("act_mul", far, GPU)
    assert choose("act_mul", near, GPU) != measured
    file = launch_configs.user_file("Some GPU (80 GB)/x")
    assert file.name == f"Some-GPU-80-GB-x-{triton.__version__}.json"
    configs = Configs(measured=True, kernels={"act_mul": [({"rows": 64, "size": 4096}, measured)]})
    launch_configs.write(file, configs)

    assert launch_configs.read(file) == configs and list(file.parent.iterdir()) == [file]
    assert choose("act_mul", near, GPU) == measured
    assert choose("act_mul", far, GPU) == shipped
    assert "BLOCK" not in choose("add_rms_norm", near, GPU)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"measured": true, "kernels": {"k": [{"num_warps": 1}]}}']
)
def test_a_file_of_another_form_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "wrong.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"wrong\.json is no file of kernel configurations"):
        launch_configs.read(file)


class Tuned:
    """act_mul with the configuration in effect and three candidates, launched for real."""

    spec, key = SPECS["act_mul"], {"rows": 2, "size": 32}

    def __init__(self) -> None:
        assert self.spec.configs
        self.before, ran = choose("act_mul", self.key, CPU), list[Config]()
        self.few: list[Config] = [
            {**config, "num_stages": stage}
            for stage, config in enumerate(self.spec.configs(self.key)[:3], 1)
        ]
        self.ran = ran

    def trial(self, shape: Key, device: torch.device) -> Trial:
        made = self.spec.trial(shape, device)

        def run(config: Config | None) -> Outputs:
            self.ran.append(config or {})
            return made.run(config)

        return replace(made, run=run)

    def found(self, file: Path, took: Callable[[Config], float], seconds: float = 60.0) -> Any:
        """What tuning yields if configurations take so long."""

        def measure(launches: Sequence[Callable[[], object]], device: torch.device) -> float:
            launches[0]()
            return took(self.ran[-1])

        tried = KernelSpec("act_mul", self.trial, (), lambda key: self.few, (self.key,))
        return list(tune([(tried, self.key)], CPU, file, seconds, measure))


def test_tuning_keeps_the_fastest_of_each_shape(tmp_path: Path) -> None:
    tuned, file = Tuned(), tmp_path / "own.json"
    broken, fastest, _ = tuned.few

    def took(config: Config) -> float:
        if config == broken:
            raise RuntimeError("too many resources")
        return 0.001 if config == fastest else 0.002

    other: list[tuple[Key, Config]] = [({}, {"num_warps": 1})]
    launch_configs.write(file, Configs(measured=True, kernels={"k": other}))
    assert not tuned.found(file, took, seconds=0.0), "its time is over"
    for _ in range(2):  # the second time in place of the first
        (one,) = tuned.found(file, took)
    assert one.text.startswith(f"act_mul rows=2 size=32: {text_of(fastest)}  1.0000 ms")
    assert one.text.endswith("(4 tried, 1 failed)")
    assert (one.seconds, one.seconds_before) == (0.001, 0.002)
    kept = {"k": other, "act_mul": [(tuned.key, fastest)]}
    assert launch_configs.read(file) == Configs(measured=True, kernels=kept)


def test_what_is_in_effect_is_kept_unless_each_further_pass_shows_another_to_be_faster(
    tmp_path: Path,
) -> None:
    tuned, file = Tuned(), tmp_path / "own.json"
    lucky, steady, passes = tuned.few[0], tuned.few[1], Counter[str]()

    def took(config: Config) -> float:
        passes[text_of(config)] += 1
        if config == lucky:  # in all passes but the last
            return 0.5 if passes[text_of(config)] < 3 else 1.5
        return 0.995 if config == steady else 1.0

    (one,) = tuned.found(file, took)
    assert one.config == tuned.before, "the first is not faster each time, the other by too little"
    assert passes[text_of(lucky)] == passes[text_of(tuned.before)] == 3


def test_what_has_other_results_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned, file = Tuned(), tmp_path / "own.json"
    monkeypatch.setattr(tuning, "relative_error", lambda *_: 2.5)
    with pytest.raises(ValueError, match=r"off by 2\.50 times the error that rounding explains"):
        tuned.found(file, lambda config: 0.1 if config == tuned.few[0] else 1.0)
    assert not file.exists()


def test_commands_say_what_they_need(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in (
        (["tune"], "tuning needs an NVIDIA GPU"),
        (["show"], "show --arch 90"),
        (["check"], "do not compile"),
        (["show", "--kernel", "nothing"], "no kernel nothing; there are "),
        (["show", "--module", "baton.errors", "--arch", "90"], "baton.errors has no SPECS"),
    ):
        assert command.main(arguments) == 2
        assert text in capsys.readouterr().err


def test_show_prints_where_values_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["show", "--arch", "89,90", "--kernel", "act_mul"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "derived, not measured" in line] == [
        f"{launch_configs.SHIPPED / name} (derived, not measured)"
        for name in ("sm_80.json", "sm_90.json")
    ]
    entries = launch_configs.read(launch_configs.SHIPPED / "sm_90.json").kernels["act_mul"]
    assert len([line for line in lines if re.match("  act_mul  ", line)]) == 2 * len(entries)
