"""Products of few rows with their fused operations, for every way to split the depth."""

from __future__ import annotations

import pytest
import torch

from baton.engine.kernels.triton.launch_configs import SHIPPED, read
from baton.engine.kernels.triton.skinny_matmul import (
    NAME,
    _candidates,
    _trial,
    new_counters,
    skinny_matmul,
)
from baton.engine.kernels.triton.specs import relative_error

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["fp16", "bf16", "int8", "fp8"])
@pytest.mark.parametrize(
    ("rows", "outputs", "depth", "split", "fused"),
    [
        (1, 64, 128, 1, ()),
        (1, 70, 200, 3, ("norm", "residual")),
        (9, 130, 72, 5, ("bias", "residual")),  # more parts than steps: some are empty
        (16, 192, 256, 2, ("norm", "gelu_tanh", "bias")),
        (33, 140, 136, 2, ("swigluoai", "bias")),
        (64, 256, 192, 3, ("norm", "gate")),
        (64, 40, 64, 1, ("norm", "bias", "residual")),
    ],
)
def test_every_split_equals_the_reference(
    kind: str, rows: int, outputs: int, depth: int, split: int, fused: tuple[str, ...]
) -> None:
    torch.manual_seed(rows + depth)
    shape: dict[str, int | str] = {"rows": rows, "outputs": outputs, "depth": depth}
    shape |= {"dtype": kind, **dict.fromkeys(fused, 1)}
    if kind in ("int8", "fp8"):
        shape |= {"dtype": "bf16", "weight": kind, "norm": 0}
    trial = _trial(shape, CPU)
    config = {"OUTPUTS": 64, "DEPTH": 64, "SPLIT": split, "num_warps": 4, "num_stages": 1}
    for _ in range(2):  # a launch resets its counters
        ((found,), (wanted,)) = trial.run(config), trial.reference()
        assert relative_error(found, wanted) <= 1


def test_int8_sums_are_exact() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = (
        torch.randint(-127, 128, (n, 512), generator=generator).to(torch.int8) for n in (20, 96)
    )
    scales = torch.ones(20), torch.ones(96)
    config = {"OUTPUTS": 64, "DEPTH": 128, "SPLIT": 3, "num_warps": 4, "num_stages": 1}
    counters = new_counters(96, x.device)
    found = skinny_matmul(x, weight, counters, dtype=torch.float32, scales=scales, config=config)
    assert torch.equal(found, (x.int() @ weight.int().T).float())


@pytest.mark.parametrize("kind", ["16-bit", "16-bit gate", "8-bit", "8-bit gate"])
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(("outputs", "depth"), [(3072, 2048), (4096, 14336), (28672, 4096)])
def test_candidates_fit_a_multiprocessor(kind: str, rows: int, outputs: int, depth: int) -> None:
    found = _candidates({"kind": kind, "rows": rows, "outputs": outputs, "depth": depth})
    assert len(found) >= 4
    assert len({tuple(config.values()) for config in found}) == len(found)
    size, width = 2 if "16" in kind else 1, 2 if "gate" in kind else 1
    assert ({"LIBRARY": 1} in found) == (size == 2)
    for config in found[size == 2 :]:
        tile = (width * config["OUTPUTS"] + rows) * config["DEPTH"] * size
        assert config["num_stages"] * tile <= 227 * 1024


@pytest.mark.parametrize(("name", "most"), [("sm_80", 99), ("sm_90", 227), ("sm_100", 227)])
def test_shipped_configurations_fit_a_multiprocessor(name: str, most: int) -> None:
    """Of A100's relatives the smallest, too, which have 99 KB."""
    ours = 0
    for when, config in read(SHIPPED / f"{name}.json").kernels[NAME]:
        if "LIBRARY" in config:
            continue
        kind, rows = str(when["kind"]), int(when["rows"])
        size, width = 2 if "16" in kind else 1, 2 if "gate" in kind else 1
        step = (width * config["OUTPUTS"] + rows) * size + (4 if "norm" in kind else 0)
        assert config["num_stages"] * config["DEPTH"] * step <= most * 1024, (when, config)
        ours += 1
    assert ours >= 10
