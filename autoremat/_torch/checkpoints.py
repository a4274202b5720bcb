"""Private names of `torch.utils.checkpoint`.

A checkpoint that is not reentrant drops what autograd saves in it. What a node keeps is a holder
in place of each tensor; as the first one is asked for, all of the region runs again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch
from torch._C import _autograd
from torch.utils import checkpoint as _checkpoint

from autoremat._torch.running import raw_saved, saved_names

__all__ = ["Checkpoint", "checkpoint_inputs", "checkpoint_region", "checkpoints_of"]

AfterRerun = Callable[[Sequence[Any], list[torch.Tensor | None]], None]


def checkpoint_region() -> int:
    """Identity of the checkpoint that drops what autograd saves now; 0 if none does.

    So it is in a non-reentrant `torch.utils.checkpoint`, and in its rerun in the backward. It is
    that of the hook by which tensors are asked for: it lives until the last of them is gone.
    """
    hooks = _autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or hooks[0].__module__ != _checkpoint.__name__:
        return 0
    return id(hooks[1])


class Checkpoint:
    """A checkpoint that waits for its backward.

    Attributes:
        region: as of `checkpoint_region`.
    """

    def __init__(self, region: int, frame: Any) -> None:
        """Of a frame, as torch calls what it knows of one."""
        self.region = region
        self._frame = frame

    @property
    def kind(self) -> str:
        """What tells it from others: shapes, types and devices of all that it has dropped."""
        return repr((len(self._frame.weak_holders), getattr(self._frame, "x_metadatas", ())))

    def numbers(self) -> dict[int, int]:
        """Number of each tensor that it has dropped and somebody waits for, by its holder's id."""
        holders = enumerate(reference() for reference in self._frame.weak_holders)
        return {id(holder): number for number, holder in holders if holder is not None}

    def after_rerun(self, then: AfterRerun) -> None:
        """Call this once, as soon as all is made again: with what went in, and what was dropped.

        Of the latter, what nobody waits for any more is None.
        """
        waiting, rerun = weakref.ref(self._frame), self._frame.recompute_fn

        def measured(*inputs: Any) -> None:
            frame = waiting()
            assert frame is not None, "it is what calls this"
            frame.recompute_fn = rerun
            try:
                rerun(*inputs)
            finally:  # torch leaves it by an exception, as soon as it has enough
                then(inputs, list(_remade(frame)))

        self._frame.recompute_fn = measured


def _remade(frame: Any) -> Iterator[torch.Tensor | None]:
    group, found = list(frame.recomputed.items())[-1]
    for reference in frame.weak_holders:
        holder = reference()
        handle = None if holder is None else holder.handles.get(group)
        yield None if handle is None else found.get(handle)


def checkpoints_of(node: Any) -> list[tuple[Checkpoint, int]]:
    """The checkpoints that make again what a node of autograd's graph saved; ids of holders.

    Of a checkpoint within another one, that makes what goes into the inner one.
    """
    found = list(_dropped(_kept_by(node)))
    frames = {id(checkpoint._frame): checkpoint._frame for checkpoint, _ in found}
    for frame in frames.values():
        found += _dropped(_inputs(frame))
    return found


def checkpoint_inputs(node: Any) -> list[torch.Tensor]:
    """What the checkpoints hold that a node of autograd's graph is in: what they run again on."""
    frames = {
        id(checkpoint._frame): checkpoint._frame for checkpoint, _ in _dropped(_kept_by(node))
    }
    inputs = (saved for frame in frames.values() for saved in _inputs(frame))
    return [saved.unpack() for saved in inputs if saved.unpack_hook is None]


def _kept_by(node: Any) -> Iterator[Any]:
    """What a node keeps, as autograd does."""
    for name in saved_names(node):
        with suppress(RuntimeError):  # freed
            yield from raw_saved(node, name)


def _inputs(frame: Any) -> Iterator[Any]:
    """What a checkpoint keeps to run again, as autograd does."""
    if hasattr(frame, "input_saver"):  # torch 2.11: a node keeps them, of which there is a result
        yield from _kept_by(frame.input_saver.grad_fn)
        return
    yield from (value for value in frame.saved_args if hasattr(value, "unpack_hook"))


def _dropped(kept: Iterable[Any]) -> Iterator[tuple[Checkpoint, int]]:
    for saved in kept:
        frame = _frame_of(saved.unpack_hook)
        if frame is not None:
            yield Checkpoint(id(saved.unpack_hook), frame), id(saved.data)


def _frame_of(unpack: Any) -> Any | None:
    """What a checkpoint's hook belongs to; for `debug=True` there is another one around it."""
    if not isinstance(unpack, FunctionType) or unpack.__module__ != _checkpoint.__name__:
        return None
    for cell in unpack.__closure__ or ():
        value = cell.cell_contents
        if isinstance(value, _checkpoint._CheckpointFrame):
            return value
    inner = (_frame_of(cell.cell_contents) for cell in unpack.__closure__ or ())
    return next((frame for frame in inner if frame is not None), None)
