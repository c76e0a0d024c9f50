"""How far loading is, told once a second; which seed stands for weights that were made up."""

import logging

import torch

from baton.config import EngineConfig
from baton.engine.models.config import ModelConfig
from baton.engine.weights.weights import LoadProgress, random_seed, random_weights, weights_of
from tests.unit.engine.checkpoints import make_checkpoint

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GIB = 1 << 30


def test_progress_is_told_once_a_second_with_rate_and_time_left(caplog):
    times = iter([0.0, 0.5, 2.0, 2.9, 4.0])
    progress = LoadProgress(lambda: next(times))
    caplog.set_level(logging.INFO)
    for done in (1, 3, 4, 6):
        progress(done * GIB, 8 * GIB)
    assert [record.getMessage() for record in caplog.records] == [
        "loading weights: 3.00 of 8.00 GiB, 1.50 GiB/s, 3 s left",
        "loading weights: 6.00 of 8.00 GiB, 1.50 GiB/s, 1 s left",
    ]


def test_weights_that_differ_have_different_seeds():
    stored, made_up = EngineConfig(), EngineConfig(random_weights=True)
    simulated = EngineConfig(random_weights=True, simulate="1,1")
    assert random_seed(stored, CPU) is random_seed(stored, GPU) is None
    seeds = [random_seed(made_up, CPU), random_seed(made_up, GPU), random_seed(simulated, CPU)]
    assert len(set(seeds)) == 3
    assert random_seed(made_up, torch.device("cuda", 3)) == seeds[1]


def test_made_up_weights_of_a_cpu_stay_what_they_are(tmp_path):
    """Workers of other versions, and figures that were published, hold the same ones."""
    make_checkpoint(tmp_path)
    config = ModelConfig.load(tmp_path)
    settings = EngineConfig(str(tmp_path), random_weights=True)
    weights = weights_of(
        settings, tmp_path, config, torch.float32, CPU, lambda matrix: matrix, "torch"
    )
    drawn = torch.empty(320, 64).normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    assert torch.equal(weights.embedding, drawn)
    again = random_weights(config, torch.float32, CPU, 0)
    assert torch.equal(weights.lm_head, again.lm_head)
