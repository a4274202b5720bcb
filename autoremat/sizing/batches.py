"""Batches of any size, without their bytes.

Enters: the user's function that makes a batch of a size. Leaves: its tensors on the meta device.
Guarantees: but for the first and smallest batch, the function runs on fake tensors, so that one of
any size takes no memory; only where it reads numbers out of tensors does it run as it is. What it
returns is held against what it returned before: sizes may differ, kinds may not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from fractions import Fraction
from typing import Any

import torch

from autoremat import _torch

Batch = tuple[tuple[Any, ...], dict[str, Any]]
_FORMS = "a tensor, a tuple of tensors (positional) or a dict of them (keywords)"


class BatchError(ValueError):
    """A batch that cannot be planned for; the message says which size, and what would do.

    Attributes:
        is_size: whether the function refused this size, so that smaller ones may do.
    """

    def __init__(self, message: str, *, is_size: bool = False) -> None:
        """Keeps both."""
        super().__init__(message)
        self.is_size = is_size


class Batches:
    """What one function makes."""

    def __init__(self, make: Callable[[int], Any], over: str) -> None:
        """Nothing is made yet.

        Args:
            make: the user's function.
            over: what its argument is, for messages.
        """
        if not callable(make):
            raise TypeError(f"make_batch is a function of a size, not {type(make).__name__}.")
        self._make, self._over = make, over
        self._name = getattr(make, "__name__", "make_batch")
        self._made: dict[int, Batch] = {}

    def at(self, size: int) -> Batch:
        """A batch of a size: positional and keyword inputs, tensors on the meta device.

        Raises:
            BatchError: if the function raises, or returns something else than at other sizes.
        """
        if size not in self._made:
            batch = self._checked(size, self._run(size))
            self._require_alike(size, batch)
            self._made[size] = batch
        return self._made[size]

    def varying(self, one: int, other: int) -> tuple[tuple[int, int], ...]:
        """Which sizes of which tensors differ between two batches: number and dimension."""
        pairs = zip(_shapes(self.at(one)), _shapes(self.at(other)), strict=True)
        return tuple(
            (number, dimension)
            for number, (first, second) in enumerate(pairs)
            for dimension, (a, b) in enumerate(zip(first, second, strict=True))
            if a != b
        )

    def _run(self, size: int) -> Any:
        """The first one as it is: what the function keeps from its first call must be no fake."""
        if self._made:
            mode = _torch.FakeTensorMode(allow_non_fake_inputs=True)
            with mode, warnings.catch_warnings(), suppress(Exception):
                warnings.simplefilter("ignore")
                return self._make(size)
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        try:
            with torch.random.fork_rng(devices=devices):
                return self._make(size)
        except Exception as error:
            raise BatchError(
                f"{self._name}({size}) raised {type(error).__name__}: {first_line(error)}",
                is_size=True,
            ) from error

    def _checked(self, size: int, result: Any) -> Batch:
        if isinstance(result, torch.Tensor):
            result = (result,)
        if isinstance(result, Mapping):
            args, keywords = (), {str(name): value for name, value in result.items()}
        elif isinstance(result, tuple | list):
            args, keywords = tuple(result), {}
        else:
            kind = type(result).__name__
            raise BatchError(f"{self._name}({size}) returned a {kind}. Return {_FORMS}.")
        if not _torch.tensor_leaves((args, keywords)):
            raise BatchError(f"{self._name}({size}) returned no tensor. Return {_FORMS}.")
        batch: Batch = _torch.tree_map(_on_meta, (args, keywords))
        return batch

    def _require_alike(self, size: int, batch: Batch) -> None:
        """The same inputs at each size, and more of them at a larger one."""
        if not self._made:
            return
        other = next(iter(self._made))
        now, before = _kinds(batch), _kinds(self._made[other])
        if now != before:
            differs = next(n for n in now.keys() | before.keys() if now.get(n) != before.get(n))
            raise BatchError(
                f"{self._name}({size}) returned {differs} as {now.get(differs, 'nothing')}, "
                f"{self._name}({other}) as {before.get(differs, 'nothing')}. Return the same "
                "inputs at each size, of the same types."
            )
        for known, made in self._made.items():
            small, large = sorted([(known, _numel(made)), (size, _numel(batch))])
            if small[0] < large[0] and small[1] >= large[1]:
                raise BatchError(
                    f"{self._name}({large[0]}) returned no more than {self._name}({small[0]}): "
                    f"{large[1]} numbers in all. Make the tensors as large as the argument says "
                    f"({self._over}), or give most={small[0]} where there is no more.",
                )
        self._require_on_line(size, batch)

    def _require_on_line(self, size: int, batch: Batch) -> None:
        """Of a batch, each size of each tensor is that of two others, and so much for each more."""
        if self._over != "batch" or len(self._made) < 2:
            return
        (one, first), (other, second) = list(self._made.items())[:2]
        share = Fraction(size - one, other - one)
        shapes = zip(_shapes(first), _shapes(second), _shapes(batch), strict=True)
        for number, (a, b, found) in enumerate(shapes):
            expected = tuple(m + (n - m) * share for m, n in zip(a, b, strict=True))
            if found != expected:
                raise BatchError(
                    f"{self._name}({size}) returned tensor {number} of sizes {found}; by what it "
                    f"returned for {one} and {other} they are {tuple(map(int, expected))}. Make "
                    "the batch as large as the argument says, or give most= where there is no more."
                )


def _on_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout is not torch.strided:
        raise BatchError(f"A tensor of layout {value.layout} cannot be planned for: make it dense.")
    shape, strides = tuple(value.shape), value.stride()
    made = torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")
    return made.requires_grad_(value.requires_grad)


def _kinds(batch: Batch) -> dict[str, str]:
    """What each input is, by its place."""
    args, keywords = batch
    named = {**{f"input {n}": value for n, value in enumerate(args)}}
    named |= {f"{name!r}": value for name, value in keywords.items()}
    return {name: _kind(value) for name, value in named.items()}


def _kind(value: Any) -> str:
    tensors = _torch.tensor_leaves(value)
    if isinstance(value, torch.Tensor) or not tensors:
        return _tensor_kind(value) if tensors else type(value).__name__
    return f"{type(value).__name__} of {', '.join(map(_tensor_kind, tensors))}"


def _tensor_kind(tensor: torch.Tensor) -> str:
    return f"a tensor of {tensor.dim()} dimensions of {tensor.dtype}"


def _shapes(batch: Batch) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in _torch.tensor_leaves(batch)]


def _numel(batch: Batch) -> int:
    return sum(tensor.numel() for tensor in _torch.tensor_leaves(batch))


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).strip().splitlines() or [""])[0][:300]
