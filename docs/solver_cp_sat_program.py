"""The program of a step's reruns for an experiment, and two engines that solve it.

Enters: a step, an arrangement of it, and which reruns may change. Leaves: a better arrangement.
What the variables stand for is said in `solver_cp_sat.py`, which uses it.
"""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import highspy
import numpy as np
from autoremat_solver.model.indexed import Indexed
from autoremat_solver.search.arrangement import Arrangement

Rerun = tuple[int, int]  # (operation, backward operation right before which it runs)
UNIT_US = 0.1  # times are whole multiples of it in the model


@dataclass
class Program:
    """A 0-1 program: minimise costs over rows `terms <= upper`."""

    costs: list[float] = field(default_factory=list)
    hints: list[int] = field(default_factory=list)
    rows: list[tuple[dict[int, int], float]] = field(default_factory=list)
    is_hinted: bool = True

    def variable(self, hint: int, cost: float = 0.0) -> int:
        """A new variable."""
        self.costs.append(cost)
        self.hints.append(hint)
        return len(self.costs) - 1

    def at_most(self, terms: dict[int, int], upper: float) -> None:
        """Add a row."""
        self.rows.append((terms, upper))


Term = tuple[int, int | None]  # (constant, variable): one of them counts
ONE, ZERO = (1, None), (0, None)


class Model:
    """The program of an arrangement in which some reruns may be dropped, and some added.

    Args:
        indexed: the step.
        base: what stays as it is but for `free`.
        free: reruns that may be taken or not.
        budget_nbytes: the peak allowed.
    """

    def __init__(
        self,
        indexed: Indexed,
        base: Arrangement,
        free: set[Rerun],
        budget_nbytes: int,
    ) -> None:
        self.indexed, self.base, self.budget = indexed, base, budget_nbytes
        self.program = Program()
        self.slots: list[tuple[int, int]] = []
        self.taken: list[Term] = []
        self._lay_slots(free)
        self.begins: list[list[tuple[int, Term]]] = [[] for _ in range(len(self.slots) + 1)]
        self._hold_values()
        self._limit_bytes()

    def _lay_slots(self, free: set[Rerun]) -> None:
        at: dict[int, list[int]] = {}
        for op, before in free:
            at.setdefault(before, []).append(op)
        for before in self.base.order:
            again = self.base.reruns.get(before, ())
            ops: Iterable[int] = again
            if before in at:
                ops = sorted({*again, *at[before]}, key=self.indexed.rank.__getitem__)
            for op in ops:
                self.slots.append((op, before))
                if (op, before) in free:
                    cost = max(1, round(self.indexed.time_us[op] / UNIT_US))
                    self.taken.append((0, self.program.variable(int(op in again), cost)))
                else:
                    self.taken.append(ONE)
            self.slots.append((before, before))
            self.taken.append(ONE)

    def _hold_values(self) -> None:
        """Per value, variables for whether it is held between the slots that speak of it."""
        indexed = self.indexed
        events: dict[int, list[tuple[int, bool]]] = {}
        for slot, (op, _) in enumerate(self.slots):
            for v in indexed.inputs[op]:
                if not indexed.pinned[v]:
                    events.setdefault(v, []).append((slot, False))
            for v in indexed.outputs[op]:
                if not indexed.pinned[v]:
                    events.setdefault(v, []).append((slot, True))
        for v, of_value in events.items():
            self._hold_value(v, of_value)

    def _hold_value(self, v: int, events: list[tuple[int, bool]]) -> None:
        program, taken = self.program, self.taken
        hinted = self._hinted_gaps(events)
        gaps: list[Term] = [ZERO] * len(events)  # after each event
        following = [*events[1:], None]
        fixed = all(taken[slot] == ONE for slot, _ in events)
        for i, after in enumerate(following):
            if after is None:
                continue
            slot, makes = after
            if taken[slot] == ONE:
                gaps[i] = ZERO if makes else ONE
            elif fixed:
                gaps[i] = (hinted[i], None)
            else:
                gaps[i] = (0, program.variable(hinted[i]))
        arriving: Term = ZERO
        for i, (slot, makes) in enumerate(events):
            if makes:
                self._row(gaps[i], [arriving, taken[slot]])  # held after: held before or made
                self._no_two(arriving, taken[slot])
            else:
                self._row(taken[slot], [arriving])
                self._row(gaps[i], [arriving])
            self.begins[slot + 1].append((v, gaps[i]))
            arriving = gaps[i]

    def _hinted_gaps(self, events: list[tuple[int, bool]]) -> list[int]:
        """Whether the base holds the value after each event."""
        on = [
            c if x is None else self.program.hints[x] for c, x in (self.taken[s] for s, _ in events)
        ]
        gaps, wanted = [0] * len(events), 0
        for i in range(len(events) - 1, -1, -1):
            gaps[i] = wanted
            if on[i]:
                wanted = 0 if events[i][1] else 1
        return gaps

    def _row(self, left: Term, right: list[Term]) -> None:
        """One is at most the sum of others."""
        terms: dict[int, int] = {}
        constant = left[0] - sum(c for c, _ in right)
        if left[1] is not None:
            terms[left[1]] = 1
        for _, x in right:
            if x is not None:
                terms[x] = terms.get(x, 0) - 1
        if constant + sum(c for c in terms.values() if c > 0) > 0:
            self.program.at_most(terms, -constant)

    def _no_two(self, one: Term, other: Term) -> None:
        terms = {x: 1 for _, x in (one, other) if x is not None}
        if one[0] + other[0] + len(terms) > 1:
            self.program.at_most(terms, 1 - one[0] - other[0])

    def _limit_bytes(self) -> None:
        """One row per slot; of rows with the same variables the tightest."""
        indexed, nbytes = self.indexed, self.indexed.nbytes
        unit = math.gcd(*(n for n in (*nbytes, *indexed.workspace_nbytes) if n)) or 1
        constant = indexed.problem.resident_nbytes
        live: dict[int, int] = {}  # bytes that each variable holds on arrival
        now: dict[int, Term] = {}
        rows: dict[frozenset[tuple[int, int]], int] = {}
        for slot, (op, _) in enumerate(self.slots):
            for v, term in self.begins[slot]:
                for (fixed, x), sign in ((now.get(v, ZERO), -1), (term, 1)):
                    constant += sign * fixed * nbytes[v]
                    if x is not None:
                        live[x] = live.get(x, 0) + sign * nbytes[v]
                now[v] = term
            here, fixed = dict(live), constant
            made = indexed.workspace_nbytes[op] + sum(nbytes[v] for v in indexed.outputs[op])
            x = self.taken[slot][1]
            if x is None:
                fixed += made
            else:
                here[x] = here.get(x, 0) + made
            if fixed + sum(here.values()) > self.budget:
                key = frozenset((x, n) for x, n in here.items() if n)
                rows[key] = max(rows.get(key, fixed), fixed)
            for v in indexed.outputs[op]:
                if indexed.pinned[v] and v not in now:
                    now[v] = ONE
                    constant += nbytes[v]
        for key, fixed in rows.items():
            self.program.at_most({x: n // unit for x, n in key}, (self.budget - fixed) // unit)

    def arrangement(self, values: list[int]) -> Arrangement:
        """What a solution stands for."""
        reruns: dict[int, list[int]] = {}
        for (op, before), (constant, x) in zip(self.slots, self.taken, strict=True):
            if op != before and (constant if x is None else values[x]):
                reruns.setdefault(before, []).append(op)
        return Arrangement(self.base.order, {b: tuple(ops) for b, ops in reruns.items()})


Answer = tuple[list[int] | None, bool]  # values, and whether they are proven optimal


class CpSat:
    """CP-SAT in a process of its own.

    Attributes:
        spent_s: its processor time so far.
        found: of the last program, (processor seconds, values) per solution on the way.
    """

    def __init__(self) -> None:
        engine = Path(__file__).with_name("solver_cp_sat_engine.py")
        command = [sys.executable, str(engine)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.spent_s = 0.0
        self.found: list[tuple[float, list[int]]] = []

    def __call__(
        self, program: Program, *, seconds: float | None = None, counted: float | None = None
    ) -> Answer:
        """Solve, limited by seconds or by deterministic time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        costs = [round(cost) for cost in program.costs]
        rows = [(terms, int(upper)) for terms, upper in program.rows]
        hints = program.hints if program.is_hinted else None
        pickle.dump((costs, hints, rows, seconds, counted), self._process.stdin)
        self._process.stdin.flush()
        values, proven, self.found, spent_s = pickle.load(self._process.stdout)
        self.spent_s += spent_s
        return values, proven


@dataclass
class ByHighs:
    """The same programs by the solver that the product has: HiGHS, limited by nodes.

    Attributes:
        nodes: that one program may take.
        spent_s: 0, as it runs in this process.
    """

    nodes: int = 20
    spent_s: float = 0.0

    def __call__(self, program: Program, *, counted: float | None = None) -> Answer:
        """Solve."""
        return by_highs(program, self.nodes)


def by_highs(program: Program, nodes: int) -> Answer:
    """One program by HiGHS."""
    count = len(program.costs)
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("mip_max_nodes", nodes)
    highs.setOptionValue("mip_rel_gap", 0.0)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = count, len(program.rows)
    lp.col_cost_ = np.array(program.costs)
    lp.col_lower_, lp.col_upper_ = np.zeros(count), np.ones(count)
    lp.row_lower_ = np.full(len(program.rows), -highspy.kHighsInf)
    scale = [max(map(abs, terms.values()), default=1) for terms, _ in program.rows]
    lp.row_upper_ = np.array([u / s for (_, u), s in zip(program.rows, scale, strict=True)])
    lp.integrality_ = [highspy.HighsVarType.kInteger] * count
    matrix = lp.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_ = np.append(0, np.cumsum([len(t) for t, _ in program.rows]))
    matrix.index_ = np.array([x for t, _ in program.rows for x in t])
    matrix.value_ = np.array(
        [n / s for (t, _), s in zip(program.rows, scale, strict=True) for n in t.values()]
    )
    highs.passModel(lp)
    hint = highspy.HighsSolution()
    hint.col_value = [float(x) for x in program.hints]
    highs.setSolution(hint)
    highs.run()
    found = highs.getSolution().col_value
    proven = highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
    if not found or highs.getInfo().primal_solution_status != 2:
        return None, False
    return [round(x) for x in found], proven
