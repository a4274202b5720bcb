"""An experiment: OR-tools CP-SAT in place of the search by ruin and repair at low budgets.

Run `python docs/solver_cp_sat.py PROBLEM.json SHARE VARIANT...`; OR-tools is no dependency of the
product, `pip install ortools` first. SHARE is percent of the peak without recompute, or `floor`
(the smallest peak found plus 3 %); VARIANT names functions of `VARIANTS`. Leaves one JSON line per
variant. Every plan passes `check`, and its peak is what `simulate` says. What came of it is in
`solver_cp_sat.md`.

The model: runs stand in slots in one order: the forward, and before each backward operation the
reruns that may be made there. A slot of a rerun is taken or not (optional intervals). Each value
is held or not between two slots that may read or make it (its retention); a run needs what it
reads held, a value is held after a slot only if it was before or is made there. At each slot
the bytes held, made and worked in are at most the budget (a cumulative constraint, one row per
slot). The time of the slots taken is least. Which slots there are bounds the model: `Window`.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "solver"))

import highspy
import numpy as np
from autoremat_solver import Plan, Problem, Solver, check, simulate
from autoremat_solver.model.indexed import Indexed, index
from autoremat_solver.model.reduce import Reduction, reduce
from autoremat_solver.search.arrangement import Arrangement, Layout, Rules

Rerun = tuple[int, int]  # (operation, backward operation right before which it runs)
UNIT_US = 0.1  # times are whole multiples of it in the model
DEEP = 24  # operations that one read may need to be made again, in a window
DEEP_AT_ONCE = 40  # the same in the model of the whole step
FEWEST_SLOTS, MOST_SLOTS = 120, 900  # reruns that a window lets change
PATIENCE = 40  # windows without a better plan, after which they grow
SLOTS_PER_SECOND = 600  # of CP-SAT's deterministic time for one window


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


class Window:
    """Which reruns may change together."""

    def __init__(self, indexed: Indexed) -> None:
        self.indexed = indexed
        self.position = {op: k for k, op in enumerate(indexed.backward_ops)}

    def needed(self, position: int, deep: int) -> set[int]:
        """Operations that what a backward operation reads may need, the nearest ones."""
        indexed, found = self.indexed, set[int]()
        heap = {indexed.producer[v] for v in indexed.demands[position] if not indexed.pinned[v]}
        while heap and len(found) < deep:
            op = max(heap, key=indexed.rank.__getitem__)
            heap.discard(op)
            if not indexed.rerunnable[op]:
                continue
            found.add(op)
            heap |= {
                indexed.producer[v] for v in indexed.inputs[op] if not indexed.pinned[v]
            } - found
        return found

    def at_once(self, base: Arrangement) -> set[Rerun]:
        """For the whole step: before each backward operation what it may need."""
        order = self.indexed.backward_ops
        free = {(op, order[k]) for k in range(1, len(order)) for op in self.needed(k, DEEP_AT_ONCE)}
        return self._allowed(free, base) | set(base.all_reruns())

    def around(self, base: Arrangement, centre: int, width: int) -> set[Rerun]:
        """All reruns in some positions, and those of the same operations elsewhere."""
        order = self.indexed.backward_ops
        low, high = max(1, centre - width // 2), min(len(order), centre + width // 2 + 1)
        again = base.all_reruns()
        here = {op for op, before in again if low <= self.position[before] < high}
        free: set[Rerun] = set()
        known = set(here)
        for k in range(high - 1, low - 1, -1):
            known |= self.needed(k, DEEP)
            free |= {(op, order[k]) for op in known}
        free = self._allowed(free, base)
        return free | {(op, before) for op, before in again if op in known}

    def _allowed(self, free: set[Rerun], base: Arrangement) -> set[Rerun]:
        return {(op, before) for op, before in free if self.indexed.rerunnable[op]}


class Neighbourhood:
    """Searches window after window, everything outside fixed."""

    def __init__(self, indexed: Indexed, budget_nbytes: int, engine: CpSat | ByHighs) -> None:
        self.indexed, self.budget, self.engine = indexed, budget_nbytes, engine
        self.window = Window(indexed)
        self.began = time.process_time()
        self.random = random.Random(0)
        self.rounds = self.proven = self.better = 0

    def spent_s(self) -> float:
        """Processor time so far, the engine's included."""
        return time.process_time() - self.began + self.engine.spent_s

    def rerun_us(self, arrangement: Arrangement) -> float:
        """Time of all reruns."""
        return math.fsum(self.indexed.time_us[op] for op, _ in arrangement.all_reruns())

    def improve(
        self, start: Arrangement, seconds: float, heard: Callable[[float, Arrangement], None]
    ) -> Arrangement:
        """The best arrangement found in so many seconds of processor time."""
        best, width, slots, waited = start, 8.0, FEWEST_SLOTS, 0
        while self.spent_s() < seconds:
            again = best.all_reruns()
            if not again:
                break
            weights = [self.indexed.time_us[op] for op, _ in again]
            centre = self.window.position[self.random.choices(again, weights)[0][1]]
            centre += self.random.randint(-int(width) // 2, int(width) // 2)
            free = self.window.around(best, centre, int(width))
            if len(free) > slots and width > 2:
                width *= 0.8
                continue
            model = Model(self.indexed, best, free, self.budget)
            values, proven = self.engine(model.program, counted=slots / SLOTS_PER_SECOND)
            self.rounds += 1
            waited += 1
            if waited > PATIENCE:
                slots, waited = min(MOST_SLOTS, int(1.5 * slots)), 0
            self.proven += proven
            width = width * (1.1 if proven else 0.85)
            width = min(max(width, 2.0), len(self.indexed.backward_ops))
            if values is None:
                continue
            new = model.arrangement(values)
            layout = Layout(self.indexed, new)
            assert layout.peak_nbytes <= self.budget, (layout.peak_nbytes, self.budget)
            if self.rerun_us(new) < self.rerun_us(best):
                best = new
                self.better += 1
                waited = 0
                heard(self.spent_s(), best)
        return best


@dataclass
class Case:
    """A problem and a budget.

    Attributes:
        problem: as given.
        reduction: what is searched over.
        indexed: the reduced problem.
        budget_nbytes: the peak allowed.
        base_us: time without recompute.
    """

    problem: Problem
    reduction: Reduction
    indexed: Indexed
    budget_nbytes: int
    base_us: float

    def added(self, arrangement: Arrangement) -> float:
        """Extra time of an arrangement in percent, by the plan of the given problem; checked."""
        layout = Layout(self.indexed, arrangement)
        plan = self.reduction.lift(self.indexed.plan(layout.steps))
        wrong = check(self.problem, plan, self.budget_nbytes)
        assert not wrong, wrong[0]
        return self.added_by(plan)

    def added_by(self, plan: Plan) -> float:
        """The same of a plan."""
        return 100 * (simulate(self.problem, plan).time_us / self.base_us - 1)

    def taken_apart(self, plan: Plan) -> Arrangement:
        """A plan of the given problem as an arrangement of the reduced one."""
        part_of = {p: op for op, parts in self.reduction.parts.items() for p in parts[:1]}
        inner = {p for parts in self.reduction.parts.values() for p in parts[1:]}
        names = [part_of.get(name, name) for name in plan.schedule if name not in inner]
        number = {op.name: i for i, op in enumerate(self.indexed.problem.ops)}
        return Rules(self.indexed).take_apart([number[name] for name in names])


@dataclass(frozen=True)
class Start:
    """What one solve of the product leaves.

    Attributes:
        arrangement: its plan; None if none fits.
        seconds: processor time.
    """

    arrangement: Arrangement | None
    seconds: float


Row = dict[str, Any]
Heard = list[tuple[float, Arrangement]]


def case_of(problem: Problem, share: str) -> Case:
    """The problem with a budget of a share of the peak without recompute, or next to the floor."""
    plain = simulate(problem, Plan.of(op.name for op in problem.ops))
    reduction = reduce(problem)
    if share == "floor":
        smallest = Solver(problem, time_limit_s=1000).smallest_peak()
        budget_nbytes = int(1.03 * smallest.timeline.peak_nbytes)
    else:
        above_nbytes = plain.peak_nbytes - problem.resident_nbytes
        budget_nbytes = problem.resident_nbytes + int(above_nbytes * float(share) / 100)
    return Case(problem, reduction, index(reduction.problem), budget_nbytes, plain.time_us)


def solved(case: Case, *, effort: float = 1.0, without: tuple[str, ...] = ()) -> Start:
    """What the product finds."""
    began = time.process_time()
    solver = Solver(case.problem, time_limit_s=1000, effort=effort, without=without)
    solution = solver.solve(case.budget_nbytes)
    seconds = time.process_time() - began
    if solution.timeline.peak_nbytes > case.budget_nbytes:
        return Start(None, seconds)
    return Start(case.taken_apart(solution.plan), seconds)


def through_windows(
    case: Case, start: Arrangement, seconds: float, engine: CpSat | ByHighs
) -> Heard:
    """Windows of the plan solved one after the other."""
    heard: Heard = [(0.0, start)]
    search = Neighbourhood(case.indexed, case.budget_nbytes, engine)
    search.improve(start, seconds, lambda spent_s, found: heard.append((spent_s, found)))
    return heard


def all_at_once(case: Case, start: Arrangement, seconds: float, *, is_hinted: bool) -> Heard:
    """The whole step as one program, with the plan as a hint or without."""
    began = time.process_time()
    free = Window(case.indexed).at_once(start if is_hinted else Arrangement(start.order, {}))
    base = start if is_hinted else Arrangement(start.order, {})
    model = Model(case.indexed, base, free, case.budget_nbytes)
    model.program.is_hinted = is_hinted
    built_s = time.process_time() - began
    engine = CpSat()
    engine(model.program, seconds=max(1.0, seconds - built_s))
    return [(built_s + spent_s, model.arrangement(values)) for spent_s, values in engine.found]


VARIANTS: dict[str, Callable[[Case, Start, Start, float], Heard]] = {
    "windows from the portfolio": lambda case, few, own, seconds: through_windows(
        case, few.arrangement or own.arrangement, seconds, CpSat()
    ),
    "windows from our plan": lambda case, few, own, seconds: through_windows(
        case, own.arrangement, seconds, CpSat()
    ),
    "windows from our plan, HiGHS": lambda case, few, own, seconds: through_windows(
        case, own.arrangement, seconds, ByHighs()
    ),
    "at once, from our plan": lambda case, few, own, seconds: all_at_once(
        case, own.arrangement, seconds, is_hinted=True
    ),
    "at once, from scratch": lambda case, few, own, seconds: all_at_once(
        case, own.arrangement, seconds, is_hinted=False
    ),
}


def measured(case: Case, name: str, few: Start, own: Start, times: int) -> Row:
    """One variant with the processor time of our search by ruin and repair, and with more."""
    seconds = max(1.0, own.seconds - few.seconds)
    heard = VARIANTS[name](case, few, own, times * seconds)
    once = [found for spent_s, found in heard if spent_s <= seconds]
    return {
        "variant": name,
        "once": case.added(once[-1]) if once else None,
        f"{times} times": case.added(heard[-1][1]) if heard else None,
        "better": len(heard),
        "seconds": seconds,
    }


def main() -> None:
    """One line per variant."""
    path, share, *names = sys.argv[1:]
    case = case_of(Problem.from_json(Path(path).read_text()), share)
    few, own = solved(case, without=("rearrange",)), solved(case)
    for name, start in (("without rearrange", few), ("ours", own)):
        added = None if start.arrangement is None else case.added(start.arrangement)
        print(json.dumps({"variant": name, "once": added, "seconds": start.seconds}), flush=True)
    for name in names or VARIANTS:
        if own.arrangement is not None:
            print(json.dumps(measured(case, name, few, own, 5)), flush=True)


if __name__ == "__main__":
    main()
