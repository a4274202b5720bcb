"""The sizes of what a model is called with, and what they may be in later calls.

Enters: what was said of sizes, and each training call. Leaves: marks for Dynamo, and while the call
runs, the range of every size that a graph is given. Guarantees: a call that is larger than its
range is refused before it runs, unless larger ones may be planned; holds no tensor.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from autoremat import _torch
from autoremat.ask.sizes import Extent, Sizes, Varying, rounded_up
from autoremat.errors import SizeError
from autoremat.planning.ranges import Ranged


@dataclass(frozen=True)
class Ranges:
    """Of one call.

    Attributes:
        of_tensors: by identity of a tensor that it is given, and by dimension.
        of_numbers: by a size that it has, for what is made of its inputs.
        may_be_exact: whether the sizes at hand will do, if no plan fits the largest ones.
    """

    of_tensors: Mapping[int, Mapping[int, Extent]] = field(default_factory=dict)
    of_numbers: Mapping[int, Extent] = field(default_factory=dict)
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

    def _like(self, size: torch.SymInt) -> Iterator[Ranged]:
        extent = self.of_numbers.get(_torch.size_hint(size))
        if extent is not None:
            yield Ranged(size, extent)


def _marked(value: torch.Tensor) -> dict[int, Extent]:
    marks = _torch.marked_ranges(value)
    return {n: Extent(f"size({n})", low, high) for n, (low, high) in marks.items()}


_now: ContextVar[Ranges | None] = ContextVar("ranges", default=None)


def ranges_now() -> Ranges:
    """Those of the call that runs."""
    return _now.get() or Ranges()


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
        token = _now.set(self._ranges_of(varying))
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

    def _ranges_of(self, varying: Sequence[Varying]) -> Ranges:
        of_tensors: dict[int, dict[int, Extent]] = {}
        of_numbers: dict[int, Extent] = {}
        for one in varying:
            high = self._high_of(one)
            # Of what was only seen, nobody said that it varies.
            extent = Extent(one.name, high if self._asked.is_seen else one.low, high)
            of_tensors.setdefault(id(one.tensor), {})[one.dimension] = extent
            if not self._asked.is_seen:
                _torch.may_vary(one.tensor, one.dimension)
            # Of sizes that are equal in this call, what is made of inputs may be like either.
            if extent.high >= of_numbers.get(one.size, extent).high:
                of_numbers[one.size] = extent
        return Ranges(of_tensors, of_numbers, self._asked.on_larger == "plan")

    def _high_of(self, one: Varying) -> int:
        """The largest that a size is planned for from this call on."""
        high = max(one.high or 0, self._highest.get(one.name, 0))
        if one.size > high:
            if self._asked.on_larger == "raise":
                raise SizeError(one.name, one.size, high)
            high = rounded_up(one.size)
        self._highest[one.name] = high
        return high
