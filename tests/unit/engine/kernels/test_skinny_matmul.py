"""Products of few rows with all that they take along, for every way to split the depth."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton.engine.kernels.torch.row_quantization import FP8, quantize_rows
from baton.engine.kernels.torch.rows import act_mul, rms_norm
from baton.engine.kernels.triton.skinny_matmul import (
    NAME,
    _candidates,
    new_counters,
    padded_rows,
    skinny_matmul,
)
from baton.engine.kernels.triton.tuning import SHIPPED, read

EPS = 1e-5
KINDS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8, "fp8": FP8}


def wanted(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, more: dict[str, Any]
) -> torch.Tensor:
    """In float32, step by step."""
    x = x.float()
    if more.get("norm") is not None:
        x = rms_norm(x, more["norm"].float(), EPS)
    found = x @ weight.float().T
    if more.get("scales"):
        found = found * more["scales"][0][:, None] * more["scales"][1]
    if bias is not None:
        found = found + bias.float()
    if more.get("activation"):
        found = act_mul(found, more["activation"])
    return found if more.get("residual") is None else found + more["residual"].float()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "outputs", "depth", "split", "along"),
    [
        (1, 64, 128, 1, ()),
        (1, 70, 200, 3, ("norm", "residual")),
        (9, 130, 72, 5, ("bias", "residual")),  # more parts than steps: some have none
        (16, 96, 256, 2, ("norm", "gelu_tanh", "bias")),
        (33, 70, 136, 2, ("swigluoai", "bias")),
        (64, 128, 192, 3, ("norm", "silu")),
        (64, 40, 64, 1, ("norm", "bias", "residual")),
    ],
)
def test_equals_the_steps(
    kind: str, rows: int, outputs: int, depth: int, split: int, along: tuple[str, ...]
) -> None:
    generator = torch.Generator().manual_seed(rows + depth)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    of, eight_bits = KINDS[kind], kind in ("int8", "fp8")
    dtype = torch.bfloat16 if eight_bits else of
    activation = next((name for name in along if name in ("silu", "gelu_tanh", "swigluoai")), None)
    x, weight = random(rows, depth), random(2 * outputs if activation else outputs, depth)
    weight *= depth**-0.5
    more: dict[str, Any] = {"activation": activation}
    if eight_bits:
        (x, of_rows), (weight, of_outputs) = (quantize_rows(one, of) for one in (x, weight))
        more["scales"] = of_rows, of_outputs
    else:
        x, weight = x.to(of), weight.to(of)
    bias = random(len(weight)).to(dtype) if "bias" in along else None
    if "norm" in along and not eight_bits:
        more.update(norm=random(depth).to(dtype), eps=EPS)
    if "residual" in along:
        more["residual"] = random(rows, outputs).to(dtype)
    expected = wanted(x, weight, bias, more)
    counters = new_counters(outputs, x.device)
    config = {"OUTPUTS": 64, "DEPTH": 64, "SPLIT": split}
    config |= {"num_warps": 4, "num_stages": 1}
    before = None if more.get("residual") is None else more["residual"].clone()
    for _ in range(2):  # counters and the rest are as they were
        if before is not None:
            more["residual"] = before.clone()
        found = skinny_matmul(x, weight, counters, bias, dtype=dtype, config=config, **more)
        assert found.dtype == dtype and not counters.any()
        error = (found.float() - expected).norm() / expected.norm()
        assert error < (4e-3 if dtype == torch.float16 else 1.2e-2)
        assert before is None or found is more["residual"], "the stream's own memory"


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


def test_every_architecture_has_a_configuration_for_every_kind() -> None:
    for file in SHIPPED.glob("*.json"):
        for kind in ("16-bit", "16-bit norm gate", "8-bit", "8-bit gate"):
            for rows in (1, 20, 64):
                key = {"kind": kind, "rows": padded_rows(rows), "outputs": 4096, "depth": 4096}
                assert read(file).nearest(NAME, key), (file, key)
