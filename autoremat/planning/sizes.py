"""Symbolic sizes of a graph: its plan is for those at hand, and for what else fits the budget.

Enters: a graph that was planned, and the numbers that its sizes may stand for. Leaves: the peak of
the plan at other sizes, and guards of Dynamo's. Guarantees: a batch for which the plan is too large
finds other code, or is compiled and planned itself; where no guard can see to that, `Sizes` tells
which calls are beyond what was planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from autoremat_solver import Op, Plan, simulate

from autoremat import _torch
from autoremat.graph.storages import find_storages
from autoremat.inductor.laid_out import LAID_OUT
from autoremat.memory.storage_sizes import rounded_nbytes
from autoremat.planning.choice import Choice, as_chosen
from autoremat.problem.lower import Lowered
from autoremat.problem.subject import Subject

GUARDED_COMPILES = 4  # of one function; Dynamo gives it up after eight
MANY_COMPILES = 32  # of one function, where Dynamo is told not to give it up
MOST_GROWTH = 1 << 16  # beyond it, a plan is taken to be for all sizes
_FINENESS = 1 / 64  # to which the growth is found that a budget allows

Symbols = Mapping[Any, int]  # a number for each


def sizes_of(subject: Subject) -> dict[Any, int]:
    """The symbols in the sizes of a graph's inputs, and the numbers that it was planned for."""
    values = (_torch.fake_value(node) for node in subject.joint.primals)
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    extents = (extent for tensor in tensors for extent in tensor.shape)
    traced = {symbol: n for e in extents for symbol, n in _torch.size_symbols(e).items()}
    return {symbol: subject.sizes.get(symbol, n) for symbol, n in traced.items()}


def lowest_of(subject: Subject, symbol: Any) -> int:
    """The smallest number that a symbol may stand for, by what the graph's code asks of it."""
    sizes = subject.lowered.storages.sizes.values()
    size = next((s for s in sizes if symbol in _torch.size_symbols(s)), None)
    if size is None or isinstance(size, int):
        return 1
    return max(1, _torch.symbol_range(size, symbol)[0])


def varying_by(lowered: Lowered, operation: str) -> frozenset[str]:
    """Names of the storages of symbolic sizes that an operation reads or makes."""
    node, storages = lowered.node_of[operation], lowered.storages
    touched = (*storages.read_by(node), *storages.made_by[node])
    return frozenset(n for n in touched if isinstance(storages.sizes.get(n), torch.SymInt))


def subject_at(subject: Subject, numbers: Symbols) -> Subject:
    """A graph with other numbers for its symbolic sizes.

    What single operations take for themselves was measured. What is not known to be the same at all
    sizes is scaled as the varying values that they read and make.
    """
    graph, shell, before = subject.lowered.graph, subject.lowered.shell, subject.lowered.storages
    numbers = {**subject.sizes, **numbers}
    with _torch.sizes_as(numbers):
        after = find_storages(subject.joint.nodes, subject.device).nbytes
    grown = {name: after.get(name, n) - n for name, n in before.nbytes.items()}
    whole_nbytes, once_nbytes = sum(after.values()), max(1, sum(before.nbytes.values()))

    def scaled_nbytes(nbytes: int) -> int:
        return nbytes * whole_nbytes // once_nbytes

    def resized(op: Op) -> Op:
        varying = varying_by(subject.lowered, op.name) if op.workspace_nbytes else ()
        if not varying:
            return op
        once_nbytes = sum(before.nbytes[name] for name in varying)
        now_nbytes = once_nbytes + sum(grown[name] for name in varying)
        fixed_nbytes = min(op.workspace_nbytes, subject.lowered.fixed_nbytes.get(op.name, 0))
        varied_nbytes = (op.workspace_nbytes - fixed_nbytes) * now_nbytes // max(1, once_nbytes)
        return replace(op, workspace_nbytes=fixed_nbytes + varied_nbytes)

    graph = replace(
        graph,
        forward=tuple(map(resized, graph.forward)),
        backward=tuple(map(resized, graph.backward)),
        values={
            name: replace(value, nbytes=value.nbytes + grown.get(name.removesuffix(LAID_OUT), 0))
            for name, value in graph.values.items()
        },
    )
    counted = before.resident - subject.handed_over
    absent_nbytes = _absent_nbytes(subject, numbers) - _absent_nbytes(subject, subject.sizes)
    grown_nbytes = absent_nbytes + sum(grown[name] for name in counted)
    resident_nbytes = max(0, shell.resident_nbytes + grown_nbytes)
    shell = replace(
        shell,
        tangents={name: n + grown[name] for name, n in shell.tangents.items()},
        layout_nbytes=scaled_nbytes(shell.layout_nbytes),
        resident_nbytes=resident_nbytes,
        room_nbytes=scaled_nbytes(shell.room_nbytes),
    )
    storages = replace(before, nbytes={name: n + grown[name] for name, n in before.nbytes.items()})
    lowered = replace(subject.lowered, graph=graph, shell=shell, storages=storages)
    return replace(subject, lowered=lowered, sizes=numbers)


def _absent_nbytes(subject: Subject, numbers: Symbols) -> int:
    return sum(rounded_nbytes(int(n.xreplace(numbers)), subject.device) for n in subject.absent)


def peak_at(subject: Subject, plan: Plan, peak_nbytes: int, numbers: Symbols) -> int:
    """The peak of a plan at other sizes.

    Args:
        subject: the graph, as it was planned.
        plan: its plan.
        peak_nbytes: the real peak at the sizes that were planned for; a compiler may have brought
            it below the simulated one, and does so in proportion where the sizes are smaller.
        numbers: what the symbols stand for.
    """
    planned = subject.lowered.problem
    before_nbytes = simulate(planned, plan).peak_nbytes
    grown = subject_at(subject, numbers).lowered.problem
    grown_nbytes = simulate(grown, plan).peak_nbytes - before_nbytes
    own_nbytes = peak_nbytes - planned.resident_nbytes
    scale = own_nbytes / max(1, before_nbytes - planned.resident_nbytes)
    scale = max(1.0, scale) if grown_nbytes > 0 else min(1.0, scale)
    return peak_nbytes + int(grown_nbytes * scale)


def room_to_grow(subject: Subject, choice: Choice, budget_nbytes: int) -> float:
    """By which factor all sizes of a graph may grow until its plan needs more than the budget."""
    sizes = sizes_of(subject)
    if not sizes:
        return 1.0
    subject = as_chosen(subject, choice)

    def fits(growth: float) -> bool:
        grown = {symbol: int(n * growth) for symbol, n in sizes.items()}
        peak_nbytes = peak_at(subject, choice.solution.plan, choice.needed_nbytes, grown)
        return peak_nbytes <= budget_nbytes

    low, high = 1.0, 2.0
    while high < MOST_GROWTH and fits(high):
        low, high = high, 4 * high
    while high - low > _FINENESS * low:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def keep_to_sizes(subject: Subject, growth: float) -> None:
    """Let the compiled code not run where any of the inputs is larger than the plan allows.

    Without that, a last batch of an epoch that is smaller would leave code with symbolic sizes and
    a plan for few samples, and Dynamo would run it for the full batches to come.

    Args:
        subject: the graph.
        growth: by which factor the sizes may grow.
    """
    if growth >= MOST_GROWTH:
        return
    values = (_torch.fake_value(node) for node in subject.joint.primals)
    for value in (value for value in values if isinstance(value, torch.Tensor)):
        sizes: Sequence[int | torch.SymInt] = value.shape
        for size in sizes:
            with _torch.sizes_as(subject.sizes):
                most = int(growth * _torch.size_hint(size))
            if isinstance(size, torch.SymInt) and _torch.can_be_bounded(size, most):
                bool(size <= most)  # asking leaves the guard


@dataclass(frozen=True)
class Sizes:
    """The symbolic sizes among what a compiled graph is called with.

    Attributes:
        places: number of the argument, the size, and the largest for which the plan fits.
    """

    places: tuple[tuple[int, torch.SymInt, int], ...] = ()

    @classmethod
    def among(cls, inputs: Sequence[Any], growth: float, planned: Symbols) -> Sizes:
        """Those of a graph's example inputs: Dynamo lists all.

        Args:
            inputs: those that it was traced with.
            growth: by which factor they may grow.
            planned: of symbols, what the plan was made for if not for these.
        """
        with _torch.sizes_as(planned):
            return cls(
                tuple(
                    (number, size, int(growth * _torch.size_hint(size)))
                    for number, size in enumerate(inputs)
                    if isinstance(size, torch.SymInt)
                )
            )

    def given(self, arguments: Sequence[Any]) -> tuple[int, ...]:
        """What the sizes are in a call."""
        return tuple(int(arguments[number]) for number, _, _ in self.places)

    def numbers(self, given: Sequence[int]) -> dict[Any, int]:
        """What the symbols stand for where the sizes are these."""
        pairs = zip(self.places, given, strict=True)
        return {size.node.expr: number for (_, size, _), number in pairs}

    def are_beyond(self, given: Sequence[int]) -> bool:
        """Whether any is larger than planned."""
        return any(n > most for (_, _, most), n in zip(self.places, given, strict=True))
