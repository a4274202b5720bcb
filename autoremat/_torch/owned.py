"""Parameters of modules and gradients of tensors, asked for at each call: as quick as can be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

__all__ = ["OfParameter", "all_modules", "own_gradients", "own_parameters"]

OfParameter = tuple[torch.Tensor, torch.Tensor]
"""What a gradient is of, and the gradient."""


def all_modules(roots: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """What `modules()` gives of each of these, each once, without names that nobody reads."""
    seen: set[int] = set()
    stack = [*roots][::-1]
    while stack:
        module = stack.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            stack.extend(m for m in reversed(module._modules.values()) if m is not None)


def own_parameters(modules: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    """What `parameters(recurse=False)` gives of each of these, without its chain of generators."""
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                yield parameter


def own_gradients(tensors: Iterable[torch.Tensor]) -> Iterator[OfParameter]:
    """The gradients that tensors have now; results of operations have none, and torch warns."""
    for tensor in tensors:  # each backward asks this of each parameter
        try:  # not `suppress`, which takes several times as long
            is_leaf = tensor.is_leaf
        except RuntimeError:  # autograd refuses to say of a view whose base was changed
            continue
        if is_leaf and (gradient := tensor.grad) is not None:
            yield tensor, gradient
