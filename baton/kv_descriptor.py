"""KV descriptors, by which workers compare their KV caches: differences, and bytes of a token."""

from __future__ import annotations

from baton.v1 import common_pb2

# Bytes of one element, and of the scale that each head of a token has where elements are quantized.
_SIZES = {"float32": (4, 0), "int8": (1, 4), "float8_e4m3fn": (1, 4)}
_16_BITS = (2, 0)


def differences(prefill: common_pb2.KvDescriptor, decode: common_pb2.KvDescriptor) -> list[str]:
    """Each field in which the two differ, as "block_size: 16 != 32"."""
    return [
        f"{field.name}: {getattr(prefill, field.name)!r:.18} != {getattr(decode, field.name)!r:.18}"
        for field in common_pb2.KvDescriptor.DESCRIPTOR.fields
        if getattr(prefill, field.name) != getattr(decode, field.name)
    ]


def token_bytes(kv: common_pb2.KvDescriptor) -> int:
    """Bytes of one token's KV, in all layers."""
    element, scale = _SIZES.get(kv.dtype, _16_BITS)
    size: int = kv.parts * kv.num_layers * kv.num_kv_heads * (kv.head_size * element + scale)
    return size
