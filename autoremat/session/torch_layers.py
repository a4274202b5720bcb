"""torch's own layers of layers are compiled where the code that calls them is not.

Enters: the call of a model. Leaves: the same call, in which Dynamo takes the `forward` of an
`nn.Sequential`, an `nn.TransformerEncoderLayer` and their like for a function of the user's. By
itself it traces them as a part of what calls them, and passes them over where that runs in Python:
around a graph break in a loop (experts that may be idle, layers that are skipped by chance) all
that they compute would be in eager mode, without a plan. Guarantees: the layers compute what they
do.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import PurePath
from types import FunctionType
from typing import Any

from torch import nn

from autoremat.session.stand_ins import Forward, StandIns

_TORCHS = PurePath(nn.__file__).parent / "modules"
_numbers = itertools.count()


def traced_torch_layers(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Let Dynamo begin at torch's own layers of layers in this context, and not only pass by.

    Args:
        model: what is called in the context.
    """
    return _standing_in.of({kind for module in model.modules() for kind in _kinds_of(module)})


def _kinds_of(module: nn.Module) -> Iterator[type[nn.Module]]:
    """The class of torch's that a module with parts has its `forward` from; not a recurrent one."""
    if not module._modules or isinstance(module, nn.RNNBase):
        return
    kind = next((kind for kind in type(module).__mro__ if "forward" in vars(kind)), None)
    if kind is not None and _is_torchs(vars(kind)["forward"]):
        yield kind


def _is_torchs(forward: Any) -> bool:
    code = getattr(forward, "__code__", None)
    return code is not None and _TORCHS in PurePath(code.co_filename).parents


def _traced(forward: Forward) -> Forward:
    """The same function, in a file that Dynamo does not pass over.

    Each has code of its own: what Dynamo compiles is kept by the code, and guarded one by one.
    """

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(module, *args, **kwargs)

    assert isinstance(run, FunctionType)
    run.__code__ = run.__code__.replace(co_name=f"forward_{next(_numbers)}")
    return run


_standing_in = StandIns(_traced)
