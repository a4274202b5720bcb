"""Which of the user's modules an operation belongs to, and whether there are layers among them.

Enters: nodes of a joint graph, with what Dynamo notes on them. Leaves: paths as
`nn.Module.named_modules` writes them. Operations outside of any submodule, and those that a pass
of the compiler made, have none.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from torch import fx, nn

from autoremat import _torch

# "L['call'].__self__.h[0]" or "L['self']._modules['h']": the call's object is the model.
_INDEX = re.compile(r"\[(?:'(.*?)'|([^'\]]*))\]")
_MODEL = re.compile(r"^(L\.)?(self|\w+\.__self__)(\.|$)")


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module.

    Attributes:
        path: of the module below the model, "layers.3.mlp".
        kind: its class.
        call: 0 for its first call in the graph, 1 for the second, and so on.
    """

    path: str
    kind: str
    call: int = 0


def module_calls(node: fx.Node) -> tuple[ModuleCall, ...]:
    """The calls in which a node ran, from the outermost module to the innermost."""
    found = []
    for key, (path, kind) in _torch.module_stack(node).items():
        name = _MODEL.sub("", _INDEX.sub(r".\1\2", str(path)).replace("._modules.", "."))
        count = str(key).rpartition("@")[2] if "@" in str(key) else "0"
        call = int(count) if count.isdecimal() else 0
        if name:
            found.append(ModuleCall(name, getattr(kind, "__qualname__", str(kind)), call))
    return tuple(found)


def module_path(node: fx.Node) -> str:
    """The innermost module of a node, "layers.3.mlp", or ""."""
    calls = module_calls(node)
    return calls[-1].path if calls else ""


def has_repeated_layers(model: nn.Module) -> bool:
    """Whether some container of the model has two children of one class."""
    for container in model.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            kinds = Counter(type(child) for child in container)
            if max(kinds.values(), default=0) > 1:
                return True
    return False
