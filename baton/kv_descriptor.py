"""KV descriptors, by which workers compare their KV caches: differences, and sizes."""

from __future__ import annotations

from typing import Any

from baton.v1 import common_pb2

# Bytes of one element, and of the scale that each head of a token has where elements are quantized.
_SIZES = {"float32": (4, 0), "int8": (1, 4), "float8_e4m3fn": (1, 4)}
_16_BITS = (2, 0)


def differences(prefill: common_pb2.KvDescriptor, decode: common_pb2.KvDescriptor) -> list[str]:
    """Each field in which the two differ, as "block_size: 16 != 32"."""
    return [
        f"{field.name}: {_shown(getattr(prefill, field.name))} != "
        f"{_shown(getattr(decode, field.name))}"
        for field in common_pb2.KvDescriptor.DESCRIPTOR.fields
        if getattr(prefill, field.name) != getattr(decode, field.name)
    ]


def _shown(value: Any) -> str:
    return f"{value!r:.18}" if isinstance(value, str | int) else f"{list(value)!r:.60}"


def token_bytes(kv: common_pb2.KvDescriptor) -> int:
    """Bytes of one token's KV, in all layers, while it is within their windows."""
    element, scale = _SIZES.get(kv.dtype, _16_BITS)
    size: int = kv.parts * kv.num_layers * kv.num_kv_heads * (kv.head_size * element + scale)
    return size * max(1, len(kv.group_windows))


def pool_tokens(kv: common_pb2.KvDescriptor, num_blocks: int) -> int:
    """Tokens of long sequences that a pool of `num_blocks` holds."""
    full, windowed, _ = groups(kv)
    return num_blocks * kv.block_size // (full or windowed)


def groups(kv: common_pb2.KvDescriptor) -> tuple[int, int, int]:
    """Groups of layers without a window, those with one, and the longest window in tokens."""
    windows = list(kv.group_windows) or [0]
    return windows.count(0), len(windows) - windows.count(0), max(windows)
