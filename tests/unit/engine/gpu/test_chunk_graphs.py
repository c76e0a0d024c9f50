"""Steps with chunks of prompts, padded to a captured shape: what they give without padding."""

import itertools
from dataclasses import replace

import pytest
import torch

from baton.config import EngineConfig
from baton.engine.backends.gpu import cuda_graphs
from baton.engine.backends.gpu.cuda_graphs import StepShape, chunk_sizes, shapes_of
from baton.engine.backends.gpu.device import Stream
from baton.engine.backends.gpu.runner import GpuRunner
from baton.engine.kv_cache import plan_layout
from baton.engine.sampling.sampler import Sampler
from baton.engine.scheduler import ScheduledSequence, ScheduledStep
from baton.engine.sequence import Sequence
from baton.generation.sampling_params import SamplingParams
from tests.unit.engine.gpu.models import CONFIGS, TINY, both, tokens

SETTINGS = EngineConfig(max_batch=4, chunk_tokens=16)
MAX_CONTEXT = 256
PARAMS = SamplingParams(max_tokens=4, logprobs=3, ignore_eos=True)
pytestmark = pytest.mark.usefixtures("few_rows")


class Stepped:
    """A runner over a pool that holds something, and which shapes its steps were padded to."""

    def __init__(self, model, kv_dtype=torch.float32, **settings):
        layout = plan_layout(model.config, kv_dtype, 16, 60, 0)
        self.pool = torch.zeros(layout.shape, dtype=kv_dtype)
        self.pool.view(torch.uint8)[0] = 1  # nobody's block
        self.before, self.shapes, self.found = self.pool.clone(), list[StepShape](), list[object]()
        self.runner = GpuRunner(
            model, self.pool, Sampler(frozenset(), TINY.vocab_size), replace(SETTINGS, **settings),
            MAX_CONTEXT, Stream(),
        )  # fmt: skip
        self._free = list(range(59, 0, -1))
        run = self.runner._graphs.run
        self.runner._graphs.run = lambda shape: self.shapes.append(shape) or run(shape)
        self.runner.capture()
        assert torch.equal(self.pool.view(torch.uint8), self.before.view(torch.uint8))

    def add(self, length, seed):
        count = -(-(length + 8) // 16) * self.runner.num_groups
        blocks = [self._free.pop() for _ in range(count)]
        return Sequence(f"{seed}", tokens(length, seed), length, PARAMS, block_ids=blocks)

    def step(self, *work):
        """Computes so many tokens of each sequence."""
        plan = ScheduledStep(
            [ScheduledSequence(one, one.num_computed, count) for one, count in work]
        )
        found = self.runner.run(plan)
        for one, count in work:
            one.num_computed += count
            if one.seq_id in found:
                one.tokens += found[one.seq_id].token_ids
        self.found.append(found)
        return self


def assert_same(padded, plain):
    """Equal tokens, logits as near as sums in another order are, and KV at the same places."""
    for some, others in zip(padded.found, plain.found, strict=True):
        assert some.keys() == others.keys()
        for name, expected in others.items():
            assert some[name].token_ids == expected.token_ids
            for one, wanted in zip(some[name].logprobs, expected.logprobs, strict=True):
                assert [token for token, _ in one.top] == [token for token, _ in wanted.top]
                scores = [[score for _, score in of.top] for of in (one, wanted)]
                assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    pools = [(one.pool.view(torch.uint8), one.before.view(torch.uint8)) for one in (padded, plain)]
    places = [(after != before).flatten(4).any(-1) for after, before in pools]
    assert torch.equal(*places) and places[0].any()
    if padded.pool.dtype == torch.float32:
        torch.testing.assert_close(padded.pool, plain.pool, rtol=0, atol=1e-5)


def pair(config=replace(TINY, num_layers=1, windows=(None,)), kv_dtype=torch.float32):  # noqa: B008
    _, gpu = both(config)
    return Stepped(gpu, kv_dtype), Stepped(gpu, kv_dtype, graphs=False)


def test_prompts_of_every_length_around_a_shapes_edges():
    runs = pair()
    for run in runs:
        for seed, length in enumerate((1, 2, 7, 8, 9, 15, 16)):
            run.step((run.add(length, seed), length))
    assert_same(*runs)
    chunks = [StepShape(4, rows, 16) for rows in (8, 8, 8, 16, 16, 16)]
    assert runs[0].shapes == [StepShape(1, 0, 16), *chunks]


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        ("mistral window, no gqa", torch.int8),
        ("gpt-oss", torch.float32),
        ("deepseek v3", torch.float32),
    ],
)
def test_several_prompts_in_chunks_behind_what_is_cached(name, kv_dtype):
    runs = pair(CONFIGS[name], kv_dtype)
    for run in runs:
        first, second = run.add(18, 1), run.add(16, 2)
        run.step((first, 5), (second, 3))
        third = run.add(9, 3)  # behind tokens of the first
        groups = run.runner.num_groups  # of layers, each with a block
        third.tokens[:5], third.num_computed = first.tokens[:5], 5
        third.block_ids[:groups] = first.block_ids[:groups]
        run.step((second, 1), (first, 11), (third, 4))
        run.step((second, 12), (first, 2))
    assert_same(*runs)
    assert [shape.chunk_rows for shape in runs[0].shapes] == [8, 16, 16]
    if runs[0].runner.expert_tokens is not None:  # of one model, which both counted in
        rows, config = 2 * (8 + 16 + 14), runs[0].runner.model.config
        counted = runs[0].runner.expert_tokens.sum(1).tolist()
        assert counted == [rows * config.experts.routing.per_token] * sum(config.experts.layers)


def test_chunks_beside_decode_rows():
    runs = pair(CONFIGS["gpt-oss"])
    for run in runs:
        decoding = [run.add(length, seed) for seed, length in enumerate((2, 3, 2))]
        run.step(*((one, one.num_tokens) for one in decoding))
        run.step(*((one, 1) for one in decoding))
        prompt = run.add(19, 9)
        run.step(*((one, 1) for one in decoding), (prompt, 13))
        run.step(*((one, 1) for one in decoding[1:]), (prompt, 5))
        run.step((prompt, 1), *((one, 1) for one in decoding))
    assert_same(*runs)
    shapes = [(shape.decodes, shape.chunk_rows) for shape in runs[0].shapes]
    assert shapes == [(4, 8), (4, 0), (4, 16), (4, 8), (4, 0)]


def test_steps_that_no_shape_holds_run_without_one():
    padded, plain = pair()
    for run in (padded, plain):
        run.step(*((run.add(2, seed), 2) for seed in range(cuda_graphs.MAX_CHUNKS + 1)))
        embedded = run.add(5, 30)
        embedded.params = replace(PARAMS, embedding=True)
        run.step((embedded, 5))
        run.step((run.add(5, 31), 5), (run.add(12, 32), 12))
    assert padded.shapes == []
    assert_same(padded, plain)


def test_which_shapes_are_captured(monkeypatch):
    settings = EngineConfig(max_batch=2, chunk_tokens=40)
    decoding = [StepShape(2, 16, 3), StepShape(2, 8, 3), StepShape(2, 0, 3), StepShape(1, 0, 3)]
    assert shapes_of(settings, 40) == decoding
    assert shapes_of(replace(settings, graphs=False), 40) == []
    widths = [shape.width for shape in shapes_of(settings, 16 * 2048)]
    assert widths == [2048, 128] * 2 + [2048, 512, 128] * 2
    monkeypatch.undo()
    assert chunk_sizes(8) == (64,)
    assert chunk_sizes(300) == (64, 128, 192, 256, 300)
    sizes = chunk_sizes(8192)
    assert sizes == cuda_graphs.CHUNK_SIZES and sizes[-1] == 2048
    padding = [(size - last - 1) / (last + 1) for last, size in itertools.pairwise(sizes)]
    assert all(share < 0.25 for share in padding[3:])
