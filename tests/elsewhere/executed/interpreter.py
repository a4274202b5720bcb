"""Triton's interpreter, as far as Inductor's kernels need more of it than it has.

Enters: nothing. Leaves: the interpreter of this process, changed. It runs kernels on numpy arrays
(`TRITON_INTERPRET=1` before triton is imported); Inductor's own launcher calls it then, with the
largest blocks that it would try. Three things are other than in triton 3.9: functions of libdevice,
which it cannot call, are torch's of the same names; a reduction by a function combines halves, not
one element after the other; and a number becomes bfloat16 by rounding to the nearest, not towards
zero, as a GPU does it.
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.runtime import triton_helpers
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import interpreter

KERNELS: dict[str, int] = {}
"""How often each kernel of this process was interpreted, by its name."""


class _Libdevice:
    """Functions of tensors, by their names in torch."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(torch, {"nearbyint": "round", "rint": "round"}.get(name, name))

        def call(*given: Any) -> tl.tensor:
            like = next(value for value in given if isinstance(value, tl.tensor))
            dtype = like.handle.data.dtype
            found: Tensor = function(*(_as_torch(value, dtype) for value in given))
            is_told = found.dtype is torch.bool
            handle = interpreter.TensorHandle(
                found.numpy(), tl.int1 if is_told else like.dtype.scalar
            )
            shape = list(found.shape) if like.type.is_block() else []
            kind = tl.block_type(handle.dtype, shape) if shape else handle.dtype
            return tl.tensor(handle, kind)

        return call


def _as_torch(value: Any, dtype: Any) -> Tensor:
    array = value.handle.data if isinstance(value, tl.tensor) else np.asarray(value, dtype)
    return torch.from_numpy(np.array(array))


def _reduced(self: Any, given: Any) -> list[Any]:
    """Along one axis: one half with the other, and so on."""
    is_whole, (tensors, axis) = self.axis is None, self.unravel(given, self.axis)
    arrays = [np.moveaxis(tensor.handle.data, axis, 0) for tensor in tensors]
    dtypes = [tensor.dtype for tensor in tensors]

    def tensors_of(part: slice) -> list[Any]:
        return [
            self.to_tensor(np.ascontiguousarray(array[part]), dtype)
            for array, dtype in zip(arrays, dtypes, strict=True)
        ]

    while (half := len(arrays[0]) // 2) > 0:  # their number is a power of two
        found = self.combine_fn.fn(*tensors_of(slice(half)), *tensors_of(slice(half, None)))
        found = found if isinstance(found, tuple) else (found,)
        arrays = [tensor.handle.data for tensor in found]
    arrays = [array[0] for array in arrays]
    if self.keep_dims:
        kept = [1] * len(given[0].shape) if is_whole else None
        arrays = [one.reshape(kept) if kept else np.expand_dims(one, axis) for one in arrays]
    return [
        self.to_tensor(one if one.shape else one.item(), dtype)
        for one, dtype in zip(arrays, dtypes, strict=True)
    ]


def _rounding(cast: Callable[..., Any]) -> Callable[..., Any]:
    """To bfloat16 and from it as torch does; else as the interpreter does."""

    def cast_impl(self: Any, source: Any, kind: Any) -> Any:
        before, after = source.dtype.scalar, kind.scalar
        if (before, after) == (tl.float32, tl.bfloat16):
            narrow = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
            return interpreter.TensorHandle(narrow.view(torch.int16).numpy().view(np.uint16), after)
        if (before, after) == (tl.bfloat16, tl.float32):
            wide = source.data.astype(np.uint32) << 16
            return interpreter.TensorHandle(wide.view(np.float32), after)
        return cast(self, source, kind)

    return cast_impl


class _Interpreted:
    """A kernel as the wrapper calls it, its name noted; no operator that it uses is the step's."""

    def __init__(self, name: str, kernel: Any) -> None:
        self._name, self._kernel = name, kernel

    def run(self, *given: Any, **keywords: Any) -> None:
        KERNELS[self._name] = KERNELS.get(self._name, 0) + 1
        with _disable_current_modes(), np.errstate(all="ignore"):
            self._kernel.run(*given, **keywords)
        gc.collect(0)  # the interpreter holds what it was given in a cycle


@functools.cache
def prepare() -> None:
    """Change the interpreter, and let Inductor's wrappers load their kernels for it."""
    gc.freeze()
    gc.disable()  # so that what a kernel leaves is found among what is youngest
    load = AsyncCompile.triton

    def triton(self: AsyncCompile, name: str, source: str, device_str: str = "cuda") -> Any:
        kernel = load(self, name, source, device_str)
        kernel.configs.sort(key=lambda config: -math.prod(config.kwargs.values()))
        return _Interpreted(name, kernel)

    AsyncCompile.triton = triton  # type: ignore[method-assign]
    triton_helpers.libdevice = _Libdevice()
    triton_helpers.set_driver_to_gpu = lambda: None
    interpreter.ReduceOps.generic_reduce = _reduced
    language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang(language)  # once, not with each function that a kernel calls
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()
    builder = interpreter.InterpreterBuilder
    builder.cast_impl = _rounding(builder.cast_impl)
