"""Experts' kernels as a decode step launches them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from baton.engine.kernels.moe_routing import Routing
from baton.engine.kernels.triton import moe_routing
from tests.unit.engine.gpu.models import EXPERTS, TINY, both


@pytest.mark.parametrize("rows", [1, 4, 700])
def test_rows_of_padding_have_no_slot(rows: int) -> None:
    """No tile of theirs is multiplied: not one weight is read for them."""
    scores = torch.randn(rows, 40, generator=torch.Generator().manual_seed(rows))
    totals = torch.zeros(40, dtype=torch.int64)
    lengths = torch.zeros(rows, dtype=torch.int32)
    slots = moe_routing.route(scores, Routing(3, True), None, None, lengths, totals)
    assert (slots.taken == -1).all() and not totals.any()
    assert slots.tiles is None or (slots.tiles[:, 0] == -1).all()


class Launches(TorchDispatchMode):
    """Notes what would be launched on a GPU: kernels of Triton, which are not run, and torch's that
    compute.
    """

    NONE = ("empty", "new_empty", "empty_like", "view", "detach", "t")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []

        def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
            self.names.append(executor.fn.__name__)

        monkeypatch.setattr(GridExecutor, "__call__", launch)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func.overloadpacket.__name__) not in self.NONE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("rows", "launched"),
    [
        (1, ["_route", "_fused_moe", "_fused_moe", "_moe_sum"]),
        (5, ["_skinny_matmul", "_route", "_sort", "_fused_moe", "_fused_moe", "_moe_sum"]),
        (300, ["linear", "_route", "_sort", "_fused_moe", "_fused_moe", "_moe_sum"]),
    ],
)
def test_a_mixture_is_few_launches(
    rows: int, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a layer without one that all tokens take."""
    experts = replace(EXPERTS, count=64)
    config = replace(TINY, architecture="Qwen3MoeForCausalLM", experts=experts)
    gpu = both(config, torch.bfloat16)[1]
    x = torch.randn(rows, config.hidden_size, dtype=torch.bfloat16)
    lengths = torch.ones(rows, dtype=torch.int32)
    layer, placed = gpu._weights.layers[0], SimpleNamespace(lengths=lengths)
    assert layer.experts is not None
    mix = partial(gpu._experts, x, layer, layer.experts, placed, 0)
    with torch.inference_mode(), Launches(monkeypatch) as launches:
        mix()  # makes what later launches use
        launches.names.clear()
        mix()
    assert launches.names == launched
