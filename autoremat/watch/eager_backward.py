"""What a backward takes outside the planned graphs, foreseen as it begins.

Enters: the tensors that a backward begins at, and the runs of planned graphs that wait for it.
Leaves: the peak while code in eager mode goes backward, and what is live beside each run when its
turn comes. Autograd's nodes are followed in the order in which the engine runs them. Exact on what
they have saved; gradients are taken to be whole tensors, except where a node is known to hand its
own on, or parts of it: what is handed on stays as long as anybody behind has not taken it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from autoremat import _torch
from autoremat.watch.checkpointed import Again
from autoremat.watch.eager_code import nodes_behind, saved_storages
from autoremat.watch.ledger import run_of
from autoremat.watch.open_run import Run

# What they make for those behind them is the gradient that they take, or a view of it; of a sum,
# one number that looks as large as all.
_HANDED_ON = frozenset(
    f"{name}Backward{number}"
    for name in (
        *("Add", "Alias", "Permute", "ReshapeAlias", "Squeeze", "Sum", "T", "Transpose"),
        *("UnsafeView", "Unsqueeze", "View"),
    )
    for number in range(4)
) | {_torch.REGISTERS_REDUCTION}

# The same of views that are a part each: they hold all of it.
_HANDED_ON_IN_PARTS = frozenset({"CatBackward0", "StackBackward0"})

# What formulas of several operations take inside beside what they make, in sizes of their largest
# gradient (derivatives.yaml of torch; measured one by one, in whole sizes).
_INSIDE = {
    name if "Backward" in name else f"{name}Backward0": count
    for count, names in {
        1: "Abs Addcmul ClampBackward1 Copysign Cosh Digamma Exp2 Expm1 Hypot I0 Lgamma Log10 Log1P"
        " Log2 NativeBatchNorm PowBackward2 Sgn Sin Sinh Sqrt",
        2: "Amax Amin Atan Cos Cumsum Dist Div LinalgVectorNorm Logsumexp Maximum Minimum NanToNum"
        " Nansum Pow Prod ProdBackward1 Reciprocal Rsqrt SoftMarginLoss Tan Var Xlogy",
        3: "Acosh Asinh Atanh Logaddexp MaxBackward1 MinBackward1 Norm Std",
        4: "Addcdiv Asin Cumprod Erf Erfc Erfinv",
        5: "Acos Atan2 PowBackward1",
        7: "Logcumsumexp Sinc",
    }.items()
    for name in names.split()
}

# Layers of libraries, which lay out weights and their gradients in a way of their own: measured for
# the LSTM of oneDNN, 1.7 times what it makes; at many steps 4.2 times the gradient that it takes.
_LIBRARIES = ("Mkldnn", "Cudnn", "Miopen")


FindRemade = Callable[[Sequence[Any], Collection[Any]], Again]


@dataclass(frozen=True)
class Foreseen:
    """A backward that is about to begin; bytes beyond what the step found live.

    Attributes:
        first_nbytes: live as it begins: what planned graphs hold for it, and what eager code has
            saved.
        eager_peak_nbytes: the highest while such code goes backward.
        remade_nbytes: of that, what checkpoints have made again.
        beside_nbytes: for each run of a planned graph, what is live beside what it holds itself.
        reached: all runs that it goes through, those in eager mode among them.
        is_complete: whether it is known what all checkpoints will make again.
        behind_nbytes: the highest before it, since the last planned graph has gone forward.
    """

    first_nbytes: int
    eager_peak_nbytes: int
    remade_nbytes: int
    beside_nbytes: Mapping[Run, int]
    reached: Collection[Run]
    is_complete: bool = True
    behind_nbytes: int = 0


def foresee(
    roots: Sequence[Any],
    runs: Sequence[Run],
    *,
    known: Collection[int],
    saved_so_far: Mapping[int, int],
    device: torch.device,
    keeps_graph: bool,
    named: Mapping[int, int] = MappingProxyType({}),
    gradient_shares: Mapping[int, float] = MappingProxyType({}),
    find_remade: FindRemade = lambda nodes, planned: Again(),
) -> Foreseen:
    """Follow a backward through autograd's graph.

    Args:
        roots: tensors or edges that it begins at.
        runs: those that are open on the device, whether it reaches them or not.
        known: identities of storages that count elsewhere.
        saved_so_far: bytes by storage of what code in eager mode has saved, whether this backward
            reaches it or not.
        device: what is elsewhere does not count.
        keeps_graph: whether what was saved stays afterwards.
        named: bytes by storage of what the step's own code has variables for, which outlives the
            backward, also where a node has saved a view of it.
        gradient_shares: of parameters whose gradients processes reduce, by identity: what stays.
        find_remade: finds what nodes in checkpoints will hold, and whether all of it is known;
            given all nodes, and those of planned graphs.
    """
    nodes = list(nodes_behind(first_nodes(roots)))
    reached = {node: run for node in nodes if (run := run_of(node)) is not None}
    planned = {node: run for node, run in reached.items() if run.name}
    held = {key: nbytes for key, nbytes in named.items() if key not in known}
    held_by: dict[int, list[torch.Tensor]] = {}
    for node in nodes:
        held |= saved_storages(node, known, device, only_held=True, held_by=held_by)
    counted = {*known, *held}
    saved = {node: saved_storages(node, counted, device, held_by=held_by) for node in nodes}
    held_by.clear()
    again_nbytes: Counter[int] = Counter()
    for run in {*runs, *planned.values()}:
        again_nbytes[run.region] += run.again_nbytes
    others = sum(run.held_nbytes for run in runs if run not in reached.values())
    counted.update(*saved.values())
    others += sum(nbytes for key, nbytes in saved_so_far.items() if key not in counted)
    live_nbytes = others + sum(held.values())
    again = find_remade(nodes, planned)
    walk = _Walk(planned, saved, again, again_nbytes, gradient_shares, keeps_graph, live_nbytes)
    first_nbytes = walk.live_nbytes
    waiting = Counter(source for node in nodes for source, _ in node.next_functions if source)
    numbers = {node: n for n, node in enumerate(nodes)}
    ready = [(-_torch.sequence_number(node), numbers[node]) for node in nodes if not waiting[node]]
    heapq.heapify(ready)
    while ready:
        node = nodes[heapq.heappop(ready)[1]]
        walk.run(node)
        for source in (source for source, _ in node.next_functions if source):
            waiting[source] -= 1
            if not waiting[source]:
                heapq.heappush(ready, (-_torch.sequence_number(source), numbers[source]))
    reached_runs = frozenset(reached.values())
    return Foreseen(
        first_nbytes,
        walk.eager_peak_nbytes,
        walk.remade_at_peak_nbytes,
        walk.beside_nbytes,
        reached_runs,
        again.is_complete,
        first_nbytes + (_passing_nbytes(nodes, planned, saved) if planned else 0),
    )


def _passing_nbytes(
    nodes: Sequence[Any], planned: Collection[Any], saved: Mapping[Any, Mapping[int, int]]
) -> int:
    """What code behind the last planned graph took in its forward, beyond what it has left.

    As one of its operators had run: what that was given and has made, but nothing saved later.
    """
    last = max(map(_torch.sequence_number, planned), default=-1)
    behind = [n for n in nodes if _torch.sequence_number(n) > last and not _torch.accumulates(n)]
    savers = Counter(key for node in nodes for key in saved[node])
    most_nbytes = later_nbytes = 0
    for node in sorted(behind, key=_torch.sequence_number, reverse=True):
        given = (
            _torch.gradient_nbytes_into(source)[number]
            for source, number in node.next_functions
            if source is not None and source not in planned and not _torch.accumulates(source)
        )
        if not _hands_on(node) or node.name().startswith("Add"):
            moved_nbytes = sum(given) + sum(_torch.gradient_nbytes_into(node))
            own_nbytes = moved_nbytes - sum(saved[node].values())
            most_nbytes = max(most_nbytes, own_nbytes - later_nbytes)
        for key, nbytes in saved[node].items():
            savers[key] -= 1
            later_nbytes += 0 if savers[key] else nbytes
    return most_nbytes


def first_nodes(roots: Sequence[Any]) -> list[Any]:
    """Where in autograd's graph a backward begins: at tensors, or at edges of the graph."""
    return [root.grad_fn if isinstance(root, torch.Tensor) else root.node for root in roots]


@dataclass(eq=False)
class _Storage:
    """Of gradients that one node has made, or has handed on to several.

    Attributes:
        nbytes: of all of it.
        holders: gradients that wait, or stay, and are in it.
    """

    nbytes: int
    holders: int = 0

    def let_go(self) -> int:
        """One gradient less; bytes that are free then."""
        self.holders -= 1
        return 0 if self.holders else self.nbytes


class _Gradient(NamedTuple):
    """One that waits for its node.

    Attributes:
        storage: that it is in.
        nbytes: of it alone.
    """

    storage: _Storage
    nbytes: int

    @property
    def is_part(self) -> bool:
        """Whether its storage has more than this."""
        return self.nbytes < self.storage.nbytes


def _own_nbytes(taken: Sequence[_Gradient]) -> int:
    """Bytes of gradients that one node takes and nobody else has: several may be in one storage."""
    here = Counter(gradient.storage for gradient in taken)
    found = Counter[_Storage]()
    for gradient in taken:
        found[gradient.storage] += gradient.nbytes
    return sum(
        min(storage.nbytes, found[storage])
        for storage, count in here.items()
        if storage.holders == count
    )


@dataclass
class _Walk:
    """What is live as the engine goes from node to node."""

    planned: Mapping[Any, Run]
    saved: Mapping[Any, Mapping[int, int]]
    again: Again
    again_nbytes: Mapping[int, int]  # of the runs in each region of a checkpoint, reached or not
    gradient_shares: Mapping[int, float]
    keeps_graph: bool
    live_nbytes: int
    eager_peak_nbytes: int = 0
    remade_at_peak_nbytes: int = 0
    beside_nbytes: dict[Run, int] = field(default_factory=dict)
    _savers: Counter[int] = field(default_factory=Counter)
    _gradients: dict[Any, dict[int, _Gradient]] = field(default_factory=dict)
    _run_again: set[int] = field(default_factory=set)  # regions of checkpoints
    _remade_nbytes: int = 0
    _remakers: Counter[Hashable] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        sizes = {key: n for found in self.saved.values() for key, n in found.items()}
        self._savers.update(key for found in self.saved.values() for key in found)
        for remade in self.again.remade.values():
            self._remakers.update(key for sizes in remade.values() for key in sizes)
        self.live_nbytes += sum(sizes.values())
        self.live_nbytes += sum(run.held_nbytes for run in self.planned.values())
        self.eager_peak_nbytes = self.live_nbytes

    def run(self, node: Any) -> None:
        """One node: its gradients come, those behind it are made, its own go."""
        taken = list(self._gradients.pop(node, {}).values())
        taken_nbytes = sum(gradient.nbytes for gradient in taken)
        run, remade = self.planned.get(node), self.again.remade.get(node, {})
        for region in remade:
            self._run_region(region)
        if run is not None:  # a plan counts the gradients that it is given, and frees them
            self._run_region(run.region)
            own_nbytes = run.held_nbytes + run.again_nbytes
            self.beside_nbytes[run] = self.live_nbytes - own_nbytes - _own_nbytes(taken)
        is_end = _torch.accumulates(node)  # that makes nothing
        made_nbytes = self._keep(node, taken) if is_end else self._make(node, taken)
        if run is None and not is_end:
            inside_nbytes = _inside_nbytes(node, taken_nbytes)
            if any(word in node.name() for word in _LIBRARIES):
                # Of recurrent ones, gradients of up to four gates at all steps.
                inside_nbytes += max(
                    2 * made_nbytes, 5 * taken_nbytes if "Rnn" in node.name() else 0
                )
            # A gradient is there beside the one that it is added to.
            beside_nbytes = made_nbytes if _hands_on(node) else sum(_made_by(node))
            self._peaks_at(self.live_nbytes + beside_nbytes + inside_nbytes)
        made_nbytes -= sum(gradient.storage.let_go() for gradient in taken)
        self.live_nbytes += made_nbytes - (0 if self.keeps_graph else self._released_by(node))
        for sizes in remade.values():  # which are gone in any case
            self._change(-self._dropped(sizes))

    def _run_region(self, region: int) -> None:
        """The first of a checkpoint goes backward: all of it runs again."""
        if region and region not in self._run_again:
            self._run_again.add(region)
            self.live_nbytes += self.again_nbytes[region]
            found = [remade.get(region, {}) for remade in self.again.remade.values()]
            self._change(sum({k: n for sizes in found for k, n in sizes.items()}.values()))
            passing_nbytes = self.again.passing_nbytes.get(region, 0)
            if passing_nbytes:  # else graphs may make all of it, which count it themselves
                self._peaks_at(self.live_nbytes + passing_nbytes)

    def _peaks_at(self, nbytes: int) -> None:
        """So much is live while code in eager mode goes backward, or runs again for it."""
        if nbytes > self.eager_peak_nbytes:
            self.eager_peak_nbytes, self.remade_at_peak_nbytes = nbytes, self._remade_nbytes

    def _change(self, nbytes: int) -> None:
        """So much more, or less, of what checkpoints have made again is there."""
        self._remade_nbytes += nbytes
        self.live_nbytes += nbytes

    def _dropped(self, sizes: Mapping[Hashable, int]) -> int:
        """Of what a node held again, what no other one does."""
        self._remakers.subtract(sizes.keys())
        return sum(nbytes for key, nbytes in sizes.items() if not self._remakers[key])

    def _keep(self, node: Any, taken: Sequence[_Gradient]) -> int:
        """A parameter gets its gradient: bytes that there are more, beside what is taken."""
        if node.variable.grad is not None:
            return 0
        share, made_nbytes = self.gradient_shares.get(id(node.variable), 1.0), 0
        for gradient in taken:
            made_nbytes += int((share - 1.0) * gradient.nbytes)
            if gradient.storage.holders == 1 or gradient.is_part:  # the parameter keeps this one
                gradient.storage.holders += 1
            else:
                made_nbytes += gradient.nbytes
        return made_nbytes

    def _make(self, node: Any, taken: Sequence[_Gradient]) -> int:
        """Gradients for what is behind the node: bytes of those that are in no taken storage."""
        made_nbytes = 0
        first = taken[0] if taken else _Gradient(_Storage(0), 0)  # who began it holds that one
        handed_on = first if _hands_on(node) else None
        for source, number in ((s, n) for s, n in node.next_functions if s is not None):
            found = self._gradients.setdefault(source, {})
            before = found.get(number)
            whole_nbytes = _torch.gradient_nbytes_into(source)[number]
            if handed_on is not None and before is None:
                is_part = node.name() in _HANDED_ON_IN_PARTS
                nbytes = min(whole_nbytes, handed_on.nbytes) if is_part else handed_on.nbytes
                found[number] = _Gradient(handed_on.storage, nbytes)
            else:  # the sum with one that is there is a whole one
                made_nbytes += whole_nbytes - (before.storage.let_go() if before else 0)
                found[number] = _Gradient(_Storage(whole_nbytes), whole_nbytes)
            found[number].storage.holders += 1
        return made_nbytes

    def _released_by(self, node: Any) -> int:
        run = self.planned.get(node)
        released = 0
        if run is not None:
            released = run.held_nbytes + run.again_nbytes - run.left_nbytes
        for key, nbytes in self.saved.get(node, {}).items():
            self._savers[key] -= 1
            released += 0 if self._savers[key] else nbytes
        return released


def _inside_nbytes(node: Any, taken_nbytes: int) -> int:
    """What a node takes beside its gradients, of which those that it makes may be the larger."""
    count = _INSIDE.get(node.name(), 0)
    return count * max([taken_nbytes, *_made_by(node)]) if count else 0


def _made_by(node: Any) -> list[int]:
    """The gradients that a node makes, each for what is behind it."""
    sources = ((source, number) for source, number in node.next_functions if source is not None)
    return [_torch.gradient_nbytes_into(source)[number] for source, number in sources]


def _hands_on(node: Any) -> bool:
    """Whether the gradients that it makes are those that it takes, or parts of them."""
    return node.name() in _HANDED_ON or node.name() in _HANDED_ON_IN_PARTS
