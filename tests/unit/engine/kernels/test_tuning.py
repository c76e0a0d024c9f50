"""Which configuration a launch gets, and how measured ones come to be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton

from baton.engine.ops.triton import __main__ as command
from baton.engine.ops.triton import tuning
from baton.engine.ops.triton.spec import Config, KernelSpec, Key, Trial, specs_in, text_of
from baton.engine.ops.triton.tuning import Configs, choose, tune

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
SPECS = {spec.name: spec for spec in specs_in()}
SHIPPED = sorted(tuning.SHIPPED.glob("*.json"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user without measured configurations; nothing remembered before or after."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning.forget()
    yield
    tuning.forget()


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Has torch say that the GPU is of some capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU (80 GB)/x")
    tuning.forget()


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_every_shipped_file_has_every_tuned_kernel_with_the_sizes_that_are_tried(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "in_effect", lambda device: [file])
    configs = tuning.read(file)
    tuned = [spec for spec in SPECS.values() if spec.configs]
    assert not configs.measured
    assert set(configs.kernels) == {spec.name for spec in tuned}
    for spec in tuned:
        for shape in spec.shapes:
            key = spec.trial(shape, torch.device("meta")).key
            assert spec.configs
            tried, found = spec.configs(key), configs.nearest(spec.name, key)
            assert tried and len(set(map(text_of, tried))) == len(tried)
            assert found and all(set(one) <= set(found) for one in tried)


@pytest.mark.parametrize(
    ("capability", "file"),
    [((8, 0), 80), ((8, 9), 80), ((9, 0), 90), ((10, 0), 100), ((12, 1), 100), ((7, 5), 80)],
)
def test_an_unknown_gpu_gets_the_nearest_older_ones(
    capability: tuple[int, int], file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, capability)
    expected, key = tuning.SHIPPED / f"sm_{file}.json", {"rows": 8192, "size": 4096}
    assert tuning.in_effect(GPU)[0] == expected
    assert choose("act_mul", key, GPU) == tuning.read(expected).nearest("act_mul", key)
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
    file = tuning.user_file("Some GPU (80 GB)/x")
    assert file.name == f"Some-GPU-80-GB-x-{triton.__version__}.json"
    configs = Configs(measured=True, kernels={"act_mul": [({"rows": 64, "size": 4096}, measured)]})
    tuning.write(file, configs)

    assert tuning.read(file) == configs and list(file.parent.iterdir()) == [file]
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
        tuning.read(file)


def test_tuning_keeps_the_fastest_of_each_shape(tmp_path: Path) -> None:
    """Three configurations are launched for real; the first fails, the second is the fastest."""
    spec, key, ran = SPECS["act_mul"], {"rows": 2, "size": 32}, list[Config]()
    assert spec.configs
    few = [{**config, "num_stages": stage} for stage, config in enumerate(spec.configs(key)[:3], 1)]

    def trial(shape: Key, device: torch.device) -> Trial:
        made = spec.trial(shape, device)
        return replace(made, run=lambda config: (ran.append(config), made.run(config))[1])

    def measure(run: Callable[[], object]) -> float:
        run()
        if ran[-1] == few[0]:
            raise RuntimeError("too many resources")
        return 1.0 if ran[-1] == few[1] else 2.0

    file = tmp_path / "own.json"
    other: list[tuple[Key, Config]] = [({}, {"num_warps": 1})]
    tuning.write(file, Configs(measured=True, kernels={"k": other}))
    tried = KernelSpec("act_mul", trial, (), lambda key: few, (key,))
    assert not list(tune([(tried, key)], CPU, file, 0.0, measure)), "its time is over"
    for _ in range(2):  # the second time in place of the first
        (line,) = tune([(tried, key)], CPU, file, 60.0, measure)
    assert line.startswith(f"act_mul rows=2 size=32: {text_of(few[1])}  1.0000 ms")
    assert line.endswith("(3 tried, 1 failed)")
    kept = {"k": other, "act_mul": [(key, few[1])]}
    assert tuning.read(file) == Configs(measured=True, kernels=kept)


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
    assert [line for line in lines if "reasoned, not measured" in line] == [
        f"{tuning.SHIPPED / name} (reasoned, not measured)" for name in ("sm_80.json", "sm_90.json")
    ]
    entries = tuning.read(tuning.SHIPPED / "sm_90.json").kernels["act_mul"]
    assert len([line for line in lines if re.match("  act_mul  ", line)]) == 2 * len(entries)
