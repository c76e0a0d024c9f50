"""Groups of layers with windows: the same tokens, and no more blocks than the windows need."""

import random

import pytest
import torch

from baton.engine.sequence import Sequence
from baton.generation.sampling_params import SamplingParams
from tests.unit.engine.bench import Bench, load
from tests.unit.engine.checkpoints import make_checkpoint

WINDOW = 40
MODELS = {
    "one full layer, five with a window": (
        "Gemma3ForCausalLM",
        {"num_hidden_layers": 6, "sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    ),
    "every other layer, with sinks": (
        "GptOssForCausalLM",
        {"num_hidden_layers": 4, "sliding_window": WINDOW, "num_local_experts": 4},
    ),
    "all layers": ("MistralForCausalLM", {"num_hidden_layers": 2, "sliding_window": WINDOW}),
}
GREEDY = SamplingParams(max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, tmp_path_factory):
    architecture, changes = MODELS[request.param]
    directory = tmp_path_factory.mktemp("windowed")
    return directory, make_checkpoint(directory, architecture, **changes)


def prompt(length, seed=0):
    return random.Random(seed).choices(range(3, 300), k=length)


def greedy(reference, tokens, count):
    """What transformers gives, one token at a time over the whole text."""
    tokens = list(tokens)
    for _ in range(count):
        with torch.inference_mode():
            tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[-count:]


def a_sequence(name, tokens, params=GREEDY):
    return Sequence(name, list(tokens), len(tokens), params)


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_tokens_are_those_of_transformers(checkpoint, kernels):
    directory, reference = checkpoint
    prompts = {"long": prompt(150), "short": prompt(9, seed=1)}
    wanted = {name: greedy(reference, tokens, 64) for name, tokens in prompts.items()}
    loaded = load(directory, kernels=kernels, chunk_tokens=32)
    with Bench(loaded.engine) as bench:
        assert bench.tokens(*(a_sequence(*one) for one in prompts.items())) == wanted
        most = max(report.load.blocks_held for report in bench.reports)
        groups = loaded.layout.groups
        assert most <= sum(groups.most_blocks(len(one) + 64, 32) for one in prompts.values())
        # The prompt again, and a further turn of it, from what was cached.
        again = a_sequence("again", prompts["long"])
        assert bench.tokens(again) == {"again": wanted["long"]}
        assert again.num_cached == 144
        turn = [*prompts["long"], *wanted["long"], *prompt(20, seed=2)]
        further = a_sequence("further", turn)
        assert bench.tokens(further) == {"further": greedy(reference, turn, 64)}
        assert further.num_cached == 208
    few = load(directory, kernels=kernels, chunk_tokens=32, kv_blocks=groups.most_blocks(216, 32))
    with Bench(few.engine) as bench:
        both = (a_sequence(name, prompts["long"]) for name in ("one", "other"))
        assert bench.tokens(*both) == dict.fromkeys(("one", "other"), wanted["long"])
        assert bench.engine.load().result(10).preemptions
