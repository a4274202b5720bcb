"""What no plan can beat: a lower bound on the time at a budget and on the reachable peak.

Enters: an `Indexed` problem. Leaves: microseconds and bytes. Both hold for every plan that `check`
accepts: every FORWARD operation runs exactly once in the forward, in the problem's order; every
BACKWARD operation exactly once, in the problem's order; FORWARD and EITHER operations may run
again (EITHER ones also for the first time) at any point after the first backward operation, any
number of times; EITHER operations anywhere in the forward. For a graph without phases, of which
any order is allowed, the bounds are those of one run of each operation.

The time is the optimum of a linear program that every plan is a point of (`intervals` says why,
row by row), with more and more cuts: the first program has one, at position 0, and says what runs
again at least once. The next one has cuts where any plan has little room, or where what is saved
is live still, the one after it where the point breaks the budget. Rows that the point breaks are
added to each. Any of these programs is a bound; the best one counts. Where much is missing at last,
`branching` splits the best program at columns that are neither 0 nor 1. What all this may cost is
counted, not timed: the same problem and effort, the same bound. The peak is that of `floor`.
"""

from __future__ import annotations

import math
import warnings

import numpy as np

from autoremat_solver.bounds.branching import Tree
from autoremat_solver.bounds.floor import floor_nbytes
from autoremat_solver.bounds.intervals import IntervalProgram, Point
from autoremat_solver.bounds.loads import broken_rows
from autoremat_solver.bounds.paths import Path, broken_paths
from autoremat_solver.bounds.spine import spine_of
from autoremat_solver.model.indexed import Indexed
from autoremat_solver.program._highs import Relaxation, Relaxed
from autoremat_solver.program.formulation import Row

WORK = 1_300_000_000  # iterations times numbers of a program, for each budget
STAGES = 6  # sets of cuts
ROUNDS = 40  # of adding rows to one of them
LOADS_PER_ROUND = 24
PATHS_PER_ROUND = 500
TRANSIENTS_PER_WINDOW = 2
LEAST_ROUNDS = 6  # the corners that the simplex method finds may break few rows at first
MOST_COLUMNS = 2_000  # of the first program with tight cuts; each next has twice as many
FEW = 4  # cuts at a time
TIGHT = 0.8  # of the budget: positions that take more in every plan become cuts
NEAR = 0.95  # of the budget: a load that rounding may find to be broken
OVER = 1e-7  # of all bytes: a load this far above the budget breaks it
LEAST_BROKEN = 0.02  # of a path row
WORTH = 2e-3  # of the bound, that more cuts have to raise to be branched on
TREE_SHARE = 0.3  # of the work, for branching
TREE_GAP = 5e-3  # of the bound, missing at the target: with less, cuts are enough
TOLERANCE = 1e-6
SLOW = 0.01  # of what is missing at the target
SLOW_BLINDLY = 3e-4  # of the bound, where there is no target


class Bounds:
    """Lower bounds of one problem.

    Attributes:
        floor_nbytes: no plan has a smaller peak.
    """

    def __init__(self, indexed: Indexed) -> None:
        """Compute what no budget changes, and the floor."""
        self._spine = spine_of(indexed)
        self._slack = sum(indexed.nbytes) * OVER
        self._proven: dict[int, float] = {}
        self._spent: dict[int, float] = {}
        self.floor_nbytes = floor_nbytes(self._spine)

    def time_us(
        self, budget_nbytes: int, *, effort: float = 1.0, target_us: float | None = None
    ) -> float:
        """No plan whose peak is at most the budget takes less time.

        What was proven for a larger budget counts, so asking again never gives less; and where
        as much effort did not reach a target, it is not tried again.

        Args:
            budget_nbytes: the peak allowed.
            effort: how much to work, as a share of the usual; less may give a lower bound.
            target_us: stop as soon as the bound reaches it.
        """
        enough = math.inf if target_us is None else target_us
        best = max((us for n, us in self._proven.items() if n >= budget_nbytes), default=0.0)
        if best < enough and effort > self._spent.get(budget_nbytes, -1.0):
            search = _Search(self, budget_nbytes, int(effort * WORK), enough)
            best = max(best, search.best_us)
            if best < enough:
                self._spent[budget_nbytes] = effort
        self._proven[budget_nbytes] = best
        return best


class _Search:
    """One budget's programs, one after the other.

    Attributes:
        best_us: the best bound.
    """

    def __init__(self, bounds: Bounds, budget_nbytes: int, work: int, enough: float) -> None:
        """Run until the work is spent, or until nothing is left to refine."""
        self._spine = bounds._spine
        self._limit = budget_nbytes + bounds._slack
        self._budget_nbytes = budget_nbytes
        self._work = work
        self._enough = enough
        self._paths: dict[Path, None] = {}
        self._best: tuple[IntervalProgram, Relaxation, Relaxed] | None = None
        self.best_us = self._spine.constant_us * (1 - TOLERANCE)
        try:
            if self._spine.ops:
                for_tree = int(TREE_SHARE * self._work)
                self._work -= for_tree
                self._refine()
                self._branch(max(0, self._work) + for_tree)
        except Exception as error:
            warnings.warn(
                f"The linear solver failed ({type(error).__name__}: {error}); the bound is the one "
                f"proven by then, {self.best_us:.1f} us. Is highspy installed correctly?",
                RuntimeWarning,
                stacklevel=3,
            )

    def _refine(self) -> None:
        cuts = [0]
        for stage in range(STAGES):
            loads = self._converge(IntervalProgram(self._spine, cuts))
            if loads is None or self.best_us >= self._enough or self._work <= 0:
                return
            new = self._new_cuts(cuts, loads, stage)
            if not new:
                return
            cuts = sorted({*cuts, *new})

    def _branch(self, work: int) -> None:
        """Split the program that bounds most until the work is spent."""
        if self._best is None or self.best_us * (1 + TREE_GAP) >= self._enough:
            return
        _, relaxation, root = self._best
        relaxation.work = work
        enough = (self._enough + TOLERANCE * abs(self._enough)) - self._spine.constant_us
        self._raise_to(Tree(relaxation, root, enough).grow())

    def _note(self, program: IntervalProgram, relaxation: Relaxation, answer: Relaxed) -> None:
        """Keep the program to branch on: a larger one only if it bounds more than a little more."""
        if self._best is not None and self._best[0] is not program:
            known = self._best[2].bound
            if answer.bound < known + WORTH * (self._spine.constant_us + known):
                return
        self._best = program, relaxation, answer

    def _raise_to(self, bound: float) -> float:
        """Note what a program bounds beside the constant; the whole."""
        whole = self._spine.constant_us + bound
        if math.isfinite(whole):
            self.best_us = max(self.best_us, whole - TOLERANCE * abs(whole))
        return whole

    def _converge(self, program: IntervalProgram) -> list[float] | None:
        """Add broken rows until there are none; loads before the first of them, None to stop."""
        relaxation = Relaxation(program.program, work=self._work)
        relaxation.add_rows(self._known_rows(program))
        first: list[float] | None = None
        before_us = -math.inf
        for number in range(ROUNDS):
            answer = relaxation.run()
            self._work = relaxation.work
            bound = self._raise_to(answer.bound)
            if answer.solved:
                self._note(program, relaxation, answer)
            if not answer.solved or self.best_us >= self._enough:
                return first
            if number >= LEAST_ROUNDS and bound - before_us < self._slow_us(bound):
                return first
            before_us = bound
            point = program.point(answer.values)
            loads = program.loads(point)
            first = first or loads
            rows = self._load_rows(program, point, loads, always=number == 0)
            rows += self._path_rows(program, point)
            if not rows:
                return first if max(loads) >= self._budget_nbytes * NEAR else None
            relaxation.add_rows(rows)
        return first

    def _slow_us(self, bound: float) -> float:
        """What a round has to gain; else further cuts gain more."""
        missing = self._enough - bound
        return SLOW * missing if math.isfinite(missing) else SLOW_BLINDLY * abs(bound)

    def _known_rows(self, program: IntervalProgram) -> list[Row]:
        """Rows of the paths that bound the program before this one."""
        known = [program.path_row(path) for path in self._paths]
        return [row for row in known if row[0]]

    def _path_rows(self, program: IntervalProgram, point: Point) -> list[Row]:
        """Rows of broken paths. Those that the point does not come close to are forgotten."""
        new = broken_paths(program, point, LEAST_BROKEN, PATHS_PER_ROUND)
        tight = [path for path in self._paths if program.is_tight(path, point)]
        self._paths = dict.fromkeys([*tight, *new])
        return [program.path_row(path) for path in new]

    def _load_rows(
        self, program: IntervalProgram, point: Point, loads: list[float], *, always: bool
    ) -> list[Row]:
        """Rows for memory, at moments where the point breaks the budget or comes close to it."""
        steps = len(self._spine.forward.nbytes)
        over = [slot for slot, load in enumerate(loads) if load > self._limit]
        chosen = set(_spread(over, loads, LOADS_PER_ROUND, max(1, len(loads) // 200)))
        near = self._budget_nbytes * NEAR
        chosen |= {steps + cut for cut in program.cuts if always or loads[steps + cut] > near}
        found = [program.load_row(slot, point) for slot in sorted(chosen)]
        for a in range(len(program.cuts)):
            transient = program.transient_loads(a, point)
            worst = np.argsort(-transient, kind="stable")[:TRANSIENTS_PER_WINDOW].tolist()
            found += [program.transient_row(a, op, point) for op in worst if transient[op] > near]
        rows: list[Row] = []
        for load in found:
            rows += broken_rows(load, self._budget_nbytes, point.values, always=always)
        return rows

    def _new_cuts(self, cuts: list[int], loads: list[float], stage: int) -> list[int]:
        """Positions with little room in any plan; or over the budget; or in the longest windows."""
        load = self._spine.load_nbytes
        here = loads[len(self._spine.forward.nbytes) :]
        tight = self._tight_cuts(cuts, MOST_COLUMNS << stage)
        if len(tight) >= FEW:
            return tight
        limit = self._budget_nbytes * (1 + 1e-4)
        over = [k for k, nbytes in enumerate(here) if nbytes > limit and k not in cuts]
        if tight:
            return tight + _spread(over, here, FEW, 2, [*cuts, *tight])
        apart = max(1, len(here) // (8 * len(cuts) + 16))
        is_large = FEW * self._spine.needed_after[0] > MOST_COLUMNS
        early = _records(load)[: FEW // 2] if stage == 0 else []
        count = FEW - len(early) if is_large else max(FEW, len(cuts) // 2)
        new = _spread(over, here, count, apart, [*cuts, *early]) or over[:1]
        if early or new:
            return [*early, *new]
        ends = [*cuts[1:], len(here)]
        windows = [(end - cut, cut, end) for cut, end in zip(cuts, ends, strict=True)]
        windows = [window for window in sorted(windows, reverse=True)[:FEW] if window[0] > 1]
        return [max(range(cut + 1, end), key=lambda k: (load[k], -k)) for _, cut, end in windows]

    def _tight_cuts(self, cuts: list[int], columns: int) -> list[int]:
        """Positions with little room in any plan, the tightest first, as columns allow."""
        load = [float(nbytes) for nbytes in self._spine.load_nbytes]
        tight = [k for k, nbytes in enumerate(load) if nbytes > TIGHT * self._budget_nbytes]
        needed = self._spine.needed_after
        room = columns - sum(2 * needed[k] for k in cuts)
        found = []
        for k in _spread(tight, load, len(tight), 2, cuts):
            if 2 * needed[k] <= room:
                found.append(k)
                room -= 2 * needed[k]
        return found


def _records(load: list[int]) -> list[int]:
    """Positions that take more than all before them, where nearly all that is saved is live."""
    most, found = load[0], []
    for k, nbytes in enumerate(load):
        if nbytes > most:
            most = nbytes
            found.append(k)
    return found


def _spread(
    slots: list[int], loads: list[float], count: int, apart: int, taken: list[int] | None = None
) -> list[int]:
    """The worst slots, no two of them close: neighbours hold nearly the same values."""
    chosen: list[int] = []
    for slot in sorted(slots, key=lambda s: (-loads[s], s)):
        if all(abs(slot - other) >= apart for other in (*chosen, *(taken or ()))):
            chosen.append(slot)
        if len(chosen) == count:
            break
    return chosen
