"""Lets this process run Triton's kernels on the CPU, in its interpreter: import it before a kernel.

Triton decides when a kernel is decorated, and for its own library when it is imported; the
environment decides. Here triton is imported with it set, and it is removed again, so that
no process that a test starts inherits it: one of those compiles kernels, and a worker may find a
GPU. `TRITON_INTERPRET=0` in the environment leaves kernels to the GPU, for tests that need one.

The interpreter cuts bits off where a GPU rounds to the nearest; conversions between floating types
are done by torch instead.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from typing import Any

VARIABLE = "TRITON_INTERPRET"


def _interpret() -> None:
    if os.environ.get(VARIABLE) == "0" or not importlib.util.find_spec("triton"):
        return
    os.environ[VARIABLE] = "1"
    early = "triton" in sys.modules

    import triton  # noqa: PLC0415
    from triton.runtime import interpreter  # noqa: PLC0415

    assert isinstance(triton.language.standard.sum, interpreter.InterpretedFunction), (
        f"triton was imported for a GPU {'before' if early else 'in spite of'} tests.interpreted"
    )
    del os.environ[VARIABLE]
    triton.knobs.propagate_env = False
    triton.knobs.runtime.interpret = True
    triton.knobs.propagate_env = True
    _round_as_gpus_do(interpreter)
    _count_with_any_numpy(interpreter)
    _patch_language_once(interpreter)
    _make_types_cheaply(interpreter)


def _round_as_gpus_do(interpreter: Any) -> None:
    """Conversions of floating types by torch: to the nearest, ties to even, e4m3 saturating."""
    convert = interpreter._convert_float

    def rounded(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        import numpy as np  # noqa: PLC0415
        import torch  # noqa: PLC0415

        types = {
            "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
            "fp8e4nv": torch.float8_e4m3fn,
        }  # fmt: skip
        toward_zero = rounding == interpreter._ir.ROUNDING_MODE.RTZ
        if toward_zero or source.name not in types or target.name not in types:
            return convert(values, source, target, rounding)
        bits = {1: np.uint8, 2: np.uint16, 4: np.uint32}
        flat = np.ascontiguousarray(values).reshape(-1).view(bits[values.itemsize])
        wide = torch.from_numpy(flat.copy()).view(types[source.name]).float()
        if target.name == "fp8e4nv":
            wide = wide.clamp(-448.0, 448.0)
        narrow = wide.to(types[target.name])
        raw = narrow.view(getattr(torch, f"uint{8 * narrow.itemsize}")).numpy()
        return raw.reshape(values.shape)

    interpreter._convert_float = rounded


def _count_with_any_numpy(interpreter: Any) -> None:
    """Triton 3.6 gives numpy an array of one element for an integer, which numpy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patched


def _patch_language_once(interpreter: Any) -> None:
    """Triton replaces its language's functions at each launch and each call of a device function,
    and puts them back behind the launch: a third of a kernel's time. Here they stay replaced.
    """
    patch, patched = interpreter._patch_lang, dict[int, Any]()
    unchanged = interpreter._LangPatchScope()
    by_globals: dict[int, Any] = {}

    def patch_once(fn: Any) -> Any:
        known = id(fn.__globals__)
        if known not in by_globals:
            by_globals[known] = fn.__globals__  # kept, so that no other has this id
            modules = [
                one for one in fn.__globals__.values() if any(one is its for its in languages)
            ]
            if not all(id(module) in patched for module in modules):
                patch(fn)
                patched.update((id(module), module) for module in modules)
        return unchanged

    languages = [interpreter.tl, interpreter.tl.core]
    interpreter._patch_lang = patch_once


def _make_types_cheaply(interpreter: Any) -> None:
    """Half of a kernel's time went into types: each tensor's shape is wrapped number by number, a
    table of types is built at each look into it, shapes are compared number by number and values
    copied to them, and each sum of integers is computed again in 64 bits, for an assertion that is
    made in a debugger alone.
    """
    tl, builder = interpreter.tl, interpreter.interpreter_builder
    core = tl.core
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    numpy_type, numpy_types = interpreter._get_np_dtype, dict[str, Any]()

    def numpy_type_of(of: Any) -> Any:
        name = (scalar := of.scalar).name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(scalar)
        return numpy_types[name]

    interpreter._get_np_dtype = numpy_type_of

    make_block, blocks = core.block_type.__init__, dict[Any, tuple[Any, ...]]()

    def init_block(block: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(one.value if isinstance(one, core.constexpr) else one for one in shape)
        if key not in blocks:
            make_block(block, element_ty, shape)
            blocks[key] = block.shape, block.numel, str(block.shape)
        block.element_ty = element_ty
        block.shape, block.numel, text = blocks[key]
        block.name = f"<{text}, {element_ty}>"

    core.block_type.__init__ = init_block

    make_tensor, shapes = core.tensor.__init__, dict[Any, tuple[Any, Any]]()

    def init_tensor(tensor: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            make_tensor(tensor, handle, type)
            shapes[key] = tensor.shape, tensor.numel
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = shapes[key]

    core.tensor.__init__ = init_tensor

    semantic = type(interpreter.interpreter_semantic)
    broadcast, wanted = semantic.broadcast_impl_value, dict[Any, tuple[Any, ...]]()

    def broadcast_views(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:  # of `shapes`: equal ones are one object
            return lhs, rhs
        key = id(lhs.shape), id(rhs.shape)
        if key not in wanted:
            wanted[key] = tuple(broadcast(self, lhs, rhs)[0].type.shape.values)
        return view(lhs, wanted[key]), view(rhs, wanted[key])

    def view(tensor: Any, shape: tuple[Any, ...]) -> Any:
        if (data := tensor.handle.data).shape == shape and tensor.shape:
            return tensor
        handle = interpreter.TensorHandle(
            interpreter.np.broadcast_to(data, shape), tensor.handle.dtype.scalar
        )
        return core.tensor(handle, core.block_type(tensor.dtype, shape))

    semantic.broadcast_impl_value = broadcast_views

    equal = core.dtype.__eq__
    core.dtype.__eq__ = lambda one, other: one is other or equal(one, other)


_interpret()
