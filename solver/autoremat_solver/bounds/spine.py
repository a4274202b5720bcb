"""The runs that every plan shares, in their order, and what is live at each of them.

Enters: an `Indexed` problem. Leaves: a `Spine`: its positions are the BACKWARD operations. A graph
without phases has no position, since any order of it is allowed. What stands here holds for every
plan that `check` accepts; `intervals` and `floor` prove their bounds from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from autoremat_solver.model.indexed import Indexed
from autoremat_solver.problem import Phase


@dataclass(frozen=True)
class Spine:
    """Positions that no plan reorders; between two of them a plan may run what it wants again.

    Attributes:
        indexed: the problem.
        ops: per position, the operation that runs there.
        reads: per position, the movable values that are live because the operation reads them.
        fixed_nbytes: per position, what is live in every plan beside movable values: residents,
            outputs of the problem, what only the spine makes, the operation's own outputs and
            workspace.
        between_nbytes: the same between the position before and this one.
        born: per value, the position that makes it first; -1 if it may exist before position 0.
        free: values that are counted as fixed once they exist; readable at any time after.
        again: per operation, whether it may run between positions.
        constant_us: time of the runs that every plan shares.
    """

    indexed: Indexed
    ops: list[int]
    reads: list[frozenset[int]]
    fixed_nbytes: list[int]
    between_nbytes: list[int]
    born: list[int]
    free: frozenset[int]
    again: list[bool]
    constant_us: float

    @cached_property
    def inputs(self) -> list[tuple[int, ...]]:
        """Per operation, the inputs that a plan may keep or make again."""
        return [tuple(v for v in read if v not in self.free) for read in self.indexed.inputs]

    @cached_property
    def remade(self) -> list[bool]:
        """Per value, whether a second run of its operation makes an instance that reads may see."""
        return [
            self.again[self.indexed.producer[v]] and not value.must_save
            for v, value in enumerate(self.indexed.problem.values)
        ]

    @cached_property
    def kept(self) -> list[frozenset[int]]:
        """Per position, values of its reads and later ones that no second run can make."""
        held: frozenset[int] = frozenset()
        result = []
        for k in range(len(self.ops) - 1, -1, -1):
            held |= frozenset(v for v in self.reads[k] if not self.remade[v])
            result.append(frozenset(v for v in held if self.born[v] < k))
        return result[::-1]

    @cached_property
    def last_use(self) -> list[int]:
        """Per value, the last position that may read it or what a second run makes of it; or -1."""
        last = [-1] * len(self.indexed.nbytes)
        for k, read in enumerate(self.reads):
            for v in read:
                last[v] = k
        for op in reversed(range(len(self.again))):
            until = max((last[v] for v in self.indexed.outputs[op]), default=-1)
            for u in self.inputs[op] if self.again[op] else ():
                last[u] = max(last[u], until)
        return last

    @cached_property
    def needed_after(self) -> list[int]:
        """Per position, how many values may be needed after it."""
        count = [0] * (len(self.ops) + 1)
        for k in self.last_use:
            count[k] += k >= 0
        return list(accumulate(reversed(count[:-1]), initial=0))[-2::-1]

    @cached_property
    def load_nbytes(self) -> list[int]:
        """Per position, what is live in every plan."""
        nbytes = self.indexed.nbytes
        pairs = zip(self.fixed_nbytes, self.reads, strict=True)
        return [fixed + sum(nbytes[v] for v in read) for fixed, read in pairs]

    @cached_property
    def forward(self) -> ForwardLoad:
        """The FORWARD operations before position 0."""
        return _forward_load(self.indexed, self.reads[0] if self.reads else frozenset())


@dataclass(frozen=True)
class ForwardLoad:
    """What is live while the forward runs.

    Attributes:
        nbytes: per FORWARD operation, what is live in every plan.
        counted_until: per value, the first FORWARD operation at which `nbytes` does not count it;
            from there on it is live only if the backward reads this instance.
    """

    nbytes: list[int]
    counted_until: list[int]


def spine_of(indexed: Indexed) -> Spine:
    """The spine of a problem. Linear in the number of reads."""
    ops = indexed.backward_ops
    position = {op: k for k, op in enumerate(ops)}
    on_spine_only = [indexed.is_backward[op] for op in indexed.producer]
    born = [position.get(op, -1) for op in indexed.producer]
    free = frozenset(
        v
        for v, pinned in enumerate(indexed.pinned)
        if pinned and indexed.phase[indexed.producer[v]] is Phase.FORWARD
    )
    reads = [
        frozenset(v for v in indexed.inputs[op] if not on_spine_only[v] and v not in free)
        for op in ops
    ]
    fixed, between = _fixed(indexed, ops, born, free, on_spine_only)
    return Spine(
        indexed=indexed,
        ops=ops,
        reads=reads,
        fixed_nbytes=fixed,
        between_nbytes=between,
        born=born,
        free=free | frozenset(v for v, spine in enumerate(on_spine_only) if spine),
        again=[
            op.phase is Phase.EITHER or (op.recomputable and op.phase is not Phase.BACKWARD)
            for op in indexed.problem.ops
        ],
        constant_us=math.fsum(
            time
            for time, phase in zip(indexed.time_us, indexed.phase, strict=True)
            if phase is not Phase.EITHER
        ),
    )


def _fixed(
    indexed: Indexed,
    ops: list[int],
    born: list[int],
    free: frozenset[int],
    on_spine_only: list[bool],
) -> tuple[list[int], list[int]]:
    """`fixed_nbytes` and `between_nbytes`."""
    last = list(born)
    for k, op in enumerate(ops):
        for v in indexed.inputs[op]:
            last[v] = k
    at = [0] * (len(ops) + 1)
    before = [0] * (len(ops) + 1)
    for v, nbytes in enumerate(indexed.nbytes):
        whole = v in free or on_spine_only[v]
        end = last[v] if whole else born[v]
        end = len(ops) - 1 if whole and indexed.pinned[v] else end
        if end < 0:
            continue
        start = max(born[v], 0)
        at[start] += nbytes
        at[end + 1] -= nbytes
        if whole:
            first = start + 1 if born[v] >= 0 else 0
            before[first] += nbytes
            before[max(first, end + 1)] -= nbytes
    resident = indexed.problem.resident_nbytes
    here = list(accumulate(at[:-1], initial=resident))[1:]
    return (
        [n + indexed.least_extra_nbytes[op] for n, op in zip(here, ops, strict=True)],
        list(accumulate(before[:-1], initial=resident))[1:],
    )


def _forward_load(indexed: Indexed, read_at_once: frozenset[int]) -> ForwardLoad:
    ops = [op for op, phase in enumerate(indexed.phase) if phase is Phase.FORWARD]
    step_of = {op: step for step, op in enumerate(ops)}
    last = [-1] * len(indexed.nbytes)
    for step, op in enumerate(ops):
        for v in indexed.inputs[op]:
            last[v] = step
    for v in read_at_once:
        last[v] = len(ops) - 1
    change = [0] * (len(ops) + 1)
    until = [len(ops)] * len(indexed.nbytes)
    for v, nbytes in enumerate(indexed.nbytes):
        born = step_of.get(indexed.producer[v])
        if born is None:
            continue
        until[v] = len(ops) if indexed.pinned[v] else max(last[v], born) + 1
        change[born] += nbytes
        change[until[v]] -= nbytes
    live = list(accumulate(change[:-1], initial=indexed.problem.resident_nbytes))[1:]
    workspace = indexed.least_extra_nbytes
    return ForwardLoad(
        [nbytes + workspace[op] for nbytes, op in zip(live, ops, strict=True)], until
    )
