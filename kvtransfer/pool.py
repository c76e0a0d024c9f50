"""A worker's KV blocks as bytes: where the bytes of tokens and heads are, and copies of them.

The pool is one tensor `[num_blocks, num_layers, parts, num_kv_heads, block_size, head_size]`, whose
parts are K and V, or latent KV alone. The first `n` tokens of a block are the first `n /
block_size` of each of its (layer, part, head) rows; a range of heads is one run of bytes for each
(layer, part). Quantized rows, of one-byte elements,
hold the elements of all tokens and then a scale for each token: `n` tokens are the first
`n / block_size` of both parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from baton.errors import InvalidRequest
from baton.kv_groups import KvGroups
from kvtransfer.checksum import Checksum, WordChecksum

# A piece is copied, and added to the checksum while it is still in the core's cache. Measured:
# twice or half the size costs a tenth of the speed.
PIECE_BYTES = 512 << 10
# A chunk of a range of heads, copied in one call. Measured: half the size costs a fifth.
CHUNK_BYTES = 2 << 20

SCALE_BYTES = 4  # of one token of a quantized row


BlockIds: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Slots:
    """`num_tokens` token slots of `block_ids`, in order.

    Only the last block may be partly filled; of several groups of layers the last block of each,
    with as many tokens: the last `num_tails`.
    """

    block_ids: tuple[int, ...]
    num_tokens: int
    num_tails: int = 1

    def check(self, block_size: int, num_blocks: int) -> None:
        """Raises InvalidRequest unless the ids are distinct, exist and fit the token count."""
        ids, num_tokens = self.block_ids, self.num_tokens
        in_tails = num_tokens - self.num_full(block_size) * block_size
        most = self.num_tails * block_size
        is_full = num_tokens == len(ids) * block_size
        if not is_full and (not 0 < in_tails < most or in_tails % self.num_tails):
            raise InvalidRequest(
                f"{num_tokens} tokens do not fill {len(ids)} blocks of {block_size}"
            )
        if len(set(ids)) != len(ids):
            raise InvalidRequest("a block is named twice")
        if ids and (min(ids) < 0 or max(ids) >= num_blocks):
            raise InvalidRequest(f"a block id is outside the pool of {num_blocks}")

    def num_full(self, block_size: int) -> int:
        """How many of the blocks are full; they come first."""
        count = len(self.block_ids)
        return count if self.num_tokens == count * block_size else count - self.num_tails

    def fill(self, block_size: int) -> int:
        """Tokens in each block that is not full; 0 if all are."""
        full = self.num_full(block_size)
        left = len(self.block_ids) - full
        return (self.num_tokens - full * block_size) // left if left else 0

    def parts(self, block_size: int) -> list[Slots]:
        """The same slots, in parts of which only the last block may be partly filled."""
        if self.num_tails == 1 or not (fill := self.fill(block_size)):
            return [self]
        full, ids = self.num_full(block_size), self.block_ids
        first = Slots(ids[: full + 1], full * block_size + fill)
        return [first, *(Slots((block,), fill) for block in ids[full + 1 :])]


def handoff_slots(
    groups: KvGroups, block_ids: Sequence[int], first_token: int, end: int, num_tokens: int
) -> Slots:
    """The slots of tokens [first_token, end) of a sequence whose handoff has `num_tokens`.

    Both ends use this rule: block by block in order, and of each the groups' blocks in order,
    without those that no token after the handoff attends to. block_ids: as of `baton.kv_groups`.
    """
    size, fill = groups.block_size, end % groups.block_size
    ids = groups.needed(block_ids, first_token // size, -(-end // size), num_tokens)
    tails = len(groups.needed(block_ids, end // size, end // size + 1, num_tokens)) if fill else 0
    slots = (len(ids) - tails) * size + tails * fill
    return Slots(ids, slots, tails or 1)


class Area(Protocol):
    """Memory that other processes can map; `on_gpu` if only kernels may read it."""

    tensor: torch.Tensor
    on_gpu: bool

    def close(self) -> None: ...


class KvPool:
    """The KV tensor of one rank, or a range of its heads, as bytes.

    `area`: the shared memory that contains the tensor, if other processes write into it · `on_gpu`:
    whether its bytes must not be copied to the host, not even to compute a checksum · `heads`: the
    selected heads of the tensor, all by default.
    """

    def __init__(
        self, tensor: torch.Tensor, area: Area | None = None, heads: range | None = None
    ) -> None:
        if tensor.dim() != 6 or tensor.shape[2] not in (1, 2) or not tensor.is_contiguous():
            raise ValueError(
                "the KV pool must be a contiguous [num_blocks, num_layers, 1 or 2, num_kv_heads, "
                f"block_size, head_size] tensor, not {tuple(tensor.shape)}"
            )
        if area is not None and tensor.data_ptr() != area.tensor.data_ptr():
            raise ValueError("the KV pool must begin where its shared memory begins")
        self.tensor, self.area, self.device = tensor, area, tensor.device
        self.num_blocks, layers, parts, num_heads, self.block_size, head_size = tensor.shape
        sides = layers * parts
        self.heads = range(num_heads) if heads is None else heads
        self.has_all_heads = len(self.heads) == num_heads
        self.row_slot_bytes = head_size * tensor.element_size()
        self.scale_bytes = SCALE_BYTES if tensor.element_size() == 1 else 0  # of row_slot_bytes
        self.token_bytes = sides * len(self.heads) * self.row_slot_bytes
        self.block_bytes = self.token_bytes * self.block_size
        self.on_gpu = self.device.type != "cpu" or (area is not None and area.on_gpu)
        if self.on_gpu and (self.row_slot_bytes % 4 or self.block_bytes % 16):
            sizes = f"{self.row_slot_bytes} and {self.block_bytes}"
            raise ValueError(
                f"on a GPU a slot of a row and a block are multiples of 4 and 16 bytes, not {sizes}"
            )
        octets = tensor.view(torch.uint8).view(self.num_blocks, sides, num_heads, -1)
        # [num_blocks, layers * parts, heads, bytes of a row]
        self.rows = octets[:, :, self.heads.start : self.heads.stop]
        self.blocks = self.rows.view(self.num_blocks, sides, -1)

    @cached_property
    def words(self) -> torch.Tensor:
        """The tensor from the first selected head's first row on, as int32 `[words]`."""
        first = self.heads.start * self.block_size * self.row_slot_bytes // 4
        return self.tensor.view(-1).view(torch.uint8).view(torch.int32)[first:]

    @property
    def side_words(self) -> int:
        """Words of a part of all heads of the tensor, in one layer of a block."""
        return int(self.tensor.shape[3]) * self.block_size * self.row_slot_bytes // 4

    def with_heads(self, heads: range) -> KvPool:
        """Returns a view of this pool that has these heads only."""
        return self if heads == self.heads else KvPool(self.tensor, self.area, heads)

    @property
    def layout(self) -> dict[str, int]:
        """What another process's `counterpart` needs: numbers of blocks and heads, first head."""
        heads = {"heads": self.tensor.shape[3], "first_head": self.heads.start}
        return {"blocks": self.num_blocks, **heads}

    def bytes_at(self, layout: Mapping[str, Any]) -> int:
        """Bytes of a whole pool of that `layout`. Raises ValueError if our heads do not fit it."""
        blocks, heads = int(layout["blocks"]), int(layout.get("heads", len(self.heads)))
        first = int(layout.get("first_head", 0))
        if not 0 <= first <= heads - len(self.heads):
            raise ValueError(f"{len(self.heads)} heads from {first} on are not among {heads}")
        return blocks * heads * (self.block_bytes // len(self.heads))

    def counterpart(self, octets: torch.Tensor, layout: Mapping[str, Any]) -> KvPool:
        """The pool in the other end's memory `octets`, with the heads that correspond to ours."""
        first, shape = int(layout.get("first_head", 0)), list(self.tensor.shape)
        shape[0], shape[3] = int(layout["blocks"]), int(layout.get("heads", len(self.heads)))
        tensor = octets.view(self.tensor.dtype).view(shape)
        return KvPool(tensor, heads=range(first, first + len(self.heads)))

    def new_checksum(self) -> Checksum:
        """The checksum of one transfer; its kind depends on the pool's device."""
        return WordChecksum() if self.on_gpu else Checksum()

    def nbytes(self, slots: Slots) -> int:
        return self.token_bytes * slots.num_tokens

    def tails(self, slots: Slots) -> list[torch.Tensor]:
        """The filled slots of each partly filled block: their elements, and their scales if they
        have any; empty without such a block. Each is uint8 `[.., heads, bytes]`, strided.
        """
        fill, tails = slots.fill(self.block_size), []
        element_bytes = self.row_slot_bytes - self.scale_bytes
        scales = self.block_size * element_bytes
        for block in slots.block_ids[slots.num_full(self.block_size) :]:
            row = self.rows[block]
            tails.append(row[..., : fill * element_bytes])
            if self.scale_bytes:
                tails.append(row[..., scales : scales + fill * self.scale_bytes])
        return tails

    def in_place(self, slots: Slots) -> torch.Tensor | None:
        """A view of the slots' bytes in canonical order, if they are contiguous in the pool."""
        if not slots.block_ids:
            return None
        first, count = slots.block_ids[0], len(slots.block_ids)
        full = self.has_all_heads and slots.num_tokens == count * self.block_size
        if full and slots.block_ids == tuple(range(first, first + count)):
            return self.blocks[first : first + count].view(-1)
        return None

    def gather(self, slots: Slots, out: torch.Tensor) -> torch.Tensor:
        """Copies the slots' bytes in canonical order to the front of `out`; returns that part."""
        for start, end, piece in self.pieces(slots):
            out[start:end].view(piece.shape).copy_(piece)
        return out[: self.nbytes(slots)]

    def scatter(self, data: torch.Tensor, slots: Slots) -> None:
        """Copies `data`, as `gather` returns it, into the slots, and changes nothing else."""
        for start, end, piece in self.pieces(slots):
            piece.copy_(data[start:end].view(piece.shape))

    def checksum_of(self, slots: Slots) -> Checksum:
        """The checksum of the slots' current content; on a GPU a copier computes it faster."""
        checksum, full = self.new_checksum(), slots.num_full(self.block_size)
        if self.has_all_heads or self.on_gpu:
            for _, _, piece in self.pieces(slots):
                checksum.update(piece.contiguous().view(-1))
            return checksum
        for _, held in self.chunks(slots.block_ids[:full]):
            checksum.add(held.reshape(-1).data)
        for tail in self.tails(slots):
            checksum.update(tail.contiguous().view(-1))
        return checksum

    def chunks(self, blocks: BlockIds) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        """Full blocks in host memory, several at a time: the index of the first, and their bytes,
        contiguous `[blocks, layers * parts, bytes]` and valid until the next.

        Blocks that are not contiguous in the pool are copied, many in one call, because ranks'
        threads wait for the GIL between calls, about as long as copying a few blocks takes.
        """
        _, sides, heads, row_bytes = self.rows.shape
        octets = self.tensor.view(torch.uint8).view(self.num_blocks, -1).numpy()
        rows = octets.reshape(-1).view(
            f"V{row_bytes}"
        )  # of all heads; each row is copied as one element
        in_block = np.arange(len(rows) // self.num_blocks).reshape(sides, -1)
        in_block = in_block[:, self.heads.start : self.heads.stop]
        at_once = max(1, CHUNK_BYTES // self.block_bytes)
        scratch = np.empty((at_once, sides, heads), rows.dtype)
        ids = np.array(blocks, int)
        for at in range(0, len(blocks), at_once):
            wanted = ids[at : at + at_once]
            if self.has_all_heads and (np.diff(wanted) == 1).all():
                held = octets[wanted[0] : wanted[0] + len(wanted)]
            else:
                held = scratch[: len(wanted)]
                index = wanted[:, None, None] * (len(rows) // self.num_blocks) + in_block
                np.take(rows, index, out=held, mode="clip")  # "raise" would copy twice
            yield at, held.view(np.uint8).reshape(len(wanted), sides, -1)

    def pieces(self, slots: Slots) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Runs of full blocks, then `tails`: start and end in canonical order, and the bytes."""
        full = slots.num_full(self.block_size)
        for first, block, count in runs(slots.block_ids[:full]):
            start, end = first * self.block_bytes, (first + count) * self.block_bytes
            yield start, end, self.blocks[block : block + count]
        start = full * self.block_bytes
        for tail in self.tails(slots):
            yield start, start + tail.numel(), tail
            start += tail.numel()

    def split(self, slots: Slots, max_bytes: int) -> list[Slots]:
        """Splits slots into messages of at most `max_bytes`, but at least one block each.

        Both ends use this rule, so they agree on the length of every message.
        """
        step, size = max(1, max_bytes // self.block_bytes), self.block_size
        return [
            Slots(part.block_ids[at : at + step], min(part.num_tokens - at * size, step * size))
            for part in slots.parts(size)
            for at in range(0, max(1, len(part.block_ids)), step)
        ]


def runs(*ids: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Splits id lists of one length wherever any of them is not consecutive.

    Yields (first index, first id of each list..., count).
    """
    length, first = len(ids[0]), 0
    for i in range(1, length + 1):
        if i == length or any(one[i] != one[i - 1] + 1 for one in ids):
            yield (first, *(one[first] for one in ids), i - first)
            first = i


def check_fit(source: KvPool, local: Slots, target: KvPool, remote: Slots) -> None:
    """Raises InvalidRequest if slots do not fit their pools or each other."""
    local.check(source.block_size, source.num_blocks)
    remote.check(target.block_size, target.num_blocks)
    if local.num_tokens != remote.num_tokens or local.num_tails != remote.num_tails:
        raise InvalidRequest(f"{local.num_tokens} tokens do not fit {remote.num_tokens}")


def copy_slots(
    source: KvPool, local: Slots, target: KvPool, remote: Slots, checksum: Checksum
) -> None:
    """Copies slots between pools in host memory, adding the bytes read to `checksum`.

    Raises as `check_fit` does.
    """
    check_fit(source, local, target, remote)
    full = local.num_full(source.block_size)
    copy = _copy_bytes if source.has_all_heads and target.has_all_heads else _copy_heads
    copy(source, local.block_ids[:full], target, remote.block_ids[:full], checksum)
    for read, written in zip(source.tails(local), target.tails(remote), strict=True):
        written.copy_(read)
        checksum.update(read.contiguous().view(-1))


def _copy_bytes(
    source: KvPool, local: BlockIds, target: KvPool, remote: BlockIds, checksum: Checksum
) -> None:
    """Copies runs that are consecutive at both ends, as plain bytes: copying a tensor costs more
    microseconds than its bytes do."""
    read, written = (pool.blocks.view(-1).numpy().data for pool in (source, target))
    size = source.block_bytes
    for _, here, there, count in runs(local, remote):
        for at in range(0, count * size, PIECE_BYTES):
            end = min(at + PIECE_BYTES, count * size)
            piece = read[here * size + at : here * size + end]
            written[there * size + at : there * size + end] = piece
            checksum.add(piece)


def _copy_heads(
    source: KvPool, local: BlockIds, target: KvPool, remote: BlockIds, checksum: Checksum
) -> None:
    """Copies several blocks in one call, consecutive or not."""
    written = target.blocks.numpy()
    for at, held in source.chunks(local):
        checksum.add(held.reshape(-1).data)
        written[list(remote[at : at + len(held)])] = held
