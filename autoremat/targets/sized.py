"""A target whose batch may have any size: what `fit` needs of it.

Enters: a target's text. Leaves: the `Target`, and a function from a size to its inputs. A function
that has a parameter of the size's name is called with it; else the batch is what all its inputs
have in common, their first dimension. Of an `hf:` target the sizes are its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from autoremat.targets.arguments import TargetArguments
from autoremat.targets.hf import batch_of, load, most_positions
from autoremat.targets.target import Target, TargetError, load_target, takes

BATCH, SEQUENCE = "batch", "sequence"


def load_sized(
    target: TargetArguments, over: str
) -> tuple[Target, Callable[[int], Any], int | None]:
    """The target, what makes its inputs of a size, and the largest size that it says it takes.

    Args:
        target: what the user wrote.
        over: name of the size.

    Raises:
        TargetError: if it has no such size.
    """
    if target.is_hf:
        if over not in (BATCH, SEQUENCE):
            raise TargetError(f"An hf: target has the sizes {BATCH} and {SEQUENCE}, not {over!r}.")
        smallest = replace(target, seq=1) if over == SEQUENCE else target
        loaded = load(smallest, without_weights=True)

        def sized(size: int) -> Any:
            is_batch = over == BATCH
            asked = replace(target, batch=size) if is_batch else replace(target, seq=size)
            return batch_of(loaded.model, asked)

        most = most_positions(loaded.model) if over == SEQUENCE else None
        return loaded, sized, most
    if takes(target.text, over):
        loaded = load_target(target.text)

        def called(size: int) -> Any:
            made = load_target(target.text, **{over: size})
            return dict(made.keywords) if made.keywords else made.inputs

        return loaded, called, None
    if over != BATCH:
        raise TargetError(
            f"{target.text} has no parameter {over!r}: give the function one, such as "
            f"def make({over}=512), and let it make its inputs of that size."
        )
    loaded = load_target(target.text)
    rows = {t.shape[0] if t.dim() else None for t in _tensors(loaded)}
    if len(rows) != 1 or rows == {None}:
        raise TargetError(
            f"The inputs of {target.text} have no first dimension in common, which would be the "
            f"batch. Give the function a parameter {BATCH!r}: def make({BATCH}=8)."
        )

    def resized(size: int) -> Any:
        tensors = [_with_rows(tensor, size) for tensor in _tensors(loaded)]
        if loaded.keywords:
            return dict(zip(loaded.keywords, tensors, strict=True))
        return tuple(tensors)

    return loaded, resized, None


def _tensors(target: Target) -> list[torch.Tensor]:
    return [*target.inputs, *target.keywords.values()]


def _with_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    made = torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad)
