"""Part "engine": decode steps and prompts of whole models with made-up weights, sampling included.

Beside each figure stands its floor, the bytes and the arithmetic that no engine gets around at the
rates that the device was measured to have, and transformers in turn with it; of decode steps also
how long the host waited for the device: next to nothing where it was the slower of both. First of
all the engine is compared with its reference in float32: the same tokens.
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
from baton.engine.models.loader import random_weights
from baton.engine.models.model_config import ModelConfig
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
RIVAL_MOST, _RIVAL_STEPS = 64, 8  # sequences of transformers; its steps
# What a step of a batch is compared with greedy sampling for: all rows' settings, the first row's.
SAMPLING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "top-p": ({"temperature": 0.8, "top_p": 0.95}, {}),
    "one row with logprobs": ({}, {"logprobs": 5}),
    "one row with penalties": (
        {}, {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    ),
}  # fmt: skip
_SOAKED = (1, 16, 17, 60, 100, 150, 200, 250, 300, 400, 500, 700)  # tokens of prompts
_SKEWED = (32768,) + 63 * (1024,)  # contexts of a batch
_SPARE = 6 << 30  # bytes for activations, graphs, and what torch keeps

BLOCK_SIZE = EngineConfig.block_size
# Of an element of a layer's matrix: int4's groups of 64 and AWQ's of 128 have scales of 16 bits,
# AWQ's zeros of 4, blocks' scales of 128 x 128 are nothing, and MXFP4's are of 8 bits.
_ELEMENT_BYTES = {"int8": 1.0, "fp8": 1.0, "fp8 in blocks": 1.0, "int4": 0.5 + 2 / 64,
                  "AWQ": 0.5 + 2.5 / 128, "MXFP4": 0.5 + 1 / 32}  # fmt: skip


@dataclass(frozen=True)
class Formats:
    """Of what weights, KV and everything else are made. name: of FORMATS, or a type's."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    kv: torch.dtype = torch.bfloat16

    @property
    def weight_bytes(self) -> float:
        """Bytes of an element of a layer's matrix, with its share of 16-bit scales."""
        return _ELEMENT_BYTES.get(self.name, self.dtype.itemsize)

    @property
    def output_bytes(self) -> float:
        """Bytes of an element of the output layer's matrix, which is never of four bits."""
        kept = self.name in GROUPS
        return self.dtype.itemsize if kept else max(1.0, self.weight_bytes)

    @property
    def eight_bits(self) -> bool:
        """Whether products of a layer are of 8-bit rows and weights."""
        return self.name in ("int8", "fp8")

    def layout(self, shape: Shape, num_blocks: int = 1) -> KvLayout:
        """Of a pool."""
        sizes = (shape.layers, shape.kv_heads, BLOCK_SIZE, shape.head_size)
        return KvLayout(num_blocks, *sizes, self.kv)


BF16, FP8 = Formats("bf16"), Formats("fp8", kv=torch.float8_e4m3fn)
FLOAT32 = Formats("f32", torch.float32, torch.float32)
SMALL = Shape("small", 1024, 6, 16, 4, 2816, 8192)  # quick in float32


class OurEngine:
    """Weights and a pool, and drivers over them: one for decoding, one for prompts.

    Put together here and not by `baton.engine.build.load`, so that it also runs on a CPU, where its
    kernels are interpreted, and without protobuf.
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
        # Random numbers: steps on zeros would take less power.
        sizes = (config.num_layers, config.num_kv_heads, config.head_size)
        self._pool = random_pool(num_blocks, *sizes, formats.kv, device)
        assert tuple(self._pool.shape) == self._layout.shape

    def driver(
        self, batch: int, context: int, chunk: int, *, graphs: bool = False,
        prefill_only: bool = False, reference: bool = False, prefix_cache: bool = False,
    ) -> Driver:  # fmt: skip
        """An engine as a worker runs it: steps are launched ahead, and are graphs.

        reference: the model in plain torch, step after step.
        """
        settings = EngineConfig(
            max_batch=batch, chunk_ms=1e6, chunk_tokens=chunk, prefix_cache=prefix_cache,
            graphs=graphs, prefill_only=prefill_only,
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
    """Matrices of one kind in a step: what is read of their weights, and computed with them."""

    weight_bytes: float
    flops: float
    eight_bits: bool


def products(shape: Shape, formats: Formats, tokens: int, logits: int) -> list[Product]:
    """Those of a step of so many tokens, of which `logits` get scores: attention's matrices, MLPs
    or the experts that are taken, and the output layer."""
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
    """Of causal attention over a whole prompt."""
    return 4.0 * shape.layers * shape.heads * shape.head_size * tokens * (tokens + 1) / 2


def title_of(shape: Shape, formats: Formats, size: str = "") -> str:
    """A row's name."""
    return f"{shape.name} {formats.name}" + (f", {size}" if size else "")


def run(part: Part) -> None:
    """Equality, then each model."""
    part.measure(
        "engine against its reference",
        [("float32, greedy", partial(equality, part)), ("float32, soak", partial(soak, part))],
    )
    # Made one after the other: what one measured with is freed before the next.
    part.measure("decode", ((title_of(*one), Measuring(part, *one).run) for one in measured(part)))


def measured(part: Part) -> list[tuple[Shape, Formats]]:
    """The models, and of what they are made."""
    experts = GPU_SHAPES[part.sized("A3B", "smoke experts")]
    first = [(part.models[0], one) for one in (BF16, FP8, Formats("int4"))]
    others = [(shape, BF16) for shape in (*part.models[1:], experts)]
    return [*first, *others, (part.models[0], Formats("fp8 in blocks"))]


def equality(part: Part) -> Cells:
    """Tokens of some prompts, by kernels and by plain torch. Raises AssertionError."""
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
    """Sequences that come, are cancelled and are preempted at random, in a pool too small for all.

    Those that end have the tokens of quiet steps: one prompt at a time, without graphs. Raises
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
    """The same tokens each time."""
    generator = torch.Generator().manual_seed(length)
    tokens: list[int] = torch.randint(shape.vocab, (length,), generator=generator).tolist()
    return tokens


class Measuring:
    """One shape in one format, and transformers beside it where there is room for it."""

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
        """All of it."""
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
            except Exception as error:  # whatever version of it is there
                self._no_rival("decode", "", error)
        # No prompt is computed, so that nearly no chunks need be captured.
        limits = (max(batches), part.sized(2048, 64), BLOCK_SIZE)
        with closing(ours.driver(*limits, graphs=True)) as driver:
            part.measure("decode", self._decode_cases(driver, batches))
        limits = (8, part.sized(max(PROMPTS) + 64, 128), part.sized(CHUNK, 4))
        with closing(ours.driver(*limits, graphs=not part.smoke, prefill_only=True)) as driver:
            cases = [(self._title(f"{n} tokens"), partial(self.prefill, driver, n))
                     for n in self.prompts]  # fmt: skip
            part.measure("prefill", cases)
        if self.skewed and max(batches) >= len(self.skewed):
            limits = (len(self.skewed), max(self.skewed) + 2 * STEPS, BLOCK_SIZE)
            with closing(ours.driver(*limits, graphs=True)) as driver:
                part.measure("decode compared", self._compared_cases(driver))
        return None

    def _title(self, size: str = "") -> str:
        return title_of(self.shape, self.formats, size)

    def _blocks(self, batch: int) -> int:
        """For decoding, or for the longest prompt if that takes more."""
        grown = 12 + self.steps
        decoding = (batch + 2) * -(-(self.context + grown) // BLOCK_SIZE)
        skewed = sum(-(-(context + grown) // BLOCK_SIZE) for context in self.skewed[:batch])
        return max(decoding, skewed, -(-(max(self.prompts) + 32) // BLOCK_SIZE)) + 8

    def _fitting(self, beside: bool) -> list[int]:
        """Batch sizes whose KV fits beside the weights, and transformers' beside that."""
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
        """One for each batch."""
        for batch in batches:
            yield self._title(f"batch {batch}"), partial(self.decode, driver, batch)

    def decode(self, driver: Driver, batch: int) -> Cells:
        """Steps of one batch size; ours and, where they have room, theirs in turn."""
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
            middle = self.context + self.warm_up + self.steps // 2  # of what was counted
            kv = batch * middle * self.formats.layout(self.shape).bytes_per_token
            floor = kv / part.copy_bytes_per_s + self._floor_s(batch, batch)
            cells |= {"floor ms": floor * 1e3, "of floor": floor / step_s}
        return cells | rival

    def _floor_s(self, tokens: int, logits: int) -> float:
        """Seconds of a step's products at the measured rates."""
        found = products(self.shape, self.formats, tokens, logits)
        return sum(self.part.floor_s(one.weight_bytes, one.flops, one.eight_bits) for one in found)

    def _compared_cases(self, driver: Driver) -> Iterator[Case]:
        """Batches whose lengths or settings differ from row to row, beside others of one kind."""
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
        """Steps of a batch of those contexts and settings, in turn with greedy ones of others."""
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
        """One prompt in chunks, to its first token."""
        if not self.part.smoke:
            driver.prefill(tokens)  # kernels are compiled for what is new in it
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
        """Our median seconds of some rounds; of `steps` of transformers between them, if it can."""
        our_s, their_s, how = [], [], ""
        for _ in range(self.part.sized(3, 1)):
            our_s.append(ours())
            if theirs is None:
                continue
            try:
                seconds, how = theirs()
                their_s.append(seconds / steps)
            except Exception as error:  # whatever version of it is there
                if is_fatal(error):
                    raise
                self._no_rival(table, f", {tokens}", error)
                theirs = None
        self.part.free()  # its caches of one size are of no use for the next
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
