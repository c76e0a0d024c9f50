"""A model in 8 bits: the same bits however a prompt is fed, close to itself in full precision."""

from __future__ import annotations

import pytest
import torch

from tests.unit.engine.quantized import Kind, feed, run_of, tokens

# bfloat16 by torch is left out: there attention itself trades the promise for speed.
PLACES = (("torch", torch.float32), ("native", torch.float32), ("native", torch.bfloat16))
HELD = ((True, False), (False, True), (True, True))
KINDS = [Kind(*place, *held) for place in PLACES for held in HELD]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_tokens_do_not_know_their_batch(kind: Kind) -> None:
    run = run_of(kind, window=50)
    mine = tokens(150, seed=1)
    whole = feed(run, run.add(mine), 150)
    for chunk in (1, 7, 64):
        assert torch.equal(feed(run, run.add(mine), chunk), whole), f"chunks of {chunk}"
    others = [run.add(tokens(length, seed=length), room=2) for length in (5, 300)]
    for other in others:
        feed(run, other, 128)
        other.tokens += tokens(2, seed=9)
    sequence = run.add(mine)
    run.step((sequence, 120))
    got = run.step((others[0], 1), (others[1], 1), (sequence, 1))[2]
    assert torch.equal(got[0], whole[120])
    got = run.step((others[0], 1), (others[1], 1), (sequence, 20))[2]
    assert torch.equal(got, whole[121:141])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_probabilities_stay_close_to_those_in_full_precision(kind: Kind) -> None:
    run, full = run_of(kind), run_of(Kind("torch"))
    mine = tokens(150, seed=1)
    found, wanted = (feed(one, one.add(mine), 64).log_softmax(-1) for one in (run, full))
    assert not torch.equal(found, wanted)
    divergence = (wanted.exp() * (wanted - found)).sum(-1)
    assert divergence.mean() < 5e-3
    assert divergence.max() < 5e-2


@pytest.mark.parametrize("held", HELD, ids=("weights", "kv", "both"))
def test_native_code_computes_what_torch_does(held: tuple[bool, bool]) -> None:
    mine = tokens(150, seed=1)
    runs = [
        run_of(Kind(kernels, torch.float32, *held), window=50) for kernels in ("native", "torch")
    ]
    native, reference = (feed(run, run.add(mine), 64) for run in runs)
    # All but equal; a number in the middle between two units may go either way, and a whole unit.
    difference = (native - reference).abs()
    assert difference.median() < 1e-4 * reference.std()
    assert difference.max() < 0.3 * reference.std()
