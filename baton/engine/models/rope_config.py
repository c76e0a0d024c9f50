"""Rotary position embedding as config.json describes it. Torch-free; `rope.py` makes the tables."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from baton.engine.checkpoint.fields import (
    BOOLEAN,
    COUNT,
    MAX_SIZE,
    NOT_NEGATIVE,
    NUMBER,
    OBJECT,
    Check,
    Fields,
    one_of,
    whole,
)
from baton.engine.models.architectures import FULL, SLIDING, Architecture

# A context's logarithm is a divisor, so that it is at least 2.
_CONTEXT = Check(
    lambda value: NUMBER.holds(value) and 2 <= value <= MAX_SIZE, f"a number from 2 to {MAX_SIZE}"
)
# All keys inside `rope_parameters` that transformers reads, of whichever kind.
_KEYS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "finetuned"),
    *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor"),
    *("low_freq_factor", "high_freq_factor"),
    *("mrope_section", "mrope_interleaved"),  # of images; texts are rotated as without
}


# Multiplies queries at positions from the original context on: contexts end before.
_QUERY_SCALING = "llama_4_scaling_beta"


@dataclass(frozen=True)
class Rope:
    """The frequencies of a rotary position embedding.

    theta: base of the frequencies · factor: by which the context is stretched · original_context:
    tokens, before that · size: number of a head's dimensions that are rotated; 0: all ·
    attention_factor: multiplies sines and cosines · factors: of longrope, one for each pair of
    dimensions.
    """

    theta: float
    scaling: Literal["none", "linear", "llama3", "dynamic", "yarn", "longrope", "proportional"] = (
        "none"
    )
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    size: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0  # this and the next two: of yarn
    beta_slow: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()
    latent_score_scale: float = 1.0  # multiplies scores of latent attention

    def is_in_place(self, head_size: int) -> bool:
        """Whether element i pairs with i + head_size / 2, not with i + half the rotated part."""
        return self.scaling == "proportional" or (self.size or head_size) == head_size


def parse_ropes(
    fields: Fields, arch: Architecture, head_size: int, sliding_head_size: int
) -> tuple[Rope, Rope, int]:
    """The ropes of full and of sliding attention, and the longest context, in tokens.

    `rope_scaling` (transformers 4) takes precedence over `rope_parameters` (transformers 5), which
    may have both ropes by name: guides to longer contexts say to add it.
    """
    key = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    default = arch.defaults.get("rope_parameters", {})
    inside = Fields(fields.file, fields.read(key, OBJECT, default), f"{key}.")
    theta = fields.read("rope_theta", NUMBER, 10000.0)
    if "rope_local_base_freq" not in arch.defaults:
        rope, context = _rope(fields, arch, inside, theta, head_size)
        return rope, rope, context
    full, sliding = inside, inside._replace(values={})  # `rope_scaling` is of full attention only
    if FULL in inside.values or SLIDING in inside.values:
        full, sliding = (
            Fields(fields.file, inside.read(kind, OBJECT, {}), f"{inside.prefix}{kind}.")
            for kind in (FULL, SLIDING)
        )
    rope, context = _rope(fields, arch, full, theta, head_size)
    local = fields.read("rope_local_base_freq", NUMBER, theta)
    return rope, _rope(fields, arch, sliding, local, sliding_head_size)[0], context


def _rope(
    fields: Fields, arch: Architecture, inside: Fields, theta: float, head_size: int
) -> tuple[Rope, int]:
    """The rope that the object `inside` describes, and the longest context."""
    scaling = _QUERY_SCALING if _QUERY_SCALING in arch.defaults.get("rope_parameters", {}) else ""
    known = {*_KEYS, scaling, "max_position_embeddings"} if scaling else _KEYS
    if arch.ntk_alpha:
        known = {*_KEYS, "alpha"}
    for key in inside.values.keys() - known:
        inside.read(key, Check(lambda value: not value, "null, because it is not supported"))
    context = fields.read("max_position_embeddings", COUNT)
    rope = Rope(
        float(inside.read("rope_theta", NUMBER, theta)),
        size=_rotated_size(fields, arch, inside, head_size),
    )
    kinds = ("default", "linear", "llama3", "dynamic", "yarn", "longrope", "proportional")
    kind = inside.read("rope_type", one_of(*kinds), inside.values.get("type", "default"))
    if kind == "dynamic" and (rope.size or head_size) == 2:
        raise fields.error("head_dim", head_size, "more than two dimensions that are rotated")
    if kind in ("default", "proportional") or (kind == "dynamic" and inside.values.get("alpha")):
        return _of_own_context(rope, inside, kind, head_size), context
    # Without the original context, transformers takes the current one.
    key = "original_max_position_embeddings"
    original = int(fields.read(key, _CONTEXT, inside.read(key, _CONTEXT, context)))
    implied_factor = context / original if kind == "longrope" else None
    factor = float(inside.read("factor", NUMBER, implied_factor))
    rope = replace(rope, scaling=kind, factor=factor, original_context=original)
    if kind == "llama3":
        low, high = (float(inside.read(f"{end}_freq_factor", NUMBER)) for end in ("low", "high"))
        rope = replace(rope, low_freq_factor=low, high_freq_factor=high)
    elif kind == "dynamic":
        # For the longest context, whatever a sequence's length: cached keys stay valid.
        context = int(context * factor)
    elif kind == "yarn":
        rope, context = _yarn(rope, inside), max(context, int(original * factor))
    elif kind == "longrope":
        rope = _longrope(rope, inside, rope.size or head_size, context)
    if scaling and inside.read(scaling, NOT_NEGATIVE, 0):
        context = min(context, original)
    if not COUNT.holds(context):
        supported = f"one that makes a context of 1 to {MAX_SIZE} tokens"
        raise inside.error("factor", factor, supported)
    return rope, context


def _of_own_context(rope: Rope, inside: Fields, kind: str, head_size: int) -> Rope:
    """A rope that does not change the longest context."""
    if kind == "proportional":
        return replace(rope, scaling="proportional", factor=float(inside.read("factor", NUMBER, 1)))
    if kind == "dynamic":
        alpha, size = float(inside.read("alpha", NUMBER)), rope.size or head_size
        return replace(rope, theta=rope.theta * alpha ** (size / (size - 2)))
    return rope


def _yarn(rope: Rope, inside: Fields) -> Rope:
    if rope.theta == 1:
        raise inside.error("rope_theta", rope.theta, "a number other than 1")

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(max(1.0, rope.factor)) + 1

    scales = [inside.read(key, NOT_NEGATIVE, 0) for key in ("mscale", "mscale_all_dim")]
    default = magnitude(scales[0]) / magnitude(scales[1]) if all(scales) else magnitude(1)
    return replace(
        rope,
        attention_factor=float(inside.read("attention_factor", NUMBER, default)),
        beta_fast=float(inside.read("beta_fast", NUMBER, 32)),
        beta_slow=float(inside.read("beta_slow", NUMBER, 1)),
        truncate=inside.read("truncate", BOOLEAN, True),
        latent_score_scale=magnitude(scales[1]) ** 2,
    )


def _longrope(rope: Rope, inside: Fields, size: int, context: int) -> Rope:
    numbers = Check(
        lambda value: (
            isinstance(value, list) and len(value) == size // 2 and all(map(NUMBER.holds, value))
        ),
        f"{size // 2} numbers above 0",
    )
    original = rope.original_context
    # By the model's longest context, whatever a sequence's length: cached keys stay valid.
    which = "long_factor" if context > original else "short_factor"
    default = math.sqrt(1 + math.log(max(1.0, rope.factor)) / math.log(original))
    return replace(
        rope,
        attention_factor=float(inside.read("attention_factor", NUMBER, default)),
        factors=tuple(inside.read(which, numbers)),
    )


def _rotated_size(fields: Fields, arch: Architecture, inside: Fields, head_size: int) -> int:
    """Number of a head's dimensions that are rotated; 0: all."""
    key, check = "partial_rotary_factor", one_of(1)
    if key in arch.defaults:
        check = Check(
            lambda value: NUMBER.holds(value) and value <= 1 and int(head_size * value) % 2 == 0,
            f"a number up to 1, by which an even number of {head_size} dimensions is rotated",
        )
    default = 1
    if "rotary_dim" in arch.defaults and fields.values["rotary_dim"] is not None:
        default = fields.read("rotary_dim", whole(1, head_size)) / head_size
    share = inside.read(key, check, fields.read(key, check, default))
    return 0 if share == 1 else int(head_size * share)
