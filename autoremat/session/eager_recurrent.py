"""Recurrent layers (`nn.RNN`, `nn.LSTM`, `nn.GRU`) run in eager mode, and the rest is planned.

Enters: the call of a model. Leaves: the same call, in which Dynamo stops before each recurrent
layer and goes on behind it. By itself it stops at the first one and leaves the rest of the
function uncompiled; told to trace them, it writes out every time step, which has other rounding
than the library's kernels and takes minutes. Guarantees: the layers compute what they do in eager
mode, and outside of such calls their classes are as the user or torch has them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autoremat import _torch

_KINDS: tuple[type[nn.RNNBase], ...] = (nn.RNN, nn.LSTM, nn.GRU)

_own_of: dict[Callable[..., Any], Callable[..., Any]] = {}  # by what stands in for it
_calls_in_progress = 0  # of all threads: classes are shared by them
_lock = threading.Lock()
_here = threading.local()


@contextlib.contextmanager
def eager_recurrent_layers(
    model: nn.Module, tell: Callable[[nn.RNNBase, Any], None]
) -> Iterator[None]:
    """Let Dynamo stop around a model's recurrent layers in this context.

    Args:
        model: what is called in the context.
        tell: given each recurrent layer that has run, and its results.
    """
    has_layers = any(isinstance(module, _KINDS) for module in model.modules())
    if _torch.traces_recurrent_layers() or not has_layers:
        yield
        return
    _torch.stop_at_padding()  # what stands behind the layers is traced from here on
    before = getattr(_here, "tell", None)
    _here.tell = tell
    _stop_at_classes()
    try:
        with _torch.admitting_recurrent_layers():
            yield
    finally:
        _restore_classes()
        _here.tell = before


def _stop_at_classes() -> None:
    global _calls_in_progress
    with _lock:
        _calls_in_progress += 1
        for kind in _KINDS:
            if kind.forward not in _own_of:
                kind.forward = _stopping(kind.forward)


def _restore_classes() -> None:
    global _calls_in_progress
    with _lock:
        _calls_in_progress -= 1
        for kind in _KINDS if _calls_in_progress == 0 else ():
            kind.forward = _own_of.get(kind.forward, kind.forward)


@functools.cache
def _stopping(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, at which Dynamo stops: one for each, as it guards their identity."""

    @torch.compiler.disable(reason="autoremat runs recurrent layers in eager mode")
    def run(module: nn.RNNBase, *args: Any, **kwargs: Any) -> Any:
        results = forward(module, *args, **kwargs)
        tell = getattr(_here, "tell", None)
        if tell is not None:
            tell(module, results)
        return results

    _own_of[run] = forward
    return run
