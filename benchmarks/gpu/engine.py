"""Part "engine": decode steps and prompts of models with random weights, sampling included.

Each figure is beside its floor (the minimum of bytes and arithmetic at the measured ceilings), and
beside transformers, measured in turn. Decode steps also show how long the host waited for the
device: hardly at all if the host is slower. First the engine's tokens are compared with its
reference in float32.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from baton.config import EngineConfig
from baton.engine.backends.gpu.model import GpuModel
from baton.engine.backends.gpu.runner import GpuRunner
from baton.engine.build import Loaded
from baton.engine.kernels.triton.attention_specs import random_pool
from baton.engine.kv_cache import KvLayout, plan_layout
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.weight_loader import random_weights
from baton.engine.runner import Runner, StepRunner
from baton.engine.sampling.sampler import Sampler
from benchmarks.engine.adapters.protocol import Setup, Timed
from benchmarks.engine.adapters.transformers_model import Transformers
from benchmarks.engine.driver import Driver
from benchmarks.gpu.kernels import GROUPS, in_format
from benchmarks.gpu.part import Case, Cells, Part, is_fatal, summary
from benchmarks.shapes import GPU_SHAPES, Shape

BATCHES, CONTEXT, STEPS = (1, 8, 64, 256), 512, 64
PROMPTS, CHUNK = (512, 2048, 8192), 2048
_OF_EXPERTS = (1, 64), (512, 2048)  # batches and prompts
RIVAL_MOST, _RIVAL_STEPS = 64, 8  # maximum batch of transformers; its steps
# Settings to compare with greedy sampling: of all rows, and of the first row.
SAMPLING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "top-p": ({"temperature": 0.8, "top_p": 0.95}, {}),
    "one row with logprobs": ({}, {"logprobs": 5}),
    "one row with penalties": (
        {}, {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    ),
}  # fmt: skip
_SOAKED = (1, 16, 17, 60, 100, 150, 200, 250, 300, 400, 500, 700)  # tokens of prompts
_SKEWED = (32768,) + 63 * (1024,)  # contexts of a batch with uneven lengths
_SPARE = 6 << 30  # bytes for activations, graphs, and torch's cache

BLOCK_SIZE = EngineConfig.block_size
# Bytes of an element of a layer's matrix: int4 has a 16-bit scale for 64 elements, AWQ one for 128
# and a 4-bit zero, MXFP4 an 8-bit scale for 32; scales of 128 x 128 blocks are negligible.
_ELEMENT_BYTES = {"int8": 1.0, "fp8": 1.0, "fp8 in blocks": 1.0, "int4": 0.5 + 2 / 64,
                  "AWQ": 0.5 + 2.5 / 128, "MXFP4": 0.5 + 1 / 32}  # fmt: skip


@dataclass(frozen=True)
class Formats:
    """Formats of weights, KV and activations; name: one of FORMATS, or of a type."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    kv: torch.dtype = torch.bfloat16

    @property
    def weight_bytes(self) -> float:
        """Bytes of an element of a layer's matrix, including its share of the scales."""
        return _ELEMENT_BYTES.get(self.name, self.dtype.itemsize)

    @property
    def output_bytes(self) -> float:
        """Bytes of an element of the output layer's matrix, which never has four bits."""
        kept = self.name in GROUPS
        return self.dtype.itemsize if kept else max(1.0, self.weight_bytes)

    @property
    def eight_bits(self) -> bool:
        """Whether a layer's products multiply 8-bit rows and weights."""
        return self.name in ("int8", "fp8")

    def layout(self, shape: Shape, num_blocks: int = 1) -> KvLayout:
        """Layout of a KV pool."""
        sizes = (shape.layers, shape.kv_heads, BLOCK_SIZE, shape.head_size)
        return KvLayout(num_blocks, *sizes, self.kv)


BF16, FP8 = Formats("bf16"), Formats("fp8", kv=torch.float8_e4m3fn)
FLOAT32 = Formats("f32", torch.float32, torch.float32)
SMALL = Shape("small", 1024, 6, 16, 4, 2816, 8192)  # fast in float32


class OurEngine:
    """Weights and a pool, and drivers of engines over them.

    Not built by `baton.engine.build.load`, so that it runs on a CPU with interpreted kernels, and
    without protobuf.
    """

    def __init__(
        self, shape: Shape, formats: Formats, device: torch.device, num_blocks: int
    ) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(shape.config()), encoding="utf-8")
            self._config = config = ModelConfig.load(path)
        form = partial(in_format, name=formats.name)
        weights = random_weights(config, formats.dtype, device, 1, form)
        self._dtype, self._model_args = formats.dtype, (config, weights, formats.dtype, device)
        self._layout = plan_layout(config, formats.kv, BLOCK_SIZE, num_blocks, 0)
        self._sampler = Sampler(frozenset(), config.vocab_size)
        # Random: steps on zeros use less power.
        sizes = (config.num_layers, config.num_kv_heads, config.head_size)
        self._pool = random_pool(num_blocks, *sizes, formats.kv, device)
        assert tuple(self._pool.shape) == self._layout.shape

    def driver(
        self, batch: int, context: int, chunk: int, *, graphs: bool = False,
        reference: bool = False, prefix_cache: bool = False,
    ) -> Driver:  # fmt: skip
        """A driver of an engine as in a worker: overlapped steps, with CUDA graphs.

        reference: the model in plain torch, without overlap."""
        settings = EngineConfig(
            max_batch=batch, chunk_ms=1e6, chunk_tokens=chunk, prefix_cache=prefix_cache,
            graphs=graphs,
        )  # fmt: skip
        runner: StepRunner
        if reference:
            pool = torch.zeros_like(self._pool)
            runner = Runner(DecoderModel(*self._model_args), pool, self._sampler)
        else:
            model = GpuModel(*self._model_args)
            runner = on_gpu = GpuRunner(model, self._pool, self._sampler, settings, context)
            if graphs:
                on_gpu.capture()
        about = (Path(), self._config, runner, self._layout, self._dtype, "")
        return Driver(Loaded(*about, settings, context, prepare=lambda: None))


class Product(NamedTuple):
    """Products with one kind of matrix in a step: bytes of weights read, and operations."""

    weight_bytes: float
    flops: float
    eight_bits: bool


def products(shape: Shape, formats: Formats, tokens: int, logits: int) -> list[Product]:
    """Products of a step: attention's matrices, MLPs or selected experts, and the output layer.

    tokens: rows of the step · logits: rows with logits."""
    attention = 2 * shape.hidden * (shape.hidden + shape.kv_heads * shape.head_size)
    attention += shape.experts * shape.hidden  # the router
    read = shape.experts_taken(tokens) * shape.mlp_matrices if shape.experts else shape.mlp_matrices
    used = (shape.per_token or 1) * shape.mlp_matrices
    size, head = shape.layers * formats.weight_bytes, shape.vocab * shape.hidden
    eight = formats.eight_bits
    return [
        Product(size * attention, 2.0 * tokens * shape.layers * attention, eight),
        Product(size * read, 2.0 * tokens * shape.layers * used, eight),
        Product(head * formats.output_bytes, 2.0 * logits * head, eight),
    ]


def attention_flops(shape: Shape, tokens: int) -> float:
    """Operations of causal attention over a whole prompt."""
    return 4.0 * shape.layers * shape.heads * shape.head_size * tokens * (tokens + 1) / 2


def title_of(shape: Shape, formats: Formats, size: str = "") -> str:
    """Name of a row."""
    return f"{shape.name} {formats.name}" + (f", {size}" if size else "")


def run(part: Part) -> None:
    """Compares tokens with the reference, then measures each model."""
    part.measure(
        "engine against its reference",
        [("float32, greedy", partial(equality, part)), ("float32, soak", partial(soak, part))],
    )
    # Built one at a time, so that memory is freed before the next one.
    part.measure("decode", ((title_of(*one), Measuring(part, *one).run) for one in measured(part)))


def measured(part: Part) -> list[tuple[Shape, Formats]]:
    """The models to measure, and their formats."""
    experts = GPU_SHAPES[part.sized("A3B", "smoke experts")]
    first = [(part.models[0], one) for one in (BF16, FP8, Formats("int4"))]
    others = [(shape, BF16) for shape in (*part.models[1:], experts)]
    return [*first, *others, (part.models[0], Formats("fp8 in blocks"))]


def equality(part: Part) -> Cells:
    """Compares tokens of some prompts with plain torch's. Raises AssertionError if they differ."""
    shape = part.sized(SMALL, part.models[-1])
    lengths, new_tokens = part.sized(((1, 15, 16, 17, 300, 700), 32), ((17,), 2))
    ours = OurEngine(shape, FLOAT32, part.device, part.sized(512, 40))
    prompts = [random_prompt(shape, length) for length in lengths]
    limits = (8, 1024, 256)
    with closing(ours.driver(*limits, graphs=not part.smoke)) as driver:
        found = driver.generate(prompts, new_tokens)
    with closing(ours.driver(*limits, reference=True)) as driver:
        wanted = driver.generate(prompts, new_tokens)
    assert found == wanted, f"other tokens: {found} instead of {wanted}"
    return {"prompts": len(prompts), "tokens": len(prompts) * new_tokens, "other tokens": 0}


def soak(part: Part) -> Cells:
    """Adds, cancels and preempts sequences at random, in a pool too small for all.

    Finished sequences must have the tokens of one prompt at a time without graphs. Raises
    AssertionError.
    """
    shape = part.sized(SMALL, part.models[-1])
    lengths, new_tokens = part.sized((_SOAKED, 48), ((14, 15), 6))
    most, blocks, seconds = part.sized((24, 160, 12.0), (4, 5, 1.0))
    prompts = [random_prompt(shape, length) for length in lengths]
    ours, limits = OurEngine(shape, FLOAT32, part.device, blocks), (most, 1024, 256)
    with closing(ours.driver(*limits)) as driver:
        quiet = [driver.generate([prompt], new_tokens)[0] for prompt in prompts]
    with closing(ours.driver(*limits, graphs=not part.smoke, prefix_cache=True)) as driver:
        found = driver.soak(prompts, new_tokens, most, seconds)
    other = [
        f"prompt of {lengths[which]}: {tokens} instead of {quiet[which][: len(tokens)]}"
        for which, tokens in found.survivors
        if tokens != quiet[which][: len(tokens)]
    ]
    assert not other, f"other tokens of {len(other)} of {len(found.survivors)}: {other[0]}"
    assert found.survivors and (found.preemptions or part.smoke), f"it tried too little: {found}"
    tokens = sum(len(tokens) for _, tokens in found.survivors)
    return {
        "prompts": len(found.survivors), "tokens": tokens, "other tokens": 0,
        "cancelled": found.cancelled, "preemptions": found.preemptions,
    }  # fmt: skip


def random_prompt(shape: Shape, length: int) -> list[int]:
    """A random prompt, seeded by its length."""
    generator = torch.Generator().manual_seed(length)
    tokens: list[int] = torch.randint(shape.vocab, (length,), generator=generator).tolist()
    return tokens


class Measuring:
    """Measures one shape in one format, and transformers beside it if both fit in memory."""

    def __init__(self, part: Part, shape: Shape, formats: Formats) -> None:
        self.part, self.shape, self.formats = part, shape, formats
        self.rival: Transformers | None = None
        batches, prompts = _OF_EXPERTS if shape.experts else (BATCHES, PROMPTS)
        self.context, self.batches = part.sized(CONTEXT, 15), part.sized(batches, (2,))
        self.prompts = part.sized(prompts, (5,))
        self.warm_up, self.steps = part.sized((8, STEPS), (1, 1))
        compares = formats == BF16 and shape == part.models[0]
        self.skewed = part.sized(_SKEWED, (40, 5)) if compares else ()  # contexts

    def run(self) -> None:
        """Measures decode steps, prompts, and uneven batches."""
        part, title = self.part, self._title()
        part.free()
        if "fp8" in self.formats.name and not part.has_fp8:
            return part.note("decode", f"{title} is left out: this GPU has no fp8")
        beside = self.formats == BF16 and not self.shape.experts
        batches = self._fitting(beside)
        if beside and not batches:
            batches, beside = self._fitting(False), False
            part.note("decode", f"{self.shape.name} without transformers: no memory is left for it")
        ours = None
        if batches:
            with suppress(torch.OutOfMemoryError):
                blocks = self._blocks(max(batches))
                ours = OurEngine(self.shape, self.formats, part.device, blocks)
        if ours is None:
            return part.note("decode", f"{title} is left out: it does not fit the GPU's memory")
        if beside:
            options = {
                "config": self.shape.config(), "device": str(part.device), "attention": ("sdpa",)
            }  # fmt: skip
            try:
                self.rival = Transformers(Setup("", self.shape.vocab, 0, (), 0, 0, 0, options))
            except Exception as error:  # depends on its version
                self._no_rival("decode", "", error)
        # No prompt is computed, so few graphs with chunks are captured; in a dry run, by one model.
        limits = (max(batches), part.sized(2048, 64), BLOCK_SIZE)
        with closing(ours.driver(*limits, graphs=beside or not part.smoke)) as driver:
            part.measure("decode", self._decode_cases(driver, batches))
        limits = (8, part.sized(max(PROMPTS) + 64, 128), part.sized(CHUNK, 4))
        with closing(ours.driver(*limits, graphs=not part.smoke)) as driver:
            cases = [(self._title(f"{n} tokens"), partial(self.prefill, driver, n))
                     for n in self.prompts]  # fmt: skip
            part.measure("prefill", cases)
        if self.skewed and max(batches) >= len(self.skewed):
            limits = (len(self.skewed), max(self.skewed) + 2 * STEPS, BLOCK_SIZE)
            with closing(ours.driver(*limits, graphs=not part.smoke)) as driver:
                part.measure("decode compared", self._compared_cases(driver))
        return None

    def _title(self, size: str = "") -> str:
        return title_of(self.shape, self.formats, size)

    def _blocks(self, batch: int) -> int:
        """Blocks for decoding, or for the longest prompt if that needs more."""
        grown = 12 + self.steps
        decoding = (batch + 2) * -(-(self.context + grown) // BLOCK_SIZE)
        skewed = sum(-(-(context + grown) // BLOCK_SIZE) for context in self.skewed[:batch])
        return max(decoding, skewed, -(-(max(self.prompts) + 32) // BLOCK_SIZE)) + 8

    def _fitting(self, beside: bool) -> list[int]:
        """Batch sizes whose KV fits in memory with the weights, and with transformers if wanted."""
        wanted, shape = list(self.batches), self.shape
        if not self.part.cuda:
            return wanted
        room = float(torch.cuda.mem_get_info(self.part.device)[0] - _SPARE)
        room -= shape.num_parameters * self.formats.weight_bytes
        if beside:
            theirs = RIVAL_MOST * (CONTEXT + 2 * STEPS)
            room -= 2 * shape.num_parameters + 2 * theirs * BF16.layout(shape).bytes_per_token
        block = self.formats.layout(shape).num_bytes
        return [batch for batch in wanted if self._blocks(batch) * block <= room]

    def _decode_cases(self, driver: Driver, batches: list[int]) -> Iterator[Case]:
        for batch in batches:
            yield self._title(f"batch {batch}"), partial(self.decode, driver, batch)

    def decode(self, driver: Driver, batch: int) -> Cells:
        """Measures steps of one batch size, in turn with transformers if it is loaded."""
        part, steps, theirs = self.part, self.part.sized(_RIVAL_STEPS, 2), None
        if self.rival and batch <= RIVAL_MOST:
            theirs = partial(self.rival.decode, batch, self.context, steps)
        ours = partial(driver.decode, [self.context] * batch, self.warm_up, self.steps)
        step_s, rival = self._in_turn("decode", batch, ours, theirs, steps)
        cells: Cells = {
            "ms a step": step_s * 1e3, "tokens/s": batch / step_s,
            "waited us": driver.waited_s * 1e6, "of step waited": driver.waited_s / step_s,
        }  # fmt: skip
        if part.copy_bytes_per_s:
            middle = self.context + self.warm_up + self.steps // 2  # mean context of measured steps
            kv = batch * middle * self.formats.layout(self.shape).bytes_per_token
            floor = kv / part.copy_bytes_per_s + self._floor_s(batch, batch)
            cells |= {"floor ms": floor * 1e3, "of floor": floor / step_s}
        return cells | rival

    def _floor_s(self, tokens: int, logits: int) -> float:
        """Minimum seconds of a step's products at the measured ceilings."""
        found = products(self.shape, self.formats, tokens, logits)
        return sum(self.part.floor_s(one.weight_bytes, one.flops, one.eight_bits) for one in found)

    def _compared_cases(self, driver: Driver) -> Iterator[Case]:
        """Batches with uneven lengths or settings, beside even ones."""
        batch, (longest, others, *_) = len(self.skewed), self.skewed
        even = [sum(self.skewed) // batch] * batch
        yield (
            self._title(f"one context of {longest} among {batch - 1} of {others}"),
            partial(self._beside, driver, "evenly spread", even, self.skewed),
        )
        for name, (sampling, first) in SAMPLING.items():
            contexts = [self.context] * batch
            compared = partial(self._beside, driver, "greedy", contexts, contexts, first=first)
            yield self._title(f"batch {batch}, {name}"), partial(compared, **sampling)

    def _beside(
        self, driver: Driver, other: str, others: Items[int], contexts: Items[int], **settings: Any
    ) -> Cells:
        """Measures steps with these contexts and settings, in turn with greedy ones of `others`."""
        sizes = self.warm_up, self.steps
        rounds = [
            (driver.decode(contexts, *sizes, **settings), driver.decode(others, *sizes))
            for _ in range(self.part.sized(3, 1))
        ]
        step_s, other_s = (statistics.median(each) for each in zip(*rounds, strict=True))
        return {
            "ms a step": step_s * 1e3, "beside": other, "its ms": other_s * 1e3,
            "us more": (step_s - other_s) * 1e6, "ratio": step_s / other_s,
        }  # fmt: skip

    def prefill(self, driver: Driver, tokens: int) -> Cells:
        """Measures a prompt in chunks, to its first token."""
        if not self.part.smoke:
            driver.prefill(tokens)  # compiles kernels
        theirs = partial(self.rival.prefill, tokens) if self.rival else None
        ours_s, rival = self._in_turn("prefill", tokens, partial(driver.prefill, tokens), theirs)
        cells: Cells = {"ms": ours_s * 1e3, "tokens/s": tokens / ours_s}
        if rate := self.part.matmul_flops:
            attention = attention_flops(self.shape, tokens)
            floor = self._floor_s(tokens, 1) + attention / rate
            flops = sum(one.flops for one in products(self.shape, self.formats, tokens, 1))
            cells |= {"floor ms": floor * 1e3, "of floor": floor / ours_s}
            cells |= {"of matmul rate": (flops + attention) / rate / ours_s}
        return cells | rival

    def _in_turn(
        self, table: str, tokens: int, ours: Callable[[], float],
        theirs: Callable[[], Timed] | None, steps: int = 1,
    ) -> tuple[float, Cells]:  # fmt: skip
        """Our median seconds over rounds, and cells for transformers, measured in turn."""
        our_s, their_s, how = [], [], ""
        for _ in range(self.part.sized(3, 1)):
            our_s.append(ours())
            if theirs is None:
                continue
            try:
                seconds, how = theirs()
                their_s.append(seconds / steps)
            except Exception as error:  # depends on its version
                if is_fatal(error):
                    raise
                self._no_rival(table, f", {tokens}", error)
                theirs = None
        self.part.free()  # the next case has other sizes
        ours_s = statistics.median(our_s)
        if not their_s:
            return ours_s, {}
        rival_s = statistics.median(their_s)
        return ours_s, {
            "transformers tokens/s": tokens / rival_s, "x transformers": rival_s / ours_s,
            "its cache": how,
        }  # fmt: skip

    def _no_rival(self, table: str, size: str, error: Exception) -> None:
        self.part.note(table, f"{self.shape.name}{size}: no transformers: {summary(error)}")
