"""Where rows lie, padded steps, their graphs, and the steps that run before requests."""

import logging
import random
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config import EngineConfig
from baton.engine.backends.gpu import cuda_graphs
from baton.engine.backends.gpu.cuda_graphs import (
    KNOWN,
    MAX_CHUNKS,
    PADDING,
    StepGraphs,
    StepInputs,
    StepShape,
    batch_sizes,
    num_elements,
    shapes_of,
    split_inputs,
    table_widths,
)
from baton.engine.backends.gpu.device import Stream
from baton.engine.backends.gpu.device_sampling import SamplingGraphs
from baton.engine.backends.gpu.input_batch import InputBatch
from baton.engine.backends.gpu.warmup import largest_captured, step_shapes, warm_up
from baton.engine.batch import StepBatch
from baton.engine.collectives import SINGLE_RANK
from baton.engine.kernels.torch.attention import place
from baton.engine.kernels.triton import sampling
from baton.engine.kernels.triton.launch_configs import tile_rows
from baton.engine.kernels.triton.slot_mapping import map_slots
from baton.engine.runner import sample_rows
from baton.engine.scheduler import ScheduledSequence
from baton.engine.sequence import Sequence
from baton.errors import ConfigError
from baton.generation.sampling_params import SamplingParams
from tests.unit.engine.gpu.driving import CONFIG, MODEL, SIZE, gpu_runner, new_pool
from tests.unit.engine.paged import ints


@given(st.integers(1, 1024))
def test_every_batch_finds_a_size_with_little_padding(max_batch):
    sizes = batch_sizes(max_batch)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == max_batch
    for rows in range(1, max_batch + 1):
        padding = next(size for size in sizes if size >= rows) - rows
        assert padding < max(8, rows / 4)


def test_tables_are_padded_to_few_widths():
    assert [table_widths(widest) for widest in (200, 256, 2048, 8192)] == [
        (200,), (256,), (128, 512, 2048), (128, 512, 2048, 8192),
    ]  # fmt: skip


@given(st.integers(0, 300), st.sampled_from((0, 64, 100)), st.integers(1, 70), st.integers(0, 3))
def test_sections_are_aligned_apart_and_fit_their_memory(decodes, chunk_rows, width, states):
    shape = StepShape(decodes, chunk_rows, width, state_blocks=states)
    flat = torch.zeros(num_elements(shape), dtype=torch.int32)
    *apart, whole = split_inputs(flat, shape)
    for number, part in enumerate(apart, 1):
        assert part.is_contiguous()
        assert not part.numel() or (part.data_ptr() - flat.data_ptr()) % 128 == 0
        part.fill_(number)
    assert all(bool((part == number).all()) for number, part in enumerate(apart, 1))
    chunks, padding = (MAX_CHUNKS, 1) if chunk_rows else (0, 0)
    tokens, contexts, lengths, logit_rows, sources, _, positions, *_ = map(len, apart)
    assert (tokens, sources) == (decodes + chunk_rows, decodes)
    assert contexts == decodes + chunks + padding and positions == decodes + chunks
    assert (lengths, logit_rows) == ((contexts, positions) if chunk_rows else (0, 0))
    assert len(whole) == len(flat)
    for smaller in (
        StepShape(max(0, decodes - 1), chunk_rows, width),
        StepShape(decodes, 0, width),
    ):
        assert num_elements(smaller) <= len(flat)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30))
def test_inputs_are_those_of_their_sequences_whatever_happens_to_them(seed):
    dice, batch = random.Random(seed), InputBatch(3, 10)
    alive = [a_sequence(dice, str(number)) for number in range(9)]
    before: list[Sequence] = []
    some = alive[:2]
    for _ in range(30):
        if dice.random() < 0.5:
            some = dice.sample(alive, dice.randint(1, 3))
        for one in some:
            change = dice.randrange(5)
            if change == 0:
                one.block_ids = [dice.randrange(1, 50) for _ in range(dice.randint(1, 10))]
            elif change == 1 and len(one.block_ids) < 10:
                one.block_ids.append(dice.randrange(1, 50))
            elif change == 2:
                one.tokens.append(dice.randrange(90))
            elif change == 3 and dice.random() < 0.2:
                one.dropped = True
                alive[alive.index(one)] = some[some.index(one)] = a_sequence(dice, one.seq_id)
        check_inputs(dice, batch, some, before)
        before = list(some)


def a_sequence(dice, name):
    tokens = [dice.randrange(90) for _ in range(dice.randint(1, 9))]
    changes = {"min_tokens": 4}, {"logprobs": 1}, {"frequency_penalty": 0.5}, {}, {}, {}
    params = SamplingParams(
        temperature=dice.choice((0.0, 0.7)), top_k=dice.randrange(9), seed=dice.getrandbits(64),
        top_p=dice.random(), min_p=dice.random(), **dice.choice(changes),
    )  # fmt: skip
    return Sequence(name, tokens, dice.randint(1, len(tokens)), params, block_ids=[7])


def check_inputs(dice, batch, some, before):
    count, size, width = len(some), 4, dice.choice((5, 10))
    shape = StepShape(size, 0, width)
    into = arrays(shape)
    work = [ScheduledSequence(one, len(one.tokens) - 1, 1) for one in some]
    sources = batch.sources(some, before)
    assert sources.tolist() == [before.index(o) if o in before else KNOWN for o in some]
    known = [at for at, source in enumerate(sources) if source == KNOWN]
    apart = batch.write(work, shape, sources, into)
    rows = [next(sample_rows(item)) for item in work]
    assert apart.tolist() == [at for at, row in enumerate(rows) if not row.plain]
    assert [int(into.token_ids[at]) for at in known] == [some[at].tokens[-1] for at in known]
    assert into.context_lens.tolist() == [
        *(len(one.tokens) - 1 for one in some), *[PADDING] * (size - count)
    ]  # fmt: skip
    assert into.positions.tolist() == [*(len(one.tokens) for one in some), *[0] * (size - count)]
    assert into.seeds[:count].view(np.uint64).tolist() == [one.params.seed for one in some]
    assert into.settings[:count].tolist() == [
        [p.temperature, p.top_k, p.top_p, p.min_p] for p in (one.params for one in some)
    ]
    tables = [(one.block_ids + [0] * 10)[:width] for one in some]
    assert into.block_tables.tolist() == [*tables, *[[0] * width] * (size - count)]


def arrays(shape):
    """A launch's inputs, in memory that holds something."""
    flat = torch.full((num_elements(shape),), -9, dtype=torch.int32)
    return StepInputs(*(part.numpy() for part in split_inputs(flat, shape)))


def test_inputs_of_chunks_lie_behind_those_of_decode_rows():
    def sequence(tokens, blocks, **params):
        return Sequence("", tokens, 1, SamplingParams(seed=tokens[0], **params), block_ids=blocks)

    work = [
        ScheduledSequence(sequence([3, 4], [1]), 1, 1),
        ScheduledSequence(sequence([5, 6, 7], [2]), 1, 1),  # another token is behind it
        ScheduledSequence(sequence([8, 9, 10, 11], [3, 4], logprobs=1), 1, 3),
        ScheduledSequence(sequence([12, 13, 14], [5], logprobs=1), 0, 2),  # and here
        ScheduledSequence(sequence([15, 16], [6]), 0, 2),
    ]
    shape, batch = StepShape(4, 20, 2), InputBatch(5, 2)
    into = arrays(shape)
    apart = batch.write(work, shape, np.array([2, KNOWN]), into)
    absent = MAX_CHUNKS - 3
    assert apart.tolist() == [1], "of the three works that sample"
    assert into.token_ids.tolist() == [0, 6, 0, 0, 9, 10, 11, 12, 13, 15, 16, *[0] * 13]
    assert into.context_lens.tolist() == [1, 1, -1, -1, 1, 0, 0, *[PADDING] * (absent + 1)]
    assert into.query_lens.tolist() == [1, 1, 1, 1, 3, 2, 2, *[0] * absent, 13]
    assert into.logit_rows.tolist() == [0, 1, 0, 0, 6, 8, 10, *[0] * absent]
    assert into.sources.tolist() == [2, KNOWN, KNOWN, KNOWN]
    assert into.positions.tolist() == [2, 0, 0, 0, 4, 0, 2, *[0] * absent]
    assert into.seeds[[0, 1, 4, 5, 6]].tolist() == [3, 5, 8, 12, 15]
    assert into.block_tables[:7].tolist() == [
        [1, 0], [2, 0], [0, 0], [0, 0], [3, 4], [5, 0], [6, 0]
    ]  # fmt: skip
    assert not into.block_tables[7:].any()


class FailingStream(Stream):
    def call(self, work):
        raise RuntimeError("operation not permitted when stream is capturing")


def test_a_graph_is_captured_on_the_engines_stream_after_a_first_run_and_replayed(monkeypatch):
    """With torch's calls recorded in place of a GPU's."""
    calls, stream = [], Stream()
    stream.cuda, stream.graph_pool = object(), object()
    graph = SimpleNamespace(replay=lambda: calls.append("replay"))

    @contextmanager
    def capturing(captured, **options):
        assert captured is graph
        assert options == {
            "pool": stream.graph_pool, "stream": stream.cuda, "capture_error_mode": "thread_local"
        }  # fmt: skip
        calls.append("begin")
        yield
        calls.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(cuda_graphs, "_unowned", lambda logits: logits)
    settings = EngineConfig(max_batch=1, block_size=SIZE, chunk_tokens=8)
    graphs = StepGraphs(MODEL, new_pool(2), stream, settings, 4 * SIZE)
    compute = graphs._compute
    graphs._compute = lambda shape: (calls.append("compute"), compute(shape))[1]
    with torch.inference_mode():
        graphs.capture()
        once = ["compute", "begin", "compute", "end"]
        assert calls == once * len(shapes_of(settings, 4 * SIZE))
        logits = graphs.run(graphs.decode_shape(1, 1))
    assert calls[-2:] == ["end", "replay"] and logits.shape == (1, CONFIG.vocab_size)


def test_captured_shapes_are_replayed_give_the_same_and_leave_the_pool_alone(caplog):
    caplog.set_level(logging.INFO)
    pool, replayed = new_pool(12), []
    of_blocks = EngineConfig(max_batch=5, block_size=SIZE, chunk_tokens=8)
    with torch.inference_mode():
        graphs = StepGraphs(MODEL, pool, Stream(), of_blocks, 16 * SIZE)
        graphs.capture()
        assert len(graphs._captured) == len(shapes_of(of_blocks, 16 * SIZE)) == 5
        assert "captured 5 of 5 steps as CUDA graphs" in caplog.messages
        assert not pool.any()
        pool += torch.linspace(-1, 1, pool.numel()).view_as(pool)
        for rows, size in enumerate((1, 2, 4, 4, 5), 1):
            shape = graphs.decode_shape(rows, 3)
            assert shape == StepShape(size, 0, 16)
            inputs = graphs.inputs(shape)
            inputs.token_ids.copy_(torch.arange(size) + 3)
            inputs.context_lens.fill_(PADDING)
            inputs.context_lens[:rows] = torch.arange(rows) + 2
            inputs.block_tables.zero_()
            inputs.block_tables[:rows, :3] = torch.arange(3) + torch.arange(rows)[:, None]
            mine = pool.clone()
            expected = MODEL.decode(
                inputs.token_ids, inputs.context_lens, inputs.block_tables, mine
            )
            captured = graphs._captured[shape]
            graphs._captured[shape] = lambda run=captured: (replayed.append(1), run())[1]
            got = graphs.run(shape)
            graphs._captured[shape] = captured
            assert got.shape == (size, CONFIG.vocab_size)
            assert torch.equal(got[:rows], expected[:rows])
            assert torch.equal(pool, mine)
    assert len(replayed) == 5


def sampling_graphs(model, max_batch, stream):
    of_blocks = EngineConfig(max_batch=max_batch, block_size=SIZE, graphs=False)
    return SamplingGraphs(model, new_pool(2), stream, of_blocks, 4 * SIZE, 8)


class Bf16Model:
    collectives, num_groups = SINGLE_RANK, 1
    logits = torch.linspace(-3, 3, 14, dtype=torch.bfloat16).view(2, 7)

    @property
    def local_shard(self):
        return self

    def on_all_ranks(self, *_):
        return nullcontext()

    def state_blocks(self, pool):
        return 0

    def decode(self, token_ids, *_):
        return self.logits[: len(token_ids)]


def test_a_step_samples_from_logits_as_they_are(monkeypatch):
    """No pass over them makes them float32."""
    given_to = []
    monkeypatch.setattr(sampling, "sample", lambda logits, *rest: given_to.append(logits))
    graphs, shape = sampling_graphs(Bf16Model(), 2, Stream()), StepShape(2, 0, 4)
    with torch.inference_mode():
        graphs.inputs(shape).sources.fill_(KNOWN)
        logits = graphs.run(shape)
    assert torch.equal(logits, Bf16Model.logits)
    assert given_to[-1] is logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_goes_on_with_what_the_one_before_has_sampled(dtype):
    class Model(Bf16Model):
        fed: list[int] = []  # noqa: RUF012

        def decode(self, token_ids, *_):
            self.fed = token_ids.tolist()
            return torch.eye(8, dtype=dtype)[torch.tensor(self.fed) + 1]

    model = Model()
    graphs, shape = sampling_graphs(model, 4, Stream()), StepShape(4, 0, 4)
    with torch.inference_mode():
        at = graphs.inputs(shape)
        at.sources.fill_(KNOWN)
        at.token_ids.copy_(torch.tensor([1, 3, 5, 0]))
        at.positions.fill_(1)
        graphs.run(shape)
        assert graphs.tokens.tolist() == [2, 4, 6, 1]
        at.sources.copy_(torch.tensor([2, 0, KNOWN, 1]))
        at.token_ids.copy_(torch.tensor([0, 0, 4, 0]))
        graphs.run(shape)
    assert model.fed == [6, 2, 4, 4]
    assert graphs.tokens.tolist() == [7, 3, 5, 5]


def test_steps_that_cannot_be_captured_are_an_error_with_the_option_that_helps():
    with pytest.raises(ConfigError, match=r"not permitted.*--no-graphs"):
        gpu_runner(FailingStream(), 1).capture()


def test_warm_up_runs_every_shape_in_one_block(monkeypatch):
    step, seen = MODEL.step, set[tuple[int, int, int]]()

    def watched(batch, pool):
        logits = step(batch, pool)
        assert logits.shape == (len(batch.query_lens), CONFIG.vocab_size)
        rows = len(batch.token_ids)
        seen.add((batch.num_decodes, rows - batch.num_decodes, batch.block_tables.shape[1]))
        return logits

    monkeypatch.setattr(MODEL, "step", watched)
    pool = new_pool(4)
    warm_up(MODEL, pool, EngineConfig(max_batch=3, block_size=SIZE, chunk_tokens=10), 24)
    chunks = {(0, 2, 1), (0, 3, 1), (0, 4, 1), (0, 6, 2), (0, 8, 2), (0, 12, 3), (0, 13, 4)}
    num_decodes = {(1, 0, 1), (2, 0, 1), (3, 0, 1)}
    assert seen == chunks | num_decodes | {(1, 2, 1)}
    assert pool[0].any() and not pool[1:].any()


def test_memory_is_measured_with_the_largest_step_that_is_captured(monkeypatch):
    step, seen = MODEL.step, []

    def watched(batch, pool):
        seen.append((batch.num_decodes, batch.query_lens.tolist()))
        return step(batch, pool)

    monkeypatch.setattr(MODEL, "step", watched)
    config = EngineConfig(max_batch=3, block_size=SIZE, chunk_tokens=70)
    for one in (config, replace(config, graphs=False)):
        largest_captured(MODEL, new_pool(1), one, 24)
    chunks = [23, 23, 23]
    assert seen == [(4, [1] * 4 + chunks), (3, [1] * 3)]


def assert_warmed_up(max_context, tiling, steps):
    """`tiling` of (decode rows, rows of a chunk, table width) decides what is compiled."""
    shapes = step_shapes(EngineConfig(max_batch=64, chunk_tokens=512), max_context)
    compiled = {tiling(*shape) for shape in shapes}
    assert {tiling(*step) for step in steps} <= compiled


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
def test_warm_up_compiles_every_tile_of_chunks_that_a_step_can_have(group):
    def tiling(_, chunk, width):
        return tile_rows(chunk, 1, group) if chunk > 1 else None

    # Sequences with proposed tokens are chunks, too.
    assert_warmed_up(4096, tiling, [(0, rows, 1) for rows in range(2, 512 + 64 + 1)])


def batch(query_lens, context_lens, block_size):
    """Sequences over scattered blocks, their block_tables one block wider than they need."""
    width = max(map(sum, zip(context_lens, query_lens, strict=True))) // block_size + 2
    block_tables = torch.randperm(
        len(query_lens) * width, generator=torch.Generator().manual_seed(5)
    ).int()
    return StepBatch(
        token_ids=torch.zeros(sum(query_lens), dtype=torch.int32),
        context_lens=ints(context_lens),
        query_lens=ints(query_lens),
        block_tables=block_tables.view(len(query_lens), width),
        logit_rows=ints([]),
        num_decodes=query_lens.count(1),
    )


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [
        ([1], [0]),
        ([1, 1, 1], [0, 15, 100]),
        ([5], [0]),
        ([1, 1, 7, 40, 2], [31, 4, 0, 16, 333]),
        ([300, 2], [0, 16]),
        ([1] * 40 + [3] * 30, [7] * 70),
    ],
)
def test_rows_lie_where_the_torch_model_puts_them(query_lens, context_lens, block_size):
    step = batch(query_lens, context_lens, block_size)
    got = map_slots(
        step.context_lens, step.query_lens, step.block_tables, sum(query_lens), block_size
    )
    assert all(part.dtype == torch.int32 for part in (got.positions, got.slots, got.lengths))
    positions, (attention,) = place(step, block_size)
    assert got.positions.tolist() == positions.tolist()
    assert got.slots.tolist() == attention.slots.tolist()
    num_decodes = step.num_decodes
    assert got.lengths[:num_decodes].tolist() == attention.decode_lengths.tolist()


@pytest.mark.parametrize("rows", [1, 2, 3, 33])
def test_kernels_find_aligned_addresses_whatever_the_number_of_rows(rows):
    """Triton compiles a kernel once more for others."""
    got = map_slots(ints([0] * rows), None, torch.zeros((rows, 1), dtype=torch.int32), rows, 16)
    for part in (got.positions, got.slots, got.lengths):
        assert part.is_contiguous() and part.data_ptr() % 16 == 0
