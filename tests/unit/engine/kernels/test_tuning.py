"""Which configuration a launch gets, and how measured ones come to be."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.engine.ops.triton import __main__ as command
from baton.engine.ops.triton import elementwise, tuning
from baton.engine.ops.triton.__main__ import best_of, tune
from baton.engine.ops.triton.check import specs_in
from baton.engine.ops.triton.spec import Config, KernelSpec, Key, Trial
from baton.engine.ops.triton.tuning import Configs, Entry, choose

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
SPECS = specs_in(())
TUNED = [spec for spec in SPECS if spec.configs]
META = torch.device("meta")
SHIPPED = sorted(tuning.SHIPPED.glob("*.json"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user without measured configurations; nothing remembered before or after."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning.forget()
    yield
    tuning.forget()


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Has torch say that the GPU is of some capability."""

    def gpu(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU (80 GB)")
        tuning.forget()

    return gpu


@pytest.mark.parametrize("spec", TUNED, ids=lambda spec: spec.name)
@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_every_shipped_file_has_every_kernel(file: Path, spec: KernelSpec) -> None:
    """With the sizes that are tried, for each shape that is tuned."""
    configs = tuning.read(file)
    assert not configs.measured and spec.configs
    for shape in spec.shapes:
        key = spec.trial(shape, META).key
        tried, found = spec.configs(key), configs.nearest(spec.name, key)
        assert tried and len(set(map(str, tried))) == len(tried)
        assert found and all(set(one.sizes) <= set(found.sizes) for one in tried)


def test_every_kernel_that_is_configured_exists_once() -> None:
    assert len({spec.name for spec in SPECS}) == len(SPECS)
    for file in SHIPPED:
        assert set(tuning.read(file).kernels) == {spec.name for spec in TUNED}


def test_the_interpreter_has_sizes_of_its_own() -> None:
    assert choose("silu_mul", {"rows": 1, "size": 4096}, CPU)["BLOCK"] <= 64
    with pytest.raises(LookupError, match="no configuration of nothing"):
        choose("nothing", {}, CPU)


@pytest.mark.parametrize(
    ("capability", "file"),
    [((8, 0), 80), ((8, 9), 80), ((9, 0), 90), ((10, 0), 100), ((12, 1), 100), ((7, 5), 80)],
)
def test_an_unknown_gpu_gets_the_nearest_older_ones(
    capability: tuple[int, int], file: int, pretend: Callable[[int, int], None]
) -> None:
    pretend(*capability)
    expected = tuning.read(tuning.SHIPPED / f"sm_{file}.json")
    key = {"rows": 8192, "size": 4096}
    assert tuning.in_effect(GPU)[0] == expected
    assert choose("silu_mul", key, GPU) == expected.nearest("silu_mul", key)


def test_the_nearest_shape_is_taken_and_the_first_of_equals() -> None:
    entries = (
        Entry({"rows": 1, "type": "bf16"}, Config(1, 1)),
        Entry({"rows": 64, "type": "bf16"}, Config(2, 1)),
        Entry({"rows": 64, "type": "bf16"}, Config(3, 1)),
        Entry({"rows": 4, "type": "fp32"}, Config(4, 1)),
    )
    configs = Configs("", measured=False, kernels={"k": entries})
    assert configs.nearest("k", {"rows": 4, "type": "bf16"}) == Config(1, 1)
    assert configs.nearest("k", {"rows": 20, "type": "bf16"}) == Config(2, 1)
    assert configs.nearest("k", {"rows": 10_000, "type": "fp32"}) == Config(4, 1)
    assert configs.nearest("k", {"rows": 0, "type": "bf16"}) == Config(1, 1)
    assert configs.nearest("k", {"rows": 1, "type": "fp16"}) is None
    assert configs.nearest("other", {"rows": 1}) is None


def test_what_a_user_measured_goes_first_near_its_shape(
    pretend: Callable[[int, int], None],
) -> None:
    pretend(9, 0)
    measured = Config(8, 7, {"BLOCK": 99})
    near, far = {"rows": 100, "size": 4096}, {"rows": 8192, "size": 4096}
    shipped = choose("silu_mul", near, GPU), choose("silu_mul", far, GPU)
    file = tuning.user_file("Some GPU (80 GB)")
    entry = Entry({"rows": 64, "size": 4096}, measured)
    tuning.write(file, Configs("", measured=True, kernels={"silu_mul": (entry,)}))

    assert choose("silu_mul", near, GPU) == shipped[0], "files are read once"
    tuning.forget()
    assert choose("silu_mul", near, GPU) == measured
    assert choose("silu_mul", far, GPU) == shipped[1]
    assert choose("add_rms_norm", near, GPU).sizes == {}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    entries = (Entry({"rows": 3, "type": "bf16"}, Config(2, 4, {"BLOCK": 64})),)
    file = tmp_path / "deeper" / "file.json"
    tuning.write(file, Configs("", measured=True, kernels={"k": entries}))
    assert tuning.read(file) == Configs(str(file), measured=True, kernels={"k": entries})
    own = tuning.user_file("NVIDIA H100 80GB HBM3/x")
    assert own.parent == tmp_path / "baton" / "kernels"
    assert own.name.startswith("NVIDIA-H100-80GB-HBM3-x-3.")
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"measured": true, "kernels": {"k": [{"num_warps": 1}]}}']
)
def test_a_file_of_another_form_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "wrong.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"wrong\.json is no file of kernel configurations"):
        tuning.read(file)


def clock(fastest: Config, ran: list[Config]) -> Callable[[Callable[[], object]], float]:
    """Runs a launch for real, and says that one configuration is the fastest."""

    def measure(run: Callable[[], object]) -> float:
        run()
        return 1.0 if ran[-1] == fastest else 2.0

    return measure


def small(spec: KernelSpec, key: Key, ran: list[Config]) -> KernelSpec:
    """The kernel with three configurations, each noted as it runs."""

    def trial(shape: Key, device: torch.device) -> Trial:
        made = spec.trial(shape, device)

        def run(config: Config | None) -> tuple[Tensor, ...]:
            assert config
            ran.append(config)
            return made.run(config)

        return replace(made, run=run)

    assert spec.configs
    few = spec.configs(key)[:3]
    return KernelSpec(spec.name, trial, (), lambda key: few, (key,))


@pytest.mark.parametrize("spec", [elementwise.NORM, elementwise.SILU], ids=lambda spec: spec.name)
def test_tuning_keeps_the_fastest_of_each_shape(spec: KernelSpec, tmp_path: Path) -> None:
    key = {"rows": 2, "size": 32}
    ran: list[Config] = []
    few = small(spec, key, ran)
    assert few.configs
    wanted = few.configs(key)[1]
    file = tmp_path / "own.json"
    tuning.write(file, Configs("", measured=True, kernels={"k": (Entry({}, Config(1, 1)),)}))
    for _ in range(2):  # the second time in place of the first
        found = list(tune([(few, key)], CPU, file, 60.0, clock(wanted, ran)))
    assert [(best.config, best.ms, best.tried) for best in found] == [(wanted, 1.0, 3)]
    assert str(found[0]).startswith(f"{spec.name} rows=2 size=32: ")
    kept = tuning.read(file)
    assert kept.measured and kept.kernels[spec.name] == (Entry(key, wanted),)
    assert kept.kernels["k"] == (Entry({}, Config(1, 1)),)


def test_a_configuration_that_fails_is_passed_over() -> None:
    key = {"rows": 1, "size": 16}
    ran: list[Config] = []
    few = small(elementwise.NORM, key, ran)

    def measure(run: Callable[[], object]) -> float:
        run()
        if len(ran) == 1:
            raise RuntimeError("too many resources")
        return float(len(ran))  # the later, the slower

    best = best_of(few, key, CPU, measure, float("inf"))
    assert best and (best.tried, best.failed) == (3, 1) and "1 failed" in str(best)
    assert few.configs and best.config == few.configs(key)[1]


def test_tuning_stops_when_its_time_is_over(tmp_path: Path) -> None:
    key = {"rows": 1, "size": 16}
    work = [(elementwise.NORM, key)] * 2
    assert list(tune(work, CPU, tmp_path / "none.json", 0.0)) == []
    assert best_of(elementwise.NORM, key, CPU, lambda run: 1.0, end=0.0) is None
    assert not (tmp_path / "none.json").exists()


def test_commands_say_what_they_need(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in (
        (["tune"], "tuning needs an NVIDIA GPU"),
        (["show"], "show --arch 90"),
        (["check"], "do not compile"),
        (["show", "--kernel", "nothing"], "no kernel nothing; there are "),
        (["show", "--module", "baton.errors", "--arch", "90"], "baton.errors has neither SPEC"),
    ):
        assert command.main(arguments) == 2
        assert text in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["--help"])
    assert {"\ncheck ", "\ntune ", "\nshow "} <= set(
        re.findall(r"\n(?:check|tune|show) ", capsys.readouterr().out)
    )


def test_show_prints_where_values_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["show", "--arch", "89,90", "--kernel", "silu_mul"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line for line in told if "reasoned, not measured" in line] == [
        f"{tuning.SHIPPED / name} (reasoned, not measured)" for name in ("sm_80.json", "sm_90.json")
    ]
    entries = json.loads((tuning.SHIPPED / "sm_90.json").read_text())["kernels"]["silu_mul"]
    assert len([line for line in told if line.startswith("  silu_mul ")]) == 2 * len(entries)
