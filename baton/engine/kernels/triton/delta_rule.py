"""The gated delta rule over states in the KV pool: see `baton.engine.kernels.torch.delta_rule`.

Three launches a layer, whose grids depend on shapes alone: the convolution of all rows; the rule,
token by token, in which a program keeps some columns of a head's matrix in registers; the norm and
gate of outputs. A token's result does not depend on how its sequence was divided into steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.delta_rule import FLOAT, DeltaRuleShape, StateLayout
from baton.engine.kernels.torch.delta_rule import (
    L2_EPS,
    DeltaRule,
    DeltaRuleTensors,
    States,
    layout_of,
)
from baton.engine.kernels.triton.pdl import launch, launch_dependents, wait_for_inputs
from baton.engine.kernels.triton.specs import Config, KernelSpec, Key, Outputs, Trial, dtype_of

COLUMNS = 32  # of a matrix, in one program; more, or fewer warps for them, need more registers


class RowStates(NamedTuple):
    """The states of a step's sequences, int32: see `States`; a context of -1 is padding.

    begins, query_lens: of each sequence, its first row and number of rows · owners: `[rows]`, the
    sequence of each row. None where each sequence has one row.
    """

    tables: Tensor
    context_lens: Tensor
    begins: Tensor | None
    query_lens: Tensor | None
    owners: Tensor | None


def row_states(
    tables: Tensor, context_lens: Tensor, query_lens: Tensor | None, num_rows: int
) -> RowStates:
    """States of sequences, whose rows are one each if query_lens is None."""
    if query_lens is None:
        return RowStates(tables, context_lens, None, None, None)
    ends = query_lens.cumsum(0, dtype=torch.int32)
    numbers = torch.arange(num_rows, dtype=torch.int32, device=ends.device)
    owners = (ends <= numbers[:, None]).sum(1, dtype=torch.int32)
    return RowStates(tables, context_lens, ends - query_lens, query_lens, owners)


def delta_rule(
    rule: DeltaRule, mixed: Tensor, gates: Tensor, states: RowStates, pool: Tensor
) -> Tensor:
    """As `DeltaRule.run`, without waiting for the device; zeros for padding."""
    shape, layout, tensors = rule.layout.shape, rule.layout, rule.tensors
    rows, sequences = len(mixed), len(states.tables)
    assert mixed.is_contiguous() and gates.is_contiguous() and states.tables.stride(1) == 1
    assert pool.is_contiguous() and layout.chunk_bytes % FLOAT == 0
    floats = pool.view(torch.uint8).view(-1).view(torch.float32)
    table_stride, heads = states.tables.stride(0), (shape.key_heads, shape.value_heads)
    channels = mixed.new_empty(rows, shape.key_heads, shape.head_channels, dtype=torch.float32)
    out = mixed.new_empty(rows, shape.value_heads, shape.value_size)
    result = mixed.new_empty(rows, shape.value_heads * shape.value_size)
    group = shape.values_per_key
    sizes = {
        "KEY": shape.key_size, "VALUE": shape.value_size, "GROUP": group, "KERNEL": shape.kernel,
        "HEAD_ROWS": shape.head_rows, "OF_KV_HEAD": shape.key_heads // layout.kv_heads,
        "KV_HEADS": layout.kv_heads, "CHUNK_ROWS": layout.chunk_rows,
        "CHUNK_FLOATS": layout.chunk_bytes // FLOAT, "BLOCK_CHUNKS": layout.block_chunks,
        "TAPS_PAD": triton.next_power_of_2(shape.kernel),
        "CHANNELS_PAD": triton.next_power_of_2(shape.head_channels),
    }  # fmt: skip
    launch(
        _convolve_kernel, (rows, heads[0]), mixed, tensors.conv, channels, floats, states.tables,
        states.context_lens, states.begins, states.owners, rule.layer, table_stride, L2_EPS,
        shape.key_size**-0.5, num_warps=4, **sizes,
    )  # fmt: skip
    columns = min(COLUMNS, int(triton.next_power_of_2(shape.value_size)))
    launch(
        _rule_kernel, (sequences, heads[1], triton.cdiv(shape.value_size, columns)), mixed, gates,
        tensors.decay, tensors.decay_bias, channels, out, floats, states.tables,
        states.context_lens, states.begins, states.query_lens, rule.layer, table_stride,
        KEY_PAD=triton.next_power_of_2(shape.key_size), COLUMNS=columns, num_warps=4, **sizes,
    )  # fmt: skip
    launch(
        _gate_kernel, (rows, heads[1]), mixed, out, tensors.scale, result, states.context_lens,
        states.owners, rule.eps, KEY=shape.key_size, VALUE=shape.value_size, GROUP=group,
        VALUE_PAD=triton.next_power_of_2(shape.value_size), num_warps=2,
    )  # fmt: skip
    return result


@triton.jit
def _rows_at(
    table, head, row, layer, HEAD_ROWS: tl.constexpr, OF_KV_HEAD: tl.constexpr,
    KV_HEADS: tl.constexpr, CHUNK_ROWS: tl.constexpr, CHUNK_FLOATS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr, VALUE: tl.constexpr, mask,
):  # fmt: skip
    """Where rows of a key head's state are in the pool, in floats."""
    row += (layer * OF_KV_HEAD + head % OF_KV_HEAD) * HEAD_ROWS
    chunk = row // CHUNK_ROWS
    block = tl.load(table + chunk // BLOCK_CHUNKS, mask=mask, other=0).to(tl.int64)
    chunk = (block * BLOCK_CHUNKS + chunk % BLOCK_CHUNKS) * KV_HEADS + head // OF_KV_HEAD
    return chunk * CHUNK_FLOATS + (row % CHUNK_ROWS) * VALUE


@triton.jit
def _inputs(
    mixed, floats, table, head, at, first, channel, inside, context, layer, HEADS,
    KEY: tl.constexpr, VALUE: tl.constexpr, GROUP: tl.constexpr, KERNEL: tl.constexpr,
    HEAD_ROWS: tl.constexpr, OF_KV_HEAD: tl.constexpr, KV_HEADS: tl.constexpr,
    CHUNK_ROWS: tl.constexpr, CHUNK_FLOATS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Inputs of a key head's convolution: `[rows, channels]`.

    at: `[rows, 1]`, the sequence's rows in this step; negative ones are those of earlier steps,
    from its state · first: the sequence's first row · inside: `[rows, channels]`, of those wanted.
    """
    CHANNELS: tl.constexpr = 2 * KEY + GROUP * VALUE
    own = ((first + at).to(tl.int64) * HEADS + head) * (CHANNELS + GROUP * VALUE)
    here = tl.load(mixed + own + channel, mask=inside & (at >= 0), other=0.0).to(tl.float32)
    flat = (KERNEL - 1 + at) * CHANNELS + channel
    kept = inside & (at < 0) & (context > 0)
    row = _rows_at(
        table, head, GROUP * KEY + flat // VALUE, layer, HEAD_ROWS, OF_KV_HEAD, KV_HEADS,
        CHUNK_ROWS, CHUNK_FLOATS, BLOCK_CHUNKS, VALUE, kept,
    )  # fmt: skip
    return tl.where(at >= 0, here, tl.load(floats + row + flat % VALUE, mask=kept, other=0.0))


@triton.jit(do_not_specialize=["layer", "table_stride"])
def _convolve_kernel(
    mixed, conv, channels, floats, tables, context_lens, begins, owners, layer, table_stride,
    unit_eps, query_scale, KEY: tl.constexpr, VALUE: tl.constexpr, GROUP: tl.constexpr,
    KERNEL: tl.constexpr, HEAD_ROWS: tl.constexpr, OF_KV_HEAD: tl.constexpr,
    KV_HEADS: tl.constexpr, CHUNK_ROWS: tl.constexpr, CHUNK_FLOATS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr, TAPS_PAD: tl.constexpr, CHANNELS_PAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Query and key of unit length, and values, of a row and key head. Grid `[rows, key heads]`."""
    CHANNELS: tl.constexpr = 2 * KEY + GROUP * VALUE
    wait_for_inputs(PDL)
    launch_dependents(PDL)
    row, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    owner, first = row, row
    if owners is not None:
        owner = tl.load(owners + row)
        first = tl.load(begins + owner)
    context = tl.load(context_lens + owner)
    if context < 0:
        return
    table = tables + owner.to(tl.int64) * table_stride
    tap, channel = tl.arange(0, TAPS_PAD)[:, None], tl.arange(0, CHANNELS_PAD)
    inside = (tap < KERNEL) & (channel < CHANNELS)[None, :]
    x = _inputs(
        mixed, floats, table, head, row - first + tap - (KERNEL - 1), first, channel[None, :],
        inside, context, layer, heads, KEY, VALUE, GROUP, KERNEL, HEAD_ROWS, OF_KV_HEAD, KV_HEADS,
        CHUNK_ROWS, CHUNK_FLOATS, BLOCK_CHUNKS,
    )  # fmt: skip
    weights = conv + (head * CHANNELS + channel)[None, :] * KERNEL + tap
    x = tl.sum(x * tl.load(weights, mask=inside, other=0.0), 0)
    element = mixed.dtype.element_ty  # rounded as torch rounds
    x = x.to(element).to(tl.float32)
    x = (x * tl.sigmoid(x)).to(element).to(tl.float32)
    is_query, is_value = channel < KEY, channel >= 2 * KEY
    squares = tl.where(is_value, 0.0, x * x)
    of_query = tl.sum(tl.where(is_query, squares, 0.0), 0)
    of_key = tl.sum(tl.where(is_query, 0.0, squares), 0)
    units = tl.where(is_query, tl.rsqrt(of_query + unit_eps), tl.rsqrt(of_key + unit_eps))
    x *= tl.where(is_value, 1.0, units)
    x *= tl.where(is_query, query_scale, 1.0)
    to = channels + (row.to(tl.int64) * heads + head) * CHANNELS
    tl.store(to + channel, x, mask=channel < CHANNELS)


@triton.jit(do_not_specialize=["layer", "table_stride"])
def _rule_kernel(
    mixed, gates, decays, biases, channels, out, floats, tables, context_lens, begins, query_lens,
    layer, table_stride, KEY: tl.constexpr, VALUE: tl.constexpr, GROUP: tl.constexpr,
    KERNEL: tl.constexpr, HEAD_ROWS: tl.constexpr, OF_KV_HEAD: tl.constexpr,
    KV_HEADS: tl.constexpr, CHUNK_ROWS: tl.constexpr, CHUNK_FLOATS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr, TAPS_PAD: tl.constexpr, CHANNELS_PAD: tl.constexpr,
    KEY_PAD: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Advances some columns of a value head's matrix. Grid `[sequences, value heads, parts]`.

    The first part of a key head's first value head also updates the inputs of its convolution.
    """
    wait_for_inputs(PDL)
    launch_dependents(PDL)
    sequence, value_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(context_lens + sequence)
    first, count = sequence, 1
    if begins is not None:
        first, count = tl.load(begins + sequence), tl.load(query_lens + sequence)
    if (context < 0) | (count == 0):
        return
    value_heads, heads = tl.num_programs(1), tl.num_programs(1) // GROUP
    head, of_group = value_head // GROUP, value_head % GROUP
    element = mixed.dtype.element_ty
    table = tables + sequence.to(tl.int64) * table_stride
    key, column = tl.arange(0, KEY_PAD), part * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_column = key < KEY, column < VALUE
    at = _rows_at(
        table, head, of_group * KEY + key, layer, HEAD_ROWS, OF_KV_HEAD, KV_HEADS, CHUNK_ROWS,
        CHUNK_FLOATS, BLOCK_CHUNKS, VALUE, is_key,
    )  # fmt: skip
    places = floats + at[:, None] + column[None, :]
    is_place = is_key[:, None] & is_column[None, :]
    matrix = tl.load(places, mask=is_place & (context > 0), other=0.0)
    rate, bias = tl.load(decays + value_head), tl.load(biases + value_head)
    for number in range(count):
        row = (first + number).to(tl.int64)
        own = channels + (row * heads + head) * (2 * KEY + GROUP * VALUE)
        q = tl.load(own + key, mask=is_key, other=0.0)
        k = tl.load(own + KEY + key, mask=is_key, other=0.0)
        v = tl.load(own + 2 * KEY + of_group * VALUE + column, mask=is_column, other=0.0)
        gate = gates + (row * heads + head) * 2 * GROUP + of_group
        beta = tl.sigmoid(tl.load(gate).to(tl.float32)).to(element).to(tl.float32)
        x = tl.load(gate + GROUP).to(tl.float32) + bias
        softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
        matrix *= tl.exp(rate * softplus)
        delta = (v - tl.sum(matrix * k[:, None], 0)) * beta
        matrix += k[:, None] * delta[None, :]
        result = tl.sum(matrix * q[:, None], 0)
        to = out + (row * value_heads + value_head) * VALUE + column
        tl.store(to, result.to(element), mask=is_column)
    tl.store(places, matrix, mask=is_place)
    if (part == 0) & (of_group == 0):
        tap, channel = tl.arange(0, TAPS_PAD)[:, None], tl.arange(0, CHANNELS_PAD)[None, :]
        inside = (tap < KERNEL - 1) & (channel < 2 * KEY + GROUP * VALUE)
        x = _inputs(
            mixed, floats, table, head, count - (KERNEL - 1) + tap, first, channel, inside, context,
            layer, heads, KEY, VALUE, GROUP, KERNEL, HEAD_ROWS, OF_KV_HEAD, KV_HEADS, CHUNK_ROWS,
            CHUNK_FLOATS, BLOCK_CHUNKS,
        )  # fmt: skip
        tl.debug_barrier()  # inputs move along: other threads have read them
        flat = tap * (2 * KEY + GROUP * VALUE) + channel
        kept = _rows_at(
            table, head, GROUP * KEY + flat // VALUE, layer, HEAD_ROWS, OF_KV_HEAD, KV_HEADS,
            CHUNK_ROWS, CHUNK_FLOATS, BLOCK_CHUNKS, VALUE, inside,
        )  # fmt: skip
        tl.store(floats + kept + flat % VALUE, x, mask=inside)


@triton.jit
def _gate_kernel(
    mixed, rows_out, scale, result, context_lens, owners, eps, KEY: tl.constexpr,
    VALUE: tl.constexpr, GROUP: tl.constexpr, VALUE_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norms and gates the output of a row and value head. Grid `[rows, value heads]`."""
    wait_for_inputs(PDL)
    launch_dependents(PDL)
    row, value_head, value_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    owner = row
    if owners is not None:
        owner = tl.load(owners + row)
    element = mixed.dtype.element_ty
    column = tl.arange(0, VALUE_PAD)
    inside = column < VALUE
    at = (row.to(tl.int64) * value_heads + value_head) * VALUE + column
    if tl.load(context_lens + owner) < 0:
        tl.store(result + at, tl.zeros([VALUE_PAD], element), mask=inside)
        return
    x = tl.load(rows_out + at, mask=inside, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 0) / VALUE + eps)
    weight = tl.load(scale + column, mask=inside, other=0.0).to(element).to(tl.float32)
    x = (x.to(element).to(tl.float32) * weight).to(element).to(tl.float32)
    head, of_group = value_head // GROUP, value_head % GROUP
    size = 2 * KEY + 2 * GROUP * VALUE
    gates = mixed + (row.to(tl.int64) * (value_heads // GROUP) + head) * size
    gate = gates + 2 * KEY + GROUP * VALUE + of_group * VALUE + column
    opened = tl.load(gate, mask=inside, other=0.0).to(tl.float32)
    opened *= tl.sigmoid(opened)
    tl.store(result + at, (x * opened).to(element), mask=inside)


def _trial(shape: Key, device: torch.device) -> Trial:
    """Sequences with and without context, one row each, or the last one several.

    Sizes are such that the inputs of the convolution fill whole rows of a state.
    """
    dtype, key_heads, group = dtype_of(shape), int(shape["heads"]), int(shape["group"])
    sizes = int(shape["key"]), int(shape["value"])
    rule_shape = DeltaRuleShape(key_heads, key_heads * group, *sizes, kernel=4)
    kv_heads, layers, batch, chunk = 2, 2, int(shape["batch"]), int(shape.get("chunk", 0))
    block = torch.empty(1, 2, 2, kv_heads, 16, 32, dtype=dtype, device="meta")
    states = layout_of(rule_shape, layers, block).num_blocks
    pool = torch.randn(batch * states + 2, 2, 2, kv_heads, 16, 32, device=device).to(dtype)
    layout: StateLayout = layout_of(rule_shape, layers, pool)
    counts = [1] * (batch - 1) + [chunk or 1]
    rows, heads = sum(counts), rule_shape.value_heads
    size = rule_shape.head_channels + group * sizes[1]
    mixed = torch.randn(rows, key_heads * size, device=device).to(dtype)
    gates = torch.randn(rows, 2 * heads, device=device).to(dtype)
    tensors = DeltaRuleTensors(
        torch.randn(key_heads * rule_shape.head_channels, 4, device=device) / 2,
        -torch.rand(heads, device=device),
        torch.randn(heads, device=device),
        1 + 0.2 * torch.randn(sizes[1], device=device),
    )
    rule = DeltaRule(layout, tensors, 1, 1e-6)
    tables = torch.randperm(batch * states, device=device).int().view(batch, -1)
    contexts = torch.tensor([7 * (one % 2) for one in range(batch)], device=device).int()
    lens = torch.tensor(counts, device=device).int()
    if device.type != "meta":  # states of numbers of usual sizes
        floats = pool.view(torch.uint8).view(-1).view(torch.float32)
        floats.copy_(torch.randn(len(floats), device=device) / 4)

    def run(config: Config | None) -> Outputs:
        to = pool.clone()
        of_rows = row_states(tables, contexts, lens if chunk else None, rows)
        out = delta_rule(rule, mixed, gates, of_rows, to)
        return out, to.view(torch.uint8).view(-1).view(torch.float32)[None]

    def expected() -> Outputs:
        to = pool.clone()
        out = rule.run(mixed, gates, States(tables, contexts, lens), to)
        return out, to.view(torch.uint8).view(-1).view(torch.float32)[None]

    # Roundings of inputs add up in states, most of all where the interpreter truncates.
    tolerance = None if dtype == torch.float32 else 0.04
    of_states = batch * key_heads * rule_shape.head_rows * sizes[1] * FLOAT
    moved = 2 * of_states + mixed.nbytes + rows * heads * sizes[1] * dtype.itemsize
    return Trial({}, run, expected, moved_bytes=moved, tolerance=tolerance)


_SIZES: Key = {"heads": 4, "group": 2, "key": 128, "value": 128}
SPECS = (
    KernelSpec(
        "delta_rule",
        _trial,
        cases=(
            {"batch": 3, **_SIZES},
            {"batch": 3, "chunk": 9, "heads": 2, "group": 1, "key": 24, "value": 24},
            {"batch": 3, "chunk": 9, **_SIZES, "group": 3, "key": 24, "value": 24, "dtype": "fp32"},
            {"batch": 4, "chunk": 2, **_SIZES, "dtype": "fp32"},
        ),
        shapes=(
            # Of Qwen3-Next-80B; then three value heads for a key head.
            {"batch": 64, **_SIZES, "heads": 16},
            {"batch": 8, "chunk": 2048, **_SIZES, "heads": 16},
            {"batch": 64, **_SIZES, "heads": 16, "group": 3},
        ),
    ),
)
