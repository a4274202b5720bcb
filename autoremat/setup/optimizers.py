"""An optimizer by name, as command lines and configurations write it.

Enters: "AdamW", "adamw-fused", "AdamW8bit", "SGD-momentum". Leaves: an optimizer of the model's
trained parameters, which is asked for bytes only.
"""

from __future__ import annotations

import difflib
import inspect
from typing import Any

import torch
from torch import nn

from autoremat.memory.eight_bit import Adam8bit, AdamW8bit, Lion8bit

_EIGHT_BIT = (AdamW8bit, Adam8bit, Lion8bit)
_FORMS = ("fused", "foreach")  # of torch's own, where the class has them
_MOMENTUM = "momentum"
# The base; one whose gradients have to be sparse; one whose history no step shows.
_OTHERS = ("Optimizer", "SparseAdam", "LBFGS")


def known_names() -> list[str]:
    """Every name that is accepted, as it is shown."""
    return sorted(_by_name(), key=str.lower)


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """The optimizer that a name means, of what is trained.

    Raises:
        ValueError: naming the optimizers that are known, those near to the name first.
    """
    makers = {_plain(known): made for known, made in _by_name().items()}
    if _plain(name) not in makers:
        known = known_names()
        close = difflib.get_close_matches(name.lower(), [k.lower() for k in known], n=3)
        near = [k for k in known if k.lower() in close]
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"optimizer {name!r} is not known. {hint}Known: {', '.join(known)}.")
    kind, options = makers[_plain(name)]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made: torch.optim.Optimizer = kind(trained, lr=1e-3, **options)
    return made


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _by_name() -> dict[str, tuple[Any, dict[str, Any]]]:
    found: dict[str, tuple[Any, dict[str, Any]]] = {
        kind.__name__: (kind, {}) for kind in _EIGHT_BIT
    }
    for kind in vars(torch.optim).values():
        is_one = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
        if not is_one or kind.__name__ in _OTHERS:
            continue
        name, taken = kind.__name__, inspect.signature(kind).parameters
        found[name] = kind, {}
        found |= {f"{name}-{form}": (kind, {form: True}) for form in _FORMS if form in taken}
        if taken.get(_MOMENTUM) is not None and taken[_MOMENTUM].default == 0:
            found[f"{name}-{_MOMENTUM}"] = kind, {_MOMENTUM: 0.9}
    return found
