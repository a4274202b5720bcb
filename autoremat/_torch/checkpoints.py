"""Private names of `torch.utils.checkpoint`.

A checkpoint that is not reentrant drops what autograd saves in it. What a node keeps is a holder
in place of each tensor; as the first one is asked for, all of the region runs again.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch._C import _autograd
from torch.utils import checkpoint as _checkpoint
from torch.utils._pytree import tree_leaves

from autoremat._torch.autograd import raw_saved, saved_names

__all__ = [
    "Checkpoint",
    "Taken",
    "checkpoint_inputs",
    "checkpoint_region",
    "checkpoints_of",
    "may_drop_saved",
    "saved_are_hooked",
]

Remade = list[torch.Tensor | None]


def checkpoint_region() -> int:
    """Identity of the checkpoint that drops what autograd saves now; 0 if none does.

    So it is in a non-reentrant `torch.utils.checkpoint`, and in its rerun in the backward. It is
    that of the hook by which tensors are asked for: it lives until the last of them is gone.
    """
    hooks = _autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or hooks[0].__module__ != _checkpoint.__name__:
        return 0
    return id(hooks[1])


def saved_are_hooked() -> bool:
    """Whether a hook gets what autograd saves now, and is none of a checkpoint, which drops it."""
    return bool(_autograd._top_saved_tensors_default_hooks(False)) and not checkpoint_region()


def may_drop_saved() -> bool:
    """Whether a checkpoint may begin here: where hooks of saved tensors are forbidden, none may."""
    return bool(_autograd._saved_tensors_hooks_is_enabled())


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
    def shapes(self) -> str:
        """And types and devices, of all that it has dropped; None of each if it checks nothing."""
        return repr(self._frame.x_metadatas)

    def numbers(self) -> dict[int, int]:
        """Number of each tensor that it has dropped and somebody waits for, by its holder's id."""
        holders = enumerate(reference() for reference in self._frame.weak_holders)
        return {id(holder): number for number, holder in holders if holder is not None}

    def watch_rerun(
        self, begins: Callable[[Sequence[Any]], object], ends: Callable[[Remade | None], object]
    ) -> None:
        """Call these once, before and after all is made again.

        They are to raise nothing: a backward of the user's is around them.

        Args:
            begins: before, with what goes in.
            ends: after, with what was dropped: None for what nobody waits for any more, and for all
                of it if the rerun has failed.
        """
        waiting, rerun = weakref.ref(self._frame), self._frame.recompute_fn
        if hasattr(rerun, "__wrapped__"):  # somebody watches already
            return

        def watched(*inputs: Any) -> None:
            frame, kept, is_made = waiting(), [], False
            assert frame is not None, "it is what calls this"
            frame.recompute_fn = rerun
            with suppress(Exception):  # another release of torch: it counts as made again
                kept = _kept_beside(rerun)
            begins([*tree_leaves(inputs), *kept])  # of torch 2.11, what goes in by name as well
            try:
                rerun(*inputs)
                is_made = True
            except _checkpoint._StopRecomputationError:  # torch has all that it needs
                is_made = True
                raise
            finally:
                made = None
                with suppress(Exception):  # as above
                    made = _remade(frame) if is_made else None
                ends(made)

        watched.__wrapped__ = rerun  # type: ignore[attr-defined]
        self._frame.recompute_fn = watched


class Taken(NamedTuple):
    """What a checkpoint has dropped and makes again.

    Attributes:
        checkpoint: which one.
        holder: id of what stands in its place.
        goes_in: whether a checkpoint within this one runs again on it; else a node saved it.
    """

    checkpoint: Checkpoint
    holder: int
    goes_in: bool


def checkpoints_of(node: Any) -> list[Taken]:
    """What checkpoints make again for a node of autograd's graph: those that it is in."""
    return [
        Taken(Checkpoint(id(kept.unpack_hook), frame), id(kept.data), goes_in)
        for kept, frame, goes_in in _dropped(_kept_by(node), set())
    ]


def checkpoint_inputs(
    node: Any, known: dict[int, list[torch.Tensor]] | None = None
) -> list[torch.Tensor]:
    """What the checkpoints hold that a node of autograd's graph is in: what they run again on.

    Args:
        node: of autograd's graph.
        known: what checkpoints hold, by their identity, for calls that follow each other; each
            that is not there is added.
    """
    known = {} if known is None else known
    frames = {id(frame): frame for _, frame, _ in _dropped(_kept_by(node), set())}
    for key, frame in frames.items():
        if key not in known:
            known[key] = [v for v in _held_by(frame) if isinstance(v, torch.Tensor)]
    return [value for key in frames for value in known[key]]


def _held_by(frame: Any) -> Iterator[Any]:
    """What a checkpoint runs again on, and what backwards before this one have made again of it."""
    yield from (saved.data for saved in _inputs(frame) if saved.unpack_hook is None)
    yield from _inputs_within(frame)
    yield from _kept_beside(inspect.unwrap(frame.recompute_fn))
    for made in frame.recomputed.values():
        yield from made.values()


def _dropped(
    kept: Iterable[Any], seen: set[int], *, goes_in: bool = False
) -> Iterator[tuple[Any, Any, bool]]:
    """Of what autograd keeps, what a checkpoint has dropped: with it, and with those around it.

    And whether it goes into a checkpoint within.
    """
    for saved in kept:
        frame = _frame_of(saved.unpack_hook)
        if frame is not None:
            yield saved, frame, goes_in
            if id(frame) not in seen:
                seen.add(id(frame))
                yield from _dropped(_inputs(frame), seen, goes_in=True)


def _frame_of(unpack: Any) -> Any | None:
    """The checkpoint that a hook belongs to."""
    if not isinstance(unpack, FunctionType) or unpack.__module__ != _checkpoint.__name__:
        return None
    cells = (cell.cell_contents for cell in unpack.__closure__ or ())
    return next((value for value in cells if isinstance(value, _checkpoint._CheckpointFrame)), None)


def _kept_by(node: Any) -> Iterator[Any]:
    """What a node keeps, as autograd does."""
    for name in saved_names(node):
        with suppress(RuntimeError):  # freed
            yield from raw_saved(node, name)


def _inputs(frame: Any) -> Iterator[Any]:
    """What a checkpoint keeps to run again, as autograd does."""
    if hasattr(frame, "input_saver"):  # torch 2.11: a node keeps them, behind an empty tensor
        yield from itertools.islice(_kept_by(frame.input_saver.grad_fn), 1, None)
        return
    yield from (value for value in frame.saved_args if isinstance(value, _autograd.SavedTensor))


def _inputs_within(frame: Any) -> list[Any]:
    """The leaves of lists, tuples and mappings that go in, which autograd does not keep."""
    if hasattr(frame, "input_saver"):  # torch 2.11
        return tree_leaves(_cells_of(frame.input_saver.grad_fn.get_args).get("args"))
    return tree_leaves(frame.saved_args)


def _kept_beside(rerun: Any) -> list[Any]:
    """What it is given by name, and what the policy of a selective checkpoint has kept for it.

    Its results are taken out as the rerun comes by them.
    """
    cells = _cells_of(rerun)
    context = cells.get("recompute_context")
    is_selective = isinstance(context, _checkpoint._CachedTorchDispatchMode)
    kept = tree_leaves(context.storage if is_selective else None)
    versions = (value for value in kept if isinstance(value, _checkpoint._VersionWrapper))
    return [*tree_leaves(cells.get("kwargs", ())), *(version.val for version in versions)]


def _cells_of(function: Any) -> dict[str, Any]:
    """What a function has in its closure, by name; nothing in another release of torch."""
    if not isinstance(function, FunctionType):
        return {}
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # nothing is in it yet
            found[name] = cell.cell_contents
    return found


def _remade(frame: Any) -> Remade | None:
    """What a rerun has made, by number; None if another backward asked for it."""
    group: Any = _checkpoint.GraphExecGroup._get_current_group()
    group = torch._C._current_graph_task_id() if group is None else group
    if group not in frame.recomputed:
        return None
    holders = [reference() for reference in frame.weak_holders]
    handles = [None if holder is None else holder.handles.get(group) for holder in holders]
    found = frame.recomputed[group]
    return [None if handle is None else found.get(handle) for handle in handles]
