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
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "solver"))

from autoremat_solver import Plan, Problem, Solver, check, simulate
from autoremat_solver.model.indexed import Indexed, index
from autoremat_solver.model.reduce import Reduction, reduce
from autoremat_solver.search.arrangement import Arrangement, Layout, Rules
from solver_cp_sat_program import ByHighs, CpSat, Model, Rerun

DEEP = 24  # operations that one read may need to be made again, in a window
DEEP_AT_ONCE = 40  # the same in the model of the whole step
FEWEST_SLOTS, MOST_SLOTS = 120, 900  # reruns that a window lets change
PATIENCE = 40  # windows without a better plan, after which they grow
SLOTS_PER_SECOND = 600  # of CP-SAT's deterministic time for one window


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
