"""Which parameters are trained: frozen parts, and low-rank adapters [LoRA].

Enters: a model of our own (a copy). Leaves: the same model, changed in place. Guarantees: modules
keep their paths and attributes, so that patterns that name them go on to match.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from autoremat.setup.asked import ALL_LINEAR
from autoremat.setup.named import matching

_SCALE = 2.0  # alpha over the rank: a number, which decides no bytes
_LINEAR = "linear layer (torch.nn.Linear)"


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Train no parameter of what the patterns name.

    Raises:
        ValueError: if a pattern matches nothing, or nothing is left to be trained.
    """
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = [*filter(None, modules), *parameters]
    for name in matching("freeze", patterns, names, what="module or parameter"):
        found = [parameters[name]] if name in parameters else modules[name].parameters()
        for parameter in found:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"freeze={', '.join(patterns)} leaves no parameter that is trained: narrow a pattern."
        )


def adapt(model: nn.Module, patterns: Sequence[str], rank: int) -> list[str]:
    """Give linear layers adapters of a rank, freeze everything else, and name the layers.

    Raises:
        ValueError: if a pattern matches no linear layer.
    """
    kinds = dict(model.named_modules())
    linear = [name for name, module in kinds.items() if _is_linear(module)]
    if not linear:
        raise ValueError("lora needs linear layers (torch.nn.Linear), and the model has none.")
    chosen = set(matching("lora", [p for p in patterns if p != ALL_LINEAR], linear, what=_LINEAR))
    if ALL_LINEAR in patterns:
        head = output_head(model)
        chosen |= {name for name in linear if kinds[name] is not head}
    if not chosen:
        raise ValueError(
            f"lora={', '.join(patterns)} leaves nothing to be trained: the only linear layer is "
            "the head. Name it, or leave lora out."
        )
    model.requires_grad_(False)
    for name in chosen:
        _adapt(kinds[name], rank)
    return [name for name in linear if name in chosen]


def output_head(model: Any) -> nn.Module | None:
    """What makes a model's logits, where the model tells, as those of transformers do."""
    found = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return found if isinstance(found, nn.Module) else None


def _is_linear(module: nn.Module) -> bool:
    """Whether its forward is a product with its weight, and is called."""
    if isinstance(module, nn.Linear):  # attention reads its last layer's weight and calls nothing
        return type(module).__name__ != "NonDynamicallyQuantizableLinear"
    return _is_transposed(module)


def _is_transposed(module: nn.Module) -> bool:
    """A linear layer of GPT-2 in transformers, whose weight is the other way round."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _adapt(layer: Any, rank: int) -> None:
    weight = layer.weight
    rows, columns = weight.shape
    made, read = (columns, rows) if _is_transposed(layer) else (rows, columns)
    layer.lora_A = nn.Parameter(weight.new_empty(rank, read))
    layer.lora_B = nn.Parameter(weight.new_empty(made, rank))
    layer.__class__ = type(f"Adapted{type(layer).__name__}", (_Adapted, type(layer)), {})


class _Adapted:
    """A linear layer with a product of two thin matrices beside it."""

    def forward(self: Any, x: Tensor) -> Tensor:
        plain: Tensor = super().forward(x)  # type: ignore[misc]
        return plain + F.linear(F.linear(x, self.lora_A), self.lora_B) * _SCALE
