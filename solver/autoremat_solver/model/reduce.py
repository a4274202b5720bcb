"""Presolve: a smaller problem with the same answers, and the way back.

Enters: a `Problem`. Leaves: a `Reduction`: a problem with fewer operations and values, and `lift`,
which makes any valid plan of it a valid plan of the original with the same time and a peak that
is not higher. Problems without phases come back unchanged.

Three reductions, each of which keeps at least one optimal plan:

- Empty values made in the forward are always kept: nothing mentions them.
- A backward operation that reads only backward values joins the one before it where the peak of
  the pair is the same whatever else is live, and where no recompute gains from running between
  the two (the second frees at least what it makes).
- A run of forward operations whose inner values nobody else reads becomes one operation, where
  all inner values are at least as large as what the run makes (so to save one is never better
  than to save the result) and its peak is the same whether its inputs die in it or not. The only
  plans lost run half of such a recompute at one time and the rest at another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoremat_solver.plan import Plan
from autoremat_solver.problem import Op, Phase, Problem


@dataclass(frozen=True)
class Reduction:
    """A smaller problem.

    Attributes:
        problem: the reduced one.
        parts: per merged operation the original ones, in order.
    """

    problem: Problem
    parts: dict[str, tuple[str, ...]]

    def lift(self, plan: Plan) -> Plan:
        """The plan of the original problem: each merged operation becomes its parts."""
        parts = self.parts
        return Plan.of(name for op in plan.schedule for name in parts.get(op, (op,)))


def reduce(problem: Problem) -> Reduction:
    """The problem without empty values and with runs of operations merged."""
    if any(op.phase is Phase.ANY for op in problem.ops):
        return Reduction(problem, {})
    without = _without_empty(problem)
    reads = _Reads(without)
    ops: list[Op] = []
    parts: dict[str, tuple[str, ...]] = {}
    for first, end in _runs(reads):
        run = without.ops[first:end]
        merged = run[0] if len(run) == 1 else _as_one(reads, run, first)
        ops.append(merged)
        if len(run) > 1:
            parts[merged.name] = tuple(op.name for op in run)
    made = {name for op in ops for name in op.outputs}
    values = tuple(value for value in without.values if value.name in made)
    return Reduction(replace(without, values=values, ops=tuple(ops)), parts)


def _without_empty(problem: Problem) -> Problem:
    """The problem without the empty values that may always be kept."""
    empty = _empty(problem)
    if not empty:
        return problem
    ops = tuple(
        replace(
            op,
            inputs=tuple(name for name in op.inputs if name not in empty),
            outputs=tuple(name for name in op.outputs if name not in empty),
            overwrites=tuple(name for name in op.overwrites if name not in empty),
        )
        for op in problem.ops
    )
    values = tuple(value for value in problem.values if value.name not in empty)
    return replace(problem, values=values, ops=ops)


def _empty(problem: Problem) -> frozenset[str]:
    """Empty values that may always be kept.

    Only values of FORWARD operations (others need not exist at all in the forward), none that an
    EITHER operation reads (its place in the forward follows from its inputs), none whose saving
    is forbidden, none that has to be saved while its operation may run again (what reads a second
    instance is bound by that), and no outputs.
    """
    either = (op for op in problem.ops if op.phase is Phase.EITHER)
    unwanted = {*problem.outputs, *(name for op in either for name in op.inputs)}
    return frozenset(
        value.name
        for value in problem.values
        if value.nbytes == 0
        and problem.producer_of[value.name].phase is Phase.FORWARD
        and value.name not in unwanted
        and not value.must_recompute
        and not (value.must_save and problem.producer_of[value.name].recomputable)
    )


class _Reads:
    """Who reads what, for the decision which operations may become one."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.value = problem.value_by_name
        self.pinned = frozenset(problem.outputs)
        self.readers: dict[str, list[int]] = {value.name: [] for value in problem.values}
        for place, op in enumerate(problem.ops):
            for name in set(op.inputs):
                self.readers[name].append(place)
        self.backward_made = frozenset(
            name for op in problem.ops if op.phase is Phase.BACKWARD for name in op.outputs
        )

    def nbytes(self, names: set[str] | frozenset[str]) -> int:
        return sum(self.value[name].nbytes for name in names)

    def live_nbytes(self, op: Op, live: set[str], ended: set[str]) -> int:
        """Bytes while an operation runs beside which these are live, and after which these end."""
        taken_nbytes = self.problem.taken_nbytes(op, ended)
        return self.nbytes(live) + op.workspace_nbytes - taken_nbytes

    def ends_by(self, name: str, place: int) -> bool:
        """Whether nobody reads the value after that place, nor keeps it."""
        return name not in self.pinned and all(reader <= place for reader in self.readers[name])


def _runs(reads: _Reads) -> list[tuple[int, int]]:
    """First place and one past the last of the operations that become one together."""
    ops = reads.problem.ops
    runs: list[tuple[int, int]] = []
    place = 0
    while place < len(ops):
        if ops[place].phase is Phase.BACKWARD:
            end = _backward_end(reads, place)
        else:
            end = _forward_end(reads, place)
        runs.append((place, end))
        place = end
    return runs


def _backward_end(reads: _Reads, first: int) -> int:
    """One past the last backward operation that joins the one at `first`."""
    ops, end = reads.problem.ops, first + 1
    while end < len(ops) and _joins(reads, ops[first:end], end):
        end += 1
    return end


def _joins(reads: _Reads, run: Sequence[Op], place: int) -> bool:
    op = reads.problem.ops[place]
    if op.phase is not Phase.BACKWARD or not reads.backward_made.issuperset(op.inputs):
        return False
    before = place - 1
    freed = {n for n in op.inputs if reads.ends_by(n, place)}
    kept = {n for n in op.outputs if not reads.ends_by(n, place)}
    if reads.nbytes(kept) > reads.nbytes(freed):
        return False
    _, inputs, outputs = _ends(reads, [*run, op], place)
    lowest, highest = _peaks(reads, [*run, op], before - len(run) + 1, backward=True)
    taken_over = _taken_over(reads, [*run, op], place, inputs, outputs)
    return lowest == highest >= reads.nbytes(inputs | outputs) - reads.nbytes(taken_over)


def _forward_end(reads: _Reads, first: int) -> int:
    """One past the last forward operation of the longest run that may become one."""
    ops = reads.problem.ops
    best, end = first + 1, first + 1
    inner: set[str] = set()
    outer = set(ops[first].inputs)
    while _may_run_on(reads, ops[end - 1]) and end < len(ops):
        inner.update(ops[end - 1].outputs)
        if not _may_run_on(reads, ops[end]) or not (inner | outer).issuperset(ops[end].inputs):
            break
        end += 1
        if _is_one(reads, first, end):
            best = end
    return best


def _may_run_on(reads: _Reads, op: Op) -> bool:
    """Whether a forward operation may be part of a run at all."""
    return (
        op.phase is Phase.FORWARD
        and op.recomputable
        and bool(op.outputs)
        and not any(
            name in reads.pinned or reads.value[name].must_save or reads.value[name].must_recompute
            for name in op.outputs
        )
    )


def _is_one(reads: _Reads, first: int, end: int) -> bool:
    """Whether the forward operations first..end-1 may become one."""
    run = reads.problem.ops[first:end]
    made: set[str] = set()
    result = reads.nbytes(frozenset(run[-1].outputs))
    for place, op in enumerate(run[:-1], first):
        made.update(op.outputs)
        if not all(reads.readers[n] and reads.ends_by(n, end - 1) for n in op.outputs):
            return False
        if reads.nbytes({n for n in made if not reads.ends_by(n, place)}) < result:
            return False
    lowest, highest = _peaks(reads, run, first, backward=False)
    _, inputs, outputs = _ends(reads, run, end - 1)
    return lowest == highest >= reads.nbytes(inputs | outputs)


def _ends(reads: _Reads, run: Sequence[Op], last: int) -> tuple[set[str], set[str], set[str]]:
    """What a run makes and nobody else reads, what it reads, what it makes for others."""
    made = {name for op in run for name in op.outputs}
    inputs = {name for op in run for name in op.inputs} - made
    inner = {name for name in made if reads.ends_by(name, last)}
    if run[-1].phase is not Phase.BACKWARD:
        inner -= set(run[-1].outputs)
    return inner, inputs, made - inner


def _taken_over(
    reads: _Reads, run: Sequence[Op], last: int, inputs: set[str], outputs: set[str]
) -> frozenset[str]:
    """What a run of the backward writes over as one operation: of what always ends with it."""
    found = {name for op in run for name in op.overwrites} & inputs & reads.backward_made
    if not found or run[-1].phase is not Phase.BACKWARD:
        return frozenset()
    room_nbytes = reads.nbytes(outputs)
    fitting = (n for n in sorted(found) if reads.value[n].nbytes <= room_nbytes)
    ended = (name for name in fitting if reads.ends_by(name, last))
    largest = max(ended, key=lambda name: reads.value[name].nbytes, default=None)
    return frozenset() if largest is None else frozenset({largest})


def _peaks(reads: _Reads, run: Sequence[Op], first: int, *, backward: bool) -> tuple[int, int]:
    """Peak of a run's own values and workspace if its inputs die early, and if they stay.

    Backward values die after their last reader in any plan.
    """
    made = {name for op in run for name in op.outputs}
    inputs = {name for op in run for name in op.inputs} - made
    stay, fixed = set(inputs), {n for n in inputs if backward and n in reads.backward_made}
    live, lowest, highest = set(inputs), 0, 0
    for place, op in enumerate(run, first):
        live |= set(op.outputs)
        stay |= set(op.outputs)
        later = {name for after in run[place - first + 1 :] for name in after.inputs}
        dead = {n for n in (made & live) | fixed if reads.ends_by(n, place)}
        early = dead | {n for n in live - made - fixed if n not in later}
        lowest = max(lowest, reads.live_nbytes(op, live, early))
        highest = max(highest, reads.live_nbytes(op, stay, dead))
        stay -= dead
        live -= early
    return lowest, highest


def _as_one(reads: _Reads, run: Sequence[Op], first: int) -> Op:
    """One operation with the time and the peak of a run that begins at a place."""
    backward = run[0].phase is Phase.BACKWARD
    _, peak_nbytes = _peaks(reads, run, first, backward=backward)
    last = first + len(run) - 1
    _, inputs, outputs = _ends(reads, run, last)
    taken_over = _taken_over(reads, run, last, inputs, outputs)
    order = [name for op in run for name in (*op.inputs, *op.outputs)]
    return Op(
        name=f"{run[0].name}...{run[-1].name}",
        inputs=tuple(name for name in dict.fromkeys(order) if name in inputs),
        outputs=tuple(name for op in run for name in op.outputs if name in outputs),
        time_us=sum(op.time_us for op in run),
        workspace_nbytes=peak_nbytes - reads.nbytes(inputs | outputs) + reads.nbytes(taken_over),
        phase=run[0].phase,
        recomputable=all(op.recomputable for op in run),
        overwrites=tuple(taken_over),
    )
