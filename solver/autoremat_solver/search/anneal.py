"""Simulated annealing over the schedules of a graph without phases, near one budget.

Enters: such a graph, a budget, an effort. Leaves: schedules within the budget, ever faster. A move
puts a run elsewhere, runs operations again, or takes a run out; `LiveSchedule` tells what it does
to the excess over the budget and to the time without a simulation, so a move costs as much in a
large graph as in a small one. What is made smaller is the excess plus the time in its terms, at a
rate that falls while the budget is exceeded by more than the heat explains. A search that cooled
down begins again, hot, from the best so far: a single one is stuck sooner or later. While nothing
fits, the next one holds time for worth less, and runs more again at once. Seeded, and limited by
the effort alone: it ends early only at a schedule without reruns.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import numpy as np

from autoremat_solver.effort import Effort
from autoremat_solver.model.indexed import Indexed
from autoremat_solver.search.list_orders import list_orders
from autoremat_solver.search.live_schedule import Edit, Insertion, LiveSchedule, Removal, Shift
from autoremat_solver.simulate import measure

CYCLES = 6  # times that a search heats up again, from the best so far
FIRST_HEAT, LAST_HEAT = 4.0, 0.07  # mean sizes that may be lost by a move
RATE = 1 / 200  # of the mean size times the operations: what the mean time of one is worth
FALL, RISE = 1e-3, 1e1  # of the rate over a whole search, above or within the budget
USUAL = 0.3  # heats per full step that a search is over its budget
SETTLED = 0.3  # of the effort, after which the rate changes
ROUND, ROUNDS_SHARE = 100, 0.2  # moves of a round: so many, or times the operations
TOLL = 0.5  # mean sizes that a step over the budget adds to its excess
NEAR = 0.5  # mean sizes below the budget at which a step counts as full
SHIFTS, CROSSINGS, INSERTIONS = 0.1, 0.5, 0.85  # shares of the moves, summed up; then removals
GAPS = 0.2  # times the operations: gaps that reruns are put in
RERUNS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # that one move adds: the best of these
MOST_RERUNS = 12  # at first; after each cooling within which nothing fitted so much more,
MORE, CHEAPER = 2, 0.1  # and the time worth so much less
AT_END, AT_INPUT = 0.5, 0.75  # shares of the places where reruns are put in, summed up
TRIES = 12
AT_ONCE = 16  # steps of a move that are looked at in the time of one that is simulated


def annealed(
    indexed: Indexed, starts: list[list[int]], budget_nbytes: int, effort: Effort, *, seed: int = 0
) -> Iterator[list[int]]:
    """Schedules within the budget, ever faster; if there is none, the one that it came to.

    Args:
        indexed: a graph without phases.
        starts: schedules to begin with, beside list orders.
        budget_nbytes: the peak allowed.
        effort: what may be spent; all of it is, unless a schedule without reruns fits.
        seed: of the random choices.
    """
    found = [*starts, *list_orders(indexed, effort, seed=seed)]

    def by_excess(steps: list[int]) -> tuple[int, float]:
        return _excess(indexed, steps, budget_nbytes, effort)

    best, least_us, failed = min(found, key=by_excess), math.inf, 0
    for left in range(CYCLES, 0, -1):
        part, number = effort.part(1 / left), CYCLES * seed + left
        cycle = Annealer(indexed, best, budget_nbytes, part, failed=failed, seed=number)
        for time_us, steps in cycle.improvements(least_us):
            best, least_us = steps, time_us
            yield steps
        failed = failed + 1 if math.isinf(least_us) else 0
        if failed:
            best = min(best, cycle.steps, key=by_excess)
        elif len(best) == len(indexed.inputs):
            return
    if math.isinf(least_us):
        yield best


def _excess(
    indexed: Indexed, steps: list[int], budget_nbytes: int, effort: Effort
) -> tuple[int, float]:
    effort.simulated(len(steps))
    timeline = measure(indexed, steps)
    return sum(max(0, n - budget_nbytes) for n in timeline.live_nbytes), timeline.time_us


class Annealer:
    """One search from one schedule.

    Args:
        indexed: a graph without phases.
        steps: where to begin.
        budget_nbytes: the peak allowed.
        effort: of this search.
        failed: how many searches before this one found nothing within the budget.
        seed: of the random choices.
    """

    def __init__(
        self,
        indexed: Indexed,
        steps: list[int],
        budget_nbytes: int,
        effort: Effort,
        *,
        failed: int = 0,
        seed: int = 0,
    ) -> None:
        """Nothing is tried before `improvements`."""
        self._indexed, self._effort = indexed, effort
        self._chance = random.Random(seed)
        self._whole = max(1, effort.operations)
        count = len(indexed.inputs)
        self._mean = sum(indexed.nbytes) / max(1, len(indexed.nbytes))
        mean_us = math.fsum(indexed.time_us) / max(1, count)
        # Bytes over the budget, summed over steps, that a microsecond is worth.
        rate = RATE * CHEAPER**failed
        self._rate = rate * self._mean * count / mean_us if mean_us > 0 else 0.0
        self._sizes = frozenset(n for n in RERUNS if n <= MOST_RERUNS * MORE**failed)
        self._schedule = LiveSchedule(indexed, steps, budget_nbytes, int(TOLL * self._mean))
        self._full: list[int] = []
        self._gaps: list[tuple[int, int]] = []
        self._repeated: list[int] = []
        self._full_before: list[int] = []
        self._looked_at = 0.0
        self._round = max(ROUND, int(ROUNDS_SHARE * count))

    @property
    def steps(self) -> list[int]:
        """The schedule as it is now."""
        return self._schedule.steps

    def improvements(self, least_us: float) -> Iterator[tuple[float, list[int]]]:
        """Schedules within the budget and their times, each faster than that given and all before.

        Ends early at one without reruns.
        """
        least, schedule = len(self._indexed.inputs), self._schedule
        if schedule.excess == 0 and schedule.time_us < least_us:
            least_us = schedule.time_us
            yield least_us, schedule.steps
            if len(schedule.seq) == least:
                return
        while not self._effort.is_spent:
            self._look_around()
            for _ in range(self._round):
                if not self._moves() or schedule.excess > 0 or schedule.time_us >= least_us:
                    continue
                least_us = schedule.time_us
                yield least_us, schedule.steps
                if len(schedule.seq) == least:
                    return

    def _moves(self) -> bool:
        """Whether one more move is made."""
        edit = self._proposal()
        self._effort.simulated(edit.width // AT_ONCE if edit is not None else 0)
        if edit is None or not self._accepts(edit):
            return False
        self._schedule.apply(edit)
        return True

    def _accepts(self, edit: Edit) -> bool:
        worse = edit.excess + edit.time_us * self._rate
        if worse <= 0:
            return True
        heat = self._heat
        return heat > 0 and self._chance.random() < math.exp(-worse / heat)

    @property
    def _heat(self) -> float:
        """The bytes over the budget that a move may add with a chance of 1 in e."""
        return float(self._mean * FIRST_HEAT * (LAST_HEAT / FIRST_HEAT) ** self._done)

    @property
    def _done(self) -> float:
        """The share of the effort that is spent."""
        return 1 - max(0, self._effort.operations) / self._whole

    def _look_around(self) -> None:
        """What a round of moves is drawn from, and the rate of the time."""
        schedule = self._schedule
        self._effort.simulated(len(schedule.seq))
        is_full = schedule.over > -NEAR * self._mean
        self._full = np.flatnonzero(is_full).tolist()
        if self._done > SETTLED:
            is_within = schedule.excess <= USUAL * self._heat * len(self._full)
            self._rate *= (RISE if is_within else FALL) ** (self._done - self._looked_at)
        self._looked_at = self._done
        self._full_before = np.append(0, np.cumsum(is_full)).tolist()
        self._repeated = [op for op, runs in enumerate(schedule.runs_of) if len(runs) > 1]
        self._gaps = self._worthwhile_gaps()

    def _worthwhile_gaps(self) -> list[tuple[int, int]]:
        """Runs and values that lie idle above the budget for more than it costs to make them again.

        At best: what making them takes in bytes is not looked at.
        """
        indexed, pos = self._indexed, self._schedule.pos
        over = np.maximum(self._schedule.over, 0)
        area, count = np.append(0, np.cumsum(over)), np.append(0, np.cumsum(over > 0))
        rows = []
        for run in self._schedule.seq:
            if not indexed.rerunnable[self._schedule.op[run]]:
                continue
            for v, readers in self._schedule.readers[run].items():
                after = pos[run]
                for until in sorted(pos[reader] for reader in readers):
                    if until > after + 1 and not indexed.pinned[v]:
                        rows.append((run, v, after + 1, until))
                    after = until
        if not rows:
            return []
        run, value, first, end = np.array(rows).T
        nbytes = np.array(indexed.nbytes, dtype=over.dtype)[value]
        relief = np.minimum(area[end] - area[first], nbytes * (count[end] - count[first]))
        again_us = np.array(indexed.time_us)[np.array(indexed.producer)[value]]
        gain = relief.astype(np.float64) - self._rate * again_us
        best = np.argsort(-gain, kind="stable")[: max(1, int(GAPS * len(indexed.inputs)))]
        return [(int(run[k]), int(value[k])) for k in best if gain[k] > 0]

    def _proposal(self) -> Shift | Insertion | Removal | None:
        kind = self._chance.random()
        if kind < SHIFTS:
            return self._shift_anywhere()
        if kind < CROSSINGS:
            return self._shift_across()
        if kind < INSERTIONS:
            return self._insertion()
        return self._removal()

    def _shift_anywhere(self) -> Shift | None:
        run = self._chance.choice(self._schedule.seq)
        low, high = self._schedule.boundaries(run)
        return self._shifted(run, low, high, low if self._chance.random() < 0.5 else high)

    def _shift_across(self) -> Shift | None:
        """What makes or reads a value moved so that it is not live at a full step."""
        if not self._full:
            return None
        schedule, chance = self._schedule, self._chance
        full = min(chance.choice(self._full), len(schedule.seq) - 1)
        for _ in range(TRIES if full else 0):
            run = schedule.seq[chance.randrange(full)]
            readers = [reader for found in schedule.readers[run].values() for reader in found]
            last = max(readers, key=schedule.pos.__getitem__, default=run)
            if schedule.pos[last] <= full:
                continue
            if chance.random() < 0.5:
                high = schedule.boundaries(run)[1]
                if high > full + 1:
                    return self._shifted(run, full + 1, high, high)
            else:
                low = schedule.boundaries(last)[0]
                if low <= full:
                    return self._shifted(last, low, full, low)
        return None

    def _shifted(self, run: int, low: int, high: int, end: int) -> Shift | None:
        """A run put at the end of a range of boundaries, or anywhere in it."""
        boundary = end if self._chance.random() < 0.4 else self._chance.randint(low, high)
        stays = boundary - self._schedule.pos[run] in (0, 1)
        return None if stays else self._schedule.shift(run, boundary)

    def _insertion(self) -> Insertion | None:
        """A value made again in its longest gap, or at the end of it."""
        if not self._gaps:
            return None
        schedule, chance = self._schedule, self._chance
        run, v = chance.choice(self._gaps)
        steps = sorted(schedule.pos[reader] for reader in schedule.readers[run].get(v, ()))
        longest, after, until = 1, 0, 0
        for before, step in zip([schedule.pos[run], *steps], steps, strict=False):
            if step - before > longest:
                longest, after, until = step - before, before, step
        if longest < 2:
            return None
        boundary = self._boundary(schedule.op[run], after + 2, until)
        return self._best_of(self._closures(schedule.op[run], boundary), boundary)

    def _boundary(self, op: int, low: int, high: int) -> int:
        """Where to make a value again: at the end, after an input's last read, or anywhere."""
        schedule, chance = self._schedule, self._chance
        if (kind := chance.random()) < AT_END:
            return high
        inputs = self._indexed.inputs[op]
        if kind < AT_INPUT and inputs:
            v = chance.choice(inputs)
            maker = schedule.latest(self._indexed.producer[v], high)
            after = high if maker is None else schedule.death(maker, v) + 1
            if low <= after <= high:
                return after
        return chance.randint(low, high)

    def _removal(self) -> Removal | None:
        if not self._repeated:
            return None
        runs = self._schedule.runs_of[self._chance.choice(self._repeated)]
        return self._schedule.removal(self._chance.choice(runs))

    def _best_of(self, closures: Iterator[list[int]], boundary: int) -> Insertion | None:
        """Of operations to run again at a boundary those that gain most.

        Each is counted as it is weighed, and what comes of it once more, as every move is.
        """
        best, best_worse = None, math.inf
        for ops in closures:
            edit = self._schedule.insertion(ops, boundary)
            if edit is None:
                break
            self._effort.simulated(edit.width // AT_ONCE)
            worse = edit.excess + edit.time_us * self._rate
            if worse < best_worse:
                best, best_worse = edit, worse
        return best

    def _closures(self, wanted: int, boundary: int) -> Iterator[list[int]]:
        """What to run again at a boundary for one operation, ever more.

        Next comes what makes the input whose being held adds most excess beyond what it is worth.
        """
        indexed, ops, held = self._indexed, {wanted}, dict[int, float]()
        op = wanted
        while indexed.rerunnable[op]:
            for v in indexed.inputs[op]:
                if indexed.producer[v] not in ops and v not in held:
                    held[v] = self._gain(v, boundary)
            best = max(held, key=held.__getitem__, default=None)
            is_last = best is None or held[best] <= 0 or len(ops) == max(self._sizes)
            if is_last or len(ops) in self._sizes:
                yield sorted(ops)
            if is_last or best is None:
                return
            op = indexed.producer[best]
            ops.add(op)
            for v in indexed.outputs[op]:
                held.pop(v, None)

    def _gain(self, value: int, boundary: int) -> float:
        """What making a value again, in place of holding it up to a boundary, gains, about."""
        indexed, op = self._indexed, self._indexed.producer[value]
        maker = self._schedule.latest(op, boundary)
        if maker is None or indexed.pinned[value] or not indexed.rerunnable[op]:
            return 0.0
        return self._burden(maker, value, boundary) - self._rate * indexed.time_us[op]

    def _burden(self, run: int, value: int, boundary: int) -> int:
        """The excess that holding a value up to a boundary adds, about."""
        full, last = self._full_before, len(self._full_before) - 1
        death = min(self._schedule.death(run, value) + 1, last)
        steps = full[min(boundary, last)] - full[death]
        return max(0, steps) * self._indexed.nbytes[value]
