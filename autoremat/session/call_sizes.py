"""The sizes of what a model is called with, and what they may be in later calls.

Enters: what was said of sizes, and each training call. Leaves: marks for Dynamo, and while the call
runs, the range of every size that a graph is given. Guarantees: a call that is larger than its
range is refused before it runs, unless larger ones may be planned; holds no tensor.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from autoremat import _torch
from autoremat.ask.sizes import Extent, Sizes, Varying, rounded_up
from autoremat.errors import SizeError
from autoremat.memory.storage_sizes import storage_identities, storages_of
from autoremat.planning.ranges import Ranged


class Given(NamedTuple):
    """A storage of the batch whose sizes may be others in later calls.

    Attributes:
        storage: its identity.
        device: where it is.
        itemsize: bytes of an element.
        shape: its sizes, and the ranges of those that have one.
        nbytes: all of it now.
    """

    storage: int
    device: torch.device
    itemsize: int
    shape: tuple[int | Extent, ...]
    nbytes: int

    def nbytes_at(self, sizes: Mapping[str, Any]) -> Any:
        """Its bytes where sizes are others, by their names; what is not among them is largest."""
        extents = (sizes.get(n.name, n.high) if isinstance(n, Extent) else n for n in self.shape)
        return math.prod(extents, start=self.itemsize)


@dataclass(frozen=True)
class Ranges:
    """Of one call.

    Attributes:
        batch: what it is given.
        of_tensors: by identity of a tensor that it is given, and by dimension.
        of_numbers: by a size that it has, for what is made of its inputs.
        shared: numbers that are those of several sizes.
        may_be_exact: whether the sizes at hand will do, if no plan fits the largest ones.
    """

    batch: tuple[Given, ...] = ()
    of_tensors: Mapping[int, Mapping[int, Extent]] = field(default_factory=dict)
    of_numbers: Mapping[int, Extent] = field(default_factory=dict)
    shared: frozenset[int] = frozenset()
    may_be_exact: bool = False

    def among(self, given: Sequence[Any], fakes: Sequence[Any]) -> list[Ranged]:
        """The sizes of a graph's inputs that have a range.

        Args:
            given: inputs of a graph, as Dynamo hands them over.
            fakes: the same with symbols.
        """
        found: list[Ranged] = []
        for value, fake in zip(given, fakes, strict=True):
            if isinstance(fake, torch.SymInt):
                found += self._like(fake)
            elif isinstance(fake, torch.Tensor):
                known = {**self.of_tensors.get(id(value), {}), **_marked(value)}
                for dimension, size in enumerate(fake.shape):
                    if dimension in known:
                        fixed_at = functools.partial(_torch.fixed_at, fake, dimension)
                        found.append(Ranged(size, known[dimension], fixed_at))
                    elif isinstance(size, torch.SymInt):
                        found += self._like(size)
        return found

    def absent(self, given: Sequence[Any]) -> tuple[Given, ...]:
        """Of the batch, what is not among a graph's inputs."""
        tensors = (value for value in given if isinstance(value, torch.Tensor))
        inputs = storage_identities(tensors)
        return tuple(one for one in self.batch if one.storage not in inputs)

    def _like(self, size: torch.SymInt) -> Iterator[Ranged]:
        number = _torch.size_hint(size)
        extent = self.of_numbers.get(number)
        if extent is not None:
            yield Ranged(size, extent, is_sure=number not in self.shared)


def _marked(value: torch.Tensor) -> dict[int, Extent]:
    marks = _torch.marked_ranges(value)
    return {n: Extent(f"size({n})", low, high) for n, (low, high) in marks.items()}


def _given(tensor: torch.Tensor, extents: Mapping[int, Extent]) -> Given | None:
    """The storage of a tensor that is all of it; None of others, whose sizes do not tell."""
    storages = list(storages_of(tensor))
    if tensor.layout != torch.strided or len(storages) != 1:
        return None
    strides = enumerate(tensor.stride())
    sizes = {n: int(tensor.shape[n]) for n, stride in strides if stride}  # the rest is expanded
    (storage,), nbytes = storages, math.prod(sizes.values(), start=tensor.itemsize)
    if storage.nbytes() != nbytes:
        return None
    shape = tuple(extents.get(n, size) for n, size in sizes.items())
    return Given(_torch.storage_identity(storage), tensor.device, tensor.itemsize, shape, nbytes)


_now: ContextVar[Callable[[], Ranges]] = ContextVar("ranges", default=Ranges)


def ranges_now() -> Ranges:
    """Those of the call that runs."""
    return _now.get()()


class CallSizes:
    """Of the calls of one module."""

    def __init__(self, asked: Sizes) -> None:
        """Nothing has come yet."""
        self._asked = asked
        self._highest: dict[str, int] = {}  # by name of a size
        self._is_first = True

    @contextlib.contextmanager
    def of(
        self, forward: Callable[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> Iterator[None]:
        """A call that is within its ranges.

        Args:
            forward: the method of the model's, without the model itself.
            args: of the call.
            keywords: of the call.

        Raises:
            SizeError: if it is larger than its range, and no other plan may be made.
            ValueError: if the first call lacks an input that was named.
        """
        if not self._asked.given:
            yield
            return
        varying = self._asked.among(forward, args, keywords)
        if self._is_first:
            self._require_met(forward, args, keywords)
        extents = [self._extent_of(one) for one in varying]
        # Every call comes here, and few compile, which is where ranges are asked for.
        token = _now.set(lambda: self._ranges_of(varying, extents))
        try:
            yield
        finally:
            _now.reset(token)

    def _require_met(
        self, forward: Callable[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> None:
        name = self._asked.unmet(forward, args, keywords)
        if name is not None:
            given = ", ".join([*(f"argument {n}" for n in range(len(args))), *keywords])
            raise ValueError(
                f"sizes= names {name!r}, and the model is called with {given or 'nothing'}: no "
                "tensor of that name is among it. An input has the name that the model's forward "
                "or the batch's dict gives it."
            )
        self._is_first = False

    def _extent_of(self, one: Varying) -> Extent:
        """What a size may be; Dynamo is told that it varies."""
        high = self._high_of(one)
        if self._asked.is_seen:  # nobody said that it varies
            return Extent(one.name, high, high)
        _torch.may_vary(one.tensor, one.dimension)
        return Extent(one.name, one.low, high)

    def _ranges_of(self, varying: Sequence[Varying], extents: Sequence[Extent]) -> Ranges:
        of_tensors: dict[int, dict[int, Extent]] = {}
        tensors = {id(one.tensor): one.tensor for one in varying}
        of_numbers: dict[int, Extent] = {}
        shared: set[int] = set()
        for one, extent in zip(varying, extents, strict=True):
            of_tensors.setdefault(id(one.tensor), {})[one.dimension] = extent
            # Of sizes that are equal in this call, what is made of inputs may be like either.
            if of_numbers.get(one.size, extent).name != extent.name:
                shared.add(one.size)
            if extent.high >= of_numbers.get(one.size, extent).high:
                of_numbers[one.size] = extent
        found = (_given(tensor, of_tensors[key]) for key, tensor in tensors.items())
        batch = {one.storage: one for one in found if one is not None}
        may_be_exact = self._asked.on_larger == "plan"
        return Ranges(
            tuple(batch.values()), of_tensors, of_numbers, frozenset(shared), may_be_exact
        )

    def _high_of(self, one: Varying) -> int:
        """The largest that a size is planned for from this call on."""
        high = max(one.high or 0, self._highest.get(one.name, 0))
        if one.size > high:
            if self._asked.on_larger == "raise":
                raise SizeError(one.name, one.size, high)
            high = rounded_up(one.size)
        self._highest[one.name] = high
        return high
