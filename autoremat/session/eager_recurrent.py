"""Recurrent layers (`nn.RNN`, `nn.LSTM`, `nn.GRU`) run in eager mode, and the rest is planned.

Enters: the call of a model. Leaves: the same call, in which Dynamo stops before each recurrent
layer and goes on behind it; the layer keeps what it saves for the backward, or runs again there. By
itself Dynamo stops at the first one and leaves the rest of the function uncompiled; told to trace
them, it writes out every time step, which has other rounding than the library's kernels and takes
minutes. Guarantees: the layers compute what they do in eager mode, and outside of such calls their
classes are as the user or torch has them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

from autoremat import _torch
from autoremat.session.layers_again import may_run_again, note_given, run_twice
from autoremat.session.stand_ins import Forward, StandIns

_KINDS: tuple[type[nn.RNNBase], ...] = (nn.RNN, nn.LSTM, nn.GRU)

_here = threading.local()


class Surrounding(Protocol):
    """The steps whose graphs are around the layers.

    Attributes:
        reruns_layers: whether layers run again in the backward, and save nothing until then.
    """

    reruns_layers: bool

    def leave_layer_eager(self, layer: nn.Module, results: Any) -> None:
        """A recurrent layer has run, with these results."""


@contextlib.contextmanager
def eager_recurrent_layers(model: nn.Module, steps: Surrounding) -> Iterator[None]:
    """Let Dynamo stop around a model's recurrent layers in this context.

    Args:
        model: what is called in the context.
        steps: of the model; told of each layer that has run.
    """
    has_layers = any(isinstance(module, _KINDS) for module in model.modules())
    if _torch.traces_recurrent_layers() or not has_layers:
        yield
        return
    _torch.stop_at_padding()  # what stands behind the layers is traced from here on
    before = getattr(_here, "steps", None)
    _here.steps = steps
    try:
        with _stopping.of(_KINDS), _torch.admitting_recurrent_layers():
            yield
    finally:
        _here.steps = before


def _stopped_at(forward: Forward) -> Forward:
    """The same function, at which Dynamo stops."""

    @torch.compiler.disable(reason="autoremat runs recurrent layers in eager mode")
    def run(module: nn.RNNBase, *args: Any, **kwargs: Any) -> Any:
        steps: Surrounding | None = getattr(_here, "steps", None)
        if steps is None:
            return forward(module, *args, **kwargs)
        if steps.reruns_layers and may_run_again(module):
            results = run_twice(forward, module, *args, **kwargs)
        else:
            results = forward(module, *args, **kwargs)
            note_given(module, results, args, kwargs)
        steps.leave_layer_eager(module, results)
        return results

    return run


_stopping = StandIns(_stopped_at)
