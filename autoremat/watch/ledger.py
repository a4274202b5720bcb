"""What the compiled forwards of this process have left alive for their backwards.

Enters: each run of a planned graph as it happens, of whichever model, and the start of each
backward. Leaves: the runs that are open. Guarantees: a run is open from its forward until a
backward that keeps no graph has gone through it, or nothing can reach it any more; a run costs
one hook on one node of autograd's graph.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autoremat import _torch
from autoremat.errors import SECOND_BACKWARD
from autoremat.memory.storage_sizes import same_device
from autoremat.planning.part import Part
from autoremat.planning.ran import Ran
from autoremat.watch import between
from autoremat.watch.open_run import (
    LetGo,
    Owner,
    Returned,
    Roots,
    Run,
    living_nbytes,
    returned_by,
)

_FEW = 64
SAME = 1.02  # peaks that differ by less are told of once


@dataclass
class _Books:
    """Of this process: its memory is one."""

    # By number, in their order, with what they have returned.
    open: dict[int, tuple[weakref.ref[Run], Mapping[int, Returned]]] = field(default_factory=dict)
    returned: dict[int, Returned] = field(default_factory=dict)  # by runs that are over
    most_open: int = _FEW  # when there are more, those that are gone are left out
    most_returned: int = _FEW  # the same
    rerunning: weakref.WeakSet[Owner] = field(default_factory=weakref.WeakSet)
    without_gradients: weakref.WeakSet[Owner] = field(default_factory=weakref.WeakSet)
    in_backward: weakref.WeakSet[Owner] = field(default_factory=weakref.WeakSet)  # told it began
    gone_through: weakref.WeakSet[Owner] = field(default_factory=weakref.WeakSet)  # by a backward
    told_nbytes: dict[int, int] = field(default_factory=dict)  # by budget, in this step
    backwards: int = 0  # so far, but for those inside of others
    beginnings: int = 0
    gone_back: tuple[Ran, Mapping[int, Returned]] = field(
        default_factory=lambda: (Ran(""), {})
    )  # what did so last
    has_gone_back: bool = False  # since the latest forward: the next one begins another step

    def begin(self, number: int, run: Run) -> None:
        """A run is open from now on, for as long as it lives: what holds it is asked, not told.

        A callback could come in the midst of whatever reads the books: garbage may be found then.
        """
        self.open[number] = weakref.ref(run), run.returned
        if len(self.open) > self.most_open:  # nobody asks for them where no backward ever comes
            self.most_open = _FEW + 2 * len(self.runs)
        here = run.device
        elsewhere = {k: r for k, r in run.returned.items() if not same_device(here, r.device)}
        if elsewhere:  # those open there do not count it
            self.keep(elsewhere)

    def run(self, number: int) -> Run | None:
        """A run by its number; None if it is open no more."""
        found = self.open.get(number)
        return None if found is None else found[0]()

    def end(self, number: int) -> Run | None:
        """A run is over: what it was, and what it has returned is kept; None if it was before."""
        found = self.open.pop(number, None)
        if found is None:
            return None
        self.keep(found[1])
        return found[0]()

    @property
    def runs(self) -> list[Run]:
        """Those that are open, in their order. Each graph of a step asks several times."""
        known = list(self.open.values())
        found = [run for reference, _ in known if (run := reference()) is not None]
        if len(found) < len(known):
            for number in list(self.open):
                if self.run(number) is None:  # nothing can go back through it
                    self.end(number)
        return found

    def later(self, number: int) -> list[Run]:
        """Those that are open and have begun after another: none, where backwards are nested."""
        numbers = [other for other in list(self.open) if other > number]
        return [run for other in numbers if (run := self.run(other)) is not None]

    def keep(self, returned: Mapping[int, Returned]) -> None:
        """A run that is over has returned these."""
        self.returned |= returned
        if len(self.returned) > self.most_returned:
            self.most_returned = _FEW + 2 * len(list(self.living()))

    def living(self) -> Iterator[tuple[int, Returned]]:
        """What runs that are over have returned and somebody holds.

        Each run of a step asks: what is gone is left out, so that the next need not look at it.
        """
        for key in list(self.returned):  # a list of pairs could set off a garbage collection
            kept = self.returned.get(key)
            if kept is None:
                continue
            if not kept.storage.expired():
                yield key, kept
            else:
                self.returned.pop(key, None)


_books = _Books()
_numbers = itertools.count()  # of runs, in their order
_KEY = "autoremat"  # in the metadata of autograd's nodes


def open_runs(device: torch.device) -> list[Run]:
    """Runs whose backward is still to come, in the order in which they ran."""
    return [run for run in _books.runs if run.device is device or same_device(run.device, device)]


def returned_storages(
    device: torch.device, runs: Sequence[Run] | None = None
) -> Iterator[tuple[int, int]]:
    """What runs that are over have returned and somebody holds: identity and bytes of each.

    Args:
        device: where.
        runs: those that are open there, if they are known.
    """
    open_here = open_runs(device) if runs is None else runs
    found = [(key, kept) for key, kept in _books.living() if same_device(kept.device, device)]
    if found:
        counted = {key for run in open_here for key in run.returned}  # again, as they were given it
        yield from ((key, kept.nbytes) for key, kept in found if key not in counted)


def run_of(node: Any) -> Run | None:
    """The run that a node of autograd's graph is the backward of."""
    return node.metadata.get(_KEY)


def is_news(budget_nbytes: int, peak_nbytes: int, *, is_final: bool) -> bool:
    """Whether nobody has told of such a peak above a budget in this step, which now is told of.

    Args:
        budget_nbytes: the budget.
        peak_nbytes: the peak.
        is_final: whether all of the step's forward has run: until then it grows, and is told once.
    """
    before_nbytes = _books.told_nbytes.get(budget_nbytes, 0)
    if before_nbytes and (not is_final or peak_nbytes <= SAME * before_nbytes):
        return False
    _books.told_nbytes[budget_nbytes] = peak_nbytes
    return True


def note_run(
    owner: Owner,
    ran: Ran | None,
    *,
    outputs: Sequence[Any],
    device: torch.device,
    sizes: tuple[int, ...] = (),
    find_graph: Callable[[], Part] | None = None,
    behind: tuple[str, ...] = (),
    let_go: LetGo | None = None,
) -> None:
    """A graph has run its forward, or a model that has none.

    Args:
        owner: of the graph.
        ran: as of `Run`.
        outputs: what it returned; without a gradient to come, it holds nothing.
        device: where it ran.
        sizes: as of `Run`, and so are `find_graph` and `behind`.
        find_graph: asked for only where a step is looked into.
        behind: the operations in eager mode that its arguments come from.
        let_go: as of `Run`.
    """
    tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
    nodes = (tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None)
    node: Any = next(nodes, None) if ran is None else _torch.compiled_backward_of(tensors)
    if node is None or run_of(node) is not None:
        return
    _watch()
    if _books.has_gone_back:
        _books.told_nbytes.clear()
        _books.has_gone_back = False
    run = Run(owner, ran, device, sizes, find_graph, returned_by(tensors), behind)
    run.let_go = run.let_go if let_go is None else let_go
    number = next(_numbers)
    node.metadata[_KEY] = run
    # It holds the hook; one of torch's own cannot be referred to otherwise, and needs not.
    find_node = (lambda: None) if ran is None else weakref.ref(node)
    node.register_prehook(functools.partial(_backward_runs, number, find_node))
    _books.begin(number, run)


def note_rerun(owner: Owner) -> None:
    """A graph begins to run in a backward, as those in reentrant checkpoints do."""
    _watch()
    _books.rerunning.add(owner)


def note_without_gradients(owner: Owner) -> None:
    """A call without gradients begins: code in eager mode may take gradients to what it makes."""
    _watch()
    _books.without_gradients.add(owner)


def latest_backward() -> int:
    """Number of the backward that runs, or ran last: of the outermost one."""
    return _books.backwards


def owners_since(owner: Owner) -> list[Owner]:
    """Owners that backwards have gone through since the latest one that went through this one.

    Where it runs again, these are trained in turn with it. None for one that never did.
    """
    if owner.backward < 0:
        return []
    return [other for other in list(_books.gone_through) if other.backward > owner.backward]


def beginnings() -> int:
    """A number that changes as a backward begins, and once owners have heard of it."""
    return _books.beginnings


def has_reruns(owner: Owner) -> bool:
    """Whether graphs of this one have run in a backward."""
    return owner in _books.rerunning


def note_returned(tensors: Iterable[torch.Tensor]) -> None:
    """A graph whose run is over has returned these, which may outlive it."""
    _books.keep(returned_by(tensors))


def noting_returned(
    compiled: Callable[..., Any], within: Callable[[Callable[[], Any], Sequence[Any]], Any]
) -> Callable[..., Any]:
    """A compiled graph whose runs keep nothing: what it returns is noted.

    Args:
        compiled: the graph.
        within: takes each run and what it is given, and returns what that returns.
    """

    def noted(*args: Any) -> Any:
        outputs = compiled(*args)
        note_returned(output for output in outputs if isinstance(output, torch.Tensor))
        return outputs

    def run(*args: Any) -> Any:
        return compiled(*args) if _torch.is_compiling() else within(lambda: noted(*args), args)

    return run


@torch.compiler.disable  # where Dynamo traces a backward inside of a model
def _backward_runs(number: int, find_node: Callable[[], Any], _gradients: Any) -> None:
    """A run's memory goes with this backward, unless that keeps the graph."""
    _books.has_gone_back = True
    is_open_still = _torch.keeps_graph()
    run = _books.run(number) if is_open_still else _books.end(number)
    if run is not None and run.ran is not None:
        _note_held(run, run.ran, find_node())
    if is_open_still:
        return
    if run is not None:
        run.owner.backward = _books.backwards
        _books.gone_through.add(run.owner)
        if run.ran is not None:
            # Only now its graph has let go of those results that it needed itself.
            ran, returned = _books.gone_back
            ran.lasting = living_nbytes(returned) / max(1, sum(r.nbytes for r in returned.values()))
            _books.gone_back = run.ran, run.returned
    if run is not None and any(other.owner is run.owner for other in _books.later(number)):
        run.owner.is_nested = False


def _note_held(run: Run, ran: Ran, node: Any) -> None:
    """How much of its results somebody holds as a backward goes through it; more is told."""
    run.held = max(run.held, run.held_share(node))
    expected, ran.held = ran.held, run.held
    if ran.held > expected:
        run.owner.holds_more()


@functools.cache
def _watch() -> None:
    """Tell owners of each backward; once, and not before there are any."""
    _torch.watch_backwards(_backward_begins, _backward_ended, _backward_failed)


@torch.compiler.disable  # as above
def _backward_begins(roots: Roots, gradients: Sequence[Any], keeps_graph: bool) -> None:
    is_outer = not _torch.is_in_backward()
    _books.backwards += is_outer
    _books.beginnings += 1
    if is_outer and _books.in_backward:  # of one that has failed
        _books.in_backward.clear()
    # Without a run that waits, a backward of anything costs as little as can be.
    if _torch.is_compiling():
        return
    between.close(gradients)
    open_now = _books.runs
    if is_outer and not open_now:
        for owner in list(_books.without_gradients):
            owner.backward_begins(roots, keeps_graph=keeps_graph)
    if not (open_now or _books.rerunning):
        return
    for run in open_now if is_outer else ():
        if run.ran is not None and not run.has_waited:  # what is gone then is so in later ones
            run.ran.region = run.ran.region._replace(is_gone=run.is_let_go)
            run.has_waited = True
    for owner in list(_books.rerunning) if is_outer else ():
        owner.reruns_begin(roots)
    for owner in dict.fromkeys(run.owner for run in _books.runs):
        _books.in_backward.add(owner)
        owner.backward_begins(roots, keeps_graph=keeps_graph)
    _books.beginnings += 1


@torch.compiler.disable  # as above
def _backward_ended() -> None:
    """Tell owners, once nothing of it runs any more."""
    if _books.in_backward and not _torch.is_in_backward():
        owners = list(_books.in_backward)
        _books.in_backward.clear()
        for owner in owners:
            owner.backward_ended()


@torch.compiler.disable  # as above
def _backward_failed(error: RuntimeError) -> None:
    """Say what helps where torch's error does not."""
    if _torch.is_second_backward(error):
        error.add_note(SECOND_BACKWARD)
