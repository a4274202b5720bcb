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
import functools
from types import FunctionType

from torch import nn

from autoremat.session.stand_ins import Forward, StandIns

_KINDS: tuple[type[nn.Module], ...] = (
    nn.Sequential,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.Transformer,
)


def traced_torch_layers() -> contextlib.AbstractContextManager[None]:
    """Let Dynamo begin at torch's own layers of layers in this context, and not only pass by."""
    return _standing_in.of(_KINDS)


def _as_a_user_s(forward: Forward) -> Forward:
    """The same function, in a file that Dynamo does not pass over."""
    if not isinstance(forward, FunctionType):
        return forward  # somebody has put another sort of callable there
    code = forward.__code__.replace(co_filename=__file__)
    same = FunctionType(
        code, forward.__globals__, argdefs=forward.__defaults__, closure=forward.__closure__
    )
    same.__kwdefaults__ = forward.__kwdefaults__
    return functools.update_wrapper(same, forward)  # who asks for its source finds torch's


_standing_in = StandIns(_as_a_user_s)
