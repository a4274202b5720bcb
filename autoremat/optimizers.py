"""The optimizer behind its wrappers, and whose parameters it steps.

Enters: an optimizer as the user's training stack hands it over: a torch optimizer, or something
around one. Leaves: each layer of it, and its parameters. Guarantees: nothing is stepped or
changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["layers_of", "parameters_of", "require_optimizer_of"]

_INNER = ("optimizer", "_optimizer", "optim")  # where wrappers keep what they wrap


def layers_of(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers among a wrapper and what it wraps, the outermost first."""
    layers: list[torch.optim.Optimizer] = []
    while optimizer is not None and not any(optimizer is layer for layer in layers):
        if isinstance(optimizer, torch.optim.Optimizer):
            layers.append(optimizer)
        held = (getattr(optimizer, name, None) for name in _INNER)
        optimizer = next((o for o in held if isinstance(o, torch.optim.Optimizer)), None)
    return layers


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """The parameters that any layer of an optimizer steps, each once."""
    groups = (group for layer in layers_of(optimizer) for group in layer.param_groups)
    found = {id(parameter): parameter for group in groups for parameter in group["params"]}
    return list(found.values())


def require_optimizer_of(model: nn.Module, optimizer: Any) -> None:
    """Refuse what is no optimizer, or the optimizer of another model.

    Parameters of another precision than any of the model's may be copies of the model's, as mixed
    precision keeps them by hand.

    Raises:
        TypeError: if it is no optimizer, nor anything around one.
        ValueError: if none of its parameters is the model's.
    """
    if optimizer is None:
        return
    if not layers_of(optimizer):
        raise TypeError(
            "optimizer is a torch.optim.Optimizer, or a wrapper that has one as its .optimizer, "
            f"not {type(optimizer).__name__}."
        )
    mine, stepped = list(model.parameters()), parameters_of(optimizer)
    shared = {id(parameter) for parameter in mine}.intersection(map(id, stepped))
    if shared or not {p.dtype for p in mine}.intersection(p.dtype for p in stepped):
        return
    raise ValueError(
        f"None of the optimizer's {len(stepped)} parameters is among the model's {len(mine)}: it "
        "is another model's, or was made before the model's parameters were replaced (a copy of "
        "the model, model.to() where that makes new parameters, sharding, "
        "load_state_dict(assign=True)). Make the optimizer from model.parameters() of this model, "
        "after all that changes them."
    )
