"""What a wrapper that Inductor generated will allocate, known before anything runs.

Enters: the wrapper's source and the sizes of its buffers. Leaves: the live bytes after each
statement, and the allocations and frees themselves. The wrapper is a straight line of allocations,
kernel calls, renamings and `del`s; they are followed by name, as Python would by reference count.
Exact on what the wrapper allocates; what a library call takes inside is measured (`library_calls`).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoremat import _torch
from autoremat.host.operators import OFFLOAD, WAITS

# What allocators give is aligned; inputs that are not are copied, which nobody can foresee.
_SAME_MEMORY = ("reinterpret_tensor", "alias_tensor", "copy_if_misaligned")

# A plan's copies: of one that leaves nothing is in memory, and who waits for a copy is given it.
_AWAY, *_WAITS = (f"torch.ops.{target}" for target in (OFFLOAD, *WAITS))

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides, in elements


class WrapperError(ValueError):
    """The source is not a wrapper that this module can follow. The message says where."""


@dataclass(frozen=True)
class Buffers:
    """What the wrapper's text does not say.

    Attributes:
        input_nbytes: bytes of each input that the call owns, in order; 0 where others own it.
        input_values: numbers for inputs that are symbols, None for tensors, in order.
        result_nbytes: by the name of an operation's result, bytes of each element of it.
        library_nbytes: for a library call's text, the bytes that it allocates at its highest
            point and those that its results hold; None if it is not known.
        round_nbytes: rounds a request as the device's allocator does.
        device_type: "cpu" or "cuda": only its buffers are counted.
        shared_inputs: by position of an input that lies in the storage of an earlier one, the
            position of that.
        input_layouts: the sizes and the strides of each input, in order; None for numbers.
    """

    input_nbytes: Sequence[int]
    input_values: Sequence[int | None]
    result_nbytes: Mapping[str, Sequence[int]]
    library_nbytes: Callable[[str], tuple[int, int] | None]
    round_nbytes: Callable[[int], int]
    device_type: str
    shared_inputs: Mapping[int, int]
    input_layouts: Sequence[Layout | None]


@dataclass(frozen=True)
class WrapperMemory:
    """What a wrapper allocates.

    Attributes:
        live_nbytes: live bytes after each statement; inputs that the call owns are live at first.
        returned: for each result the storage that it lies in and that storage's bytes; results
            with the same number share a storage. None for results that are no tensors.
        events: in their order, each storage that is allocated, with its bytes, or freed, with 0.
            Inputs that the call owns are there before the first.
        inputs: by position, the storage of each input; None for numbers.
        buffers_nbytes: bytes of each buffer that is allocated for kernels and calls to write in, in
            order; what libraries allocate for their results is none.
    """

    live_nbytes: tuple[int, ...]
    returned: tuple[tuple[int, int] | None, ...]
    events: tuple[tuple[int, int], ...] = ()
    inputs: tuple[int | None, ...] = ()
    buffers_nbytes: tuple[int, ...] = ()

    @property
    def returned_nbytes(self) -> int:
        """Bytes of all results, storages counted once."""
        return sum(dict(result for result in self.returned if result is not None).values())

    @property
    def peak_nbytes(self) -> int:
        """The highest number of live bytes."""
        return max(self.live_nbytes, default=0)


def read_wrapper(source: str, buffers: Buffers) -> WrapperMemory:
    """Follow a wrapper's `call` function.

    Raises:
        WrapperError: if there is no such function or a size cannot be evaluated.
    """
    reader = _Reader(buffers)
    reader.block(call_function(source).body)
    return WrapperMemory(
        *(tuple(reader.curve), tuple(reader.returned)),
        events=tuple(reader.events),
        inputs=tuple(reader.inputs),
        buffers_nbytes=tuple(reader.buffers_nbytes),
    )


def call_function(source: str) -> ast.FunctionDef:
    """The wrapper's function that allocates and calls.

    Raises:
        WrapperError: if there is none.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == "call":
            return node
    raise WrapperError("The generated source has no function `call`.")


class _Reader:
    """Names, the storages behind them, and how many names each storage has."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._storages: dict[str, tuple[int, ...]] = {}
        self._nbytes: dict[int, int] = {}
        self._references: dict[int, int] = {}
        self._numbers: dict[str, Any] = {"torch": torch}
        self._layouts: dict[str, Layout | None] = {}
        self._live = 0
        self.curve: list[int] = []
        self.returned: list[tuple[int, int] | None] = []
        self.events: list[tuple[int, int]] = []
        self.inputs: list[int | None] = []
        self.buffers_nbytes: list[int] = []

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            if isinstance(statement, (ast.With, ast.If, ast.Try, ast.For)):
                self.block(statement.body)
                continue
            self._statement(statement)

    def _statement(self, statement: ast.stmt) -> None:
        workspace = 0
        match statement:
            case ast.Assign(
                targets=[ast.Tuple(elts=names) | ast.List(elts=names)], value=ast.Name(id="args")
            ):
                self._inputs([name.id for name in names if isinstance(name, ast.Name)])
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                workspace = self._assign(name, value)
            case ast.Delete(targets=targets):
                for target in targets:
                    if isinstance(target, ast.Name):
                        self._drop(target.id)
            case ast.Expr(value=ast.Call() as call):
                workspace = self._workspace_of(call)
            case ast.Return(value=value):
                self._returned(value)
        if workspace:
            taken = self._allocate(workspace)
            self.events += [(taken, self._nbytes[taken]), (taken, 0)]
        self.curve.append(self._live + workspace)

    def _inputs(self, names: Sequence[str]) -> None:
        for position, name in enumerate(names):
            self._layouts[name] = self._buffers.input_layouts[position]
            number = self._buffers.input_values[position]
            if number is not None:
                self._numbers[name] = number
                self.inputs.append(None)
            else:
                first = self._buffers.shared_inputs.get(position)
                storage = self.inputs[first] if first is not None else None
                if storage is None:
                    storage = self._allocate(self._buffers.input_nbytes[position])
                self._bind(name, (storage,))
                self.inputs.append(storage)
        self.events.clear()  # they were there before

    def _assign(self, name: str, value: ast.expr) -> int:
        match value:
            case ast.Name(id=source) if source in self._storages:
                self._bind(name, self._storages[source])
            case ast.Subscript(value=ast.Name(id=source), slice=ast.Constant(value=int(index))) if (
                source in self._storages
            ):
                inside = self._storages[source]
                self._bind(name, (inside[index],) if index < len(inside) else inside)
            case ast.Call(func=ast.Name(id="get_raw_stream")):
                pass  # a number; what was called so is none of ours
            case ast.Call(func=ast.Name(id=function), args=[ast.Name(id=source), *_]) if (
                function in _SAME_MEMORY
                or (source in self._storages and function.startswith("as_strided"))
            ):
                self._bind(name, self._storages.get(source, ()))
            case ast.Call(func=ast.Name(id=function), args=arguments) if function.startswith(
                "empty_strided"
            ):
                on_device = function.removeprefix("empty_strided_").startswith(
                    self._buffers.device_type
                )
                nbytes = self._strided_nbytes(arguments) if on_device else 0
                self.buffers_nbytes.append(nbytes)
                self._bind(name, (self._allocate(nbytes),))
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=source), attr="size" | "stride" as which)
            ) if layout := self._layouts.get(source):
                # Where a symbol is an input's size and no argument of its own.
                self._numbers[name] = layout[which == "stride"]
            case ast.Call(func=function, args=[ast.Name(id=source), *_]) if (
                ast.unparse(function) in _WAITS
            ):
                self._bind(name, self._storages.get(source, ()))
            case ast.Call(func=function) if ast.unparse(function) == _AWAY:
                self._bind(name, (self._allocate(0),))
            case ast.Call() as call:
                sizes = self._result_nbytes(name, call)
                self._bind(name, tuple(self._allocate(nbytes) for nbytes in sizes))
                return self._workspace_of(call)
            case _:
                self._number(name, value)
        return 0

    def _number(self, name: str, value: ast.expr) -> None:
        """Symbols such as `s0 = arg0_1` and expressions over them."""
        try:
            code = compile(ast.Expression(value), "<wrapper>", "eval")
            self._numbers[name] = eval(code, {"__builtins__": {}}, self._numbers)
        except Exception:  # not a number: nothing that owns memory
            self._numbers.pop(name, None)

    def _strided_nbytes(self, arguments: Sequence[ast.expr]) -> int:
        try:
            size, stride, dtype = (
                eval(compile(ast.Expression(part), "<wrapper>", "eval"), {}, self._numbers)
                for part in arguments[:3]
            )
        except Exception as error:
            text = ", ".join(ast.unparse(part) for part in arguments)
            raise WrapperError(f"Cannot evaluate the size of a buffer ({text}): {error}") from error
        return int(_torch.extent(size, stride)) * torch.empty((), dtype=dtype).element_size()

    def _result_nbytes(self, name: str, call: ast.Call) -> list[int]:
        """Bytes of each result; what its storage holds beyond that is charged to the first."""
        if name not in self._buffers.result_nbytes:
            raise WrapperError(f"The size of the result {name!r} is not known.")
        sizes = list(self._buffers.result_nbytes[name])
        measured = self._buffers.library_nbytes(ast.unparse(call))
        if measured is not None and sizes:
            sizes[0] += max(0, measured[1] - sum(sizes))
        return sizes

    def _workspace_of(self, call: ast.Call) -> int:
        measured = self._buffers.library_nbytes(ast.unparse(call))
        return max(0, measured[0] - measured[1]) if measured is not None else 0

    def _allocate(self, nbytes: int) -> int:
        storage = len(self._nbytes)
        self._nbytes[storage] = self._buffers.round_nbytes(nbytes)
        self._references[storage] = 0
        return storage

    def _bind(self, name: str, storages: tuple[int, ...]) -> None:
        for storage in storages:
            if self._references[storage] == 0:
                self._live += self._nbytes[storage]
                self._note(storage, self._nbytes[storage])
            self._references[storage] += 1
        self._drop(name)
        self._storages[name] = storages

    def _drop(self, name: str) -> None:
        for storage in self._storages.pop(name, ()):
            self._references[storage] -= 1
            if self._references[storage] == 0:
                self._live -= self._nbytes[storage]
                self._note(storage, 0)

    def _note(self, storage: int, nbytes: int) -> None:
        if self._nbytes[storage]:
            self.events.append((storage, nbytes))

    def _returned(self, value: ast.expr | None) -> None:
        for result in value.elts if isinstance(value, (ast.Tuple, ast.List)) else ():
            names = (n.id for n in ast.walk(result) if isinstance(n, ast.Name))
            storages = next((self._storages[n] for n in names if n in self._storages), ())
            found = (storages[0], self._nbytes[storages[0]]) if storages else None
            self.returned.append(found)
