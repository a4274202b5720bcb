"""Search over arrangements on exact live bytes: repair what exceeds a budget, then ruin and repair.

Enters: a schedule and a budget. Leaves: a schedule within the budget, or None. A repair step
looks at what lies idle while the budget is exceeded, and lets it go until it is read again:
by making it again there (with what that takes), or, in a graph without phases, by making it later
or reading it earlier. `improve` takes some reruns out again and repairs in another way
(ruin and recreate, [Schrimpf2000]), with a threshold that falls. Seeded, and limited by counts:
the same problem gives the same plan.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from autoremat_solver.effort import Effort
from autoremat_solver.model.indexed import Indexed
from autoremat_solver.search.arrangement import Arrangement, Layout, Order, Rules
from autoremat_solver.search.changes import Change, Closures, all_gaps, gaps_above, moves, together

DESCENT_SHARE = 0.2  # of what is left then, to descend from where the race ends
REPAIR_SHARE = 0.4  # of the effort, to bring the starts within the budget
REPAIR_NOISES = (0.0, 0.2, 0.4)  # of the attempts to repair one start
SHIFTS = 32  # fewer first runs than this are moved by one ruin; with 4, searches end alike
MOST_RUINS, STEPS_OF_RUINS = 20, 3_000  # attempts to repair ruins of it, and their steps in all
FIRST_STEP, LAST_STEP = 0.04, 0.002  # of the peak, by which `lowered` goes down at once
LOOKED_AT = 24  # gaps whose reruns are worked out, per repair step
GLANCED_AT = 8  # the same in a search with noise
TRIED = 6  # changes simulated, per repair step
REPAIR_STEPS = 400
SETBACKS = 3  # repair steps that may exceed the budget by more, where no change brings it nearer
NOISE = 0.6
SLACK = 1.25  # times the time wanted may a repair take, as pruning will shorten it
DETOUR = 0.01  # of the whole time: what a detour may cost before more is pruned
HOT = 0.002  # of the whole time: by how much a worse plan may be accepted at first


def rearranged(
    indexed: Indexed, starts: list[list[int]], budget_nbytes: int, effort: Effort
) -> Iterator[list[int]]:
    """Schedules within the budget, ever faster; none where no start can be repaired.

    Where a repair ends depends much on where it starts, and can hardly be foreseen. So all starts
    race: after each round of short searches the slower half of them is left behind.

    Args:
        indexed: the step.
        starts: schedules, the most promising first; they may exceed the budget.
        budget_nbytes: the peak allowed.
        effort: for the simulations.
    """
    rules = Rules(indexed)
    repairs = effort.part(REPAIR_SHARE)
    field = list(_repaired(rules, [steps for steps in starts if steps], budget_nbytes, repairs))
    race = effort.part(1 - DESCENT_SHARE)
    rounds = max(1, math.ceil(math.log2(max(1, len(field)))))
    for left in range(rounds, 0, -1):
        turn = race.part(1 / left)
        raced = []
        for number, layout in enumerate(field):
            part = turn.part(1 / (len(field) - number))
            search = Rearranger(rules, budget_nbytes, part, seed=number)
            better = search.improve(layout)
            raced.append((search.rerun_us(better), number, better))
        raced.sort(key=lambda entry: entry[:2])
        field = [layout for _, _, layout in raced[: (len(raced) + 1) // 2]]
    for layout in reversed(field):
        yield layout.steps
        yield Rearranger(rules, budget_nbytes, effort).descended(layout).steps


def _repaired(
    rules: Rules, starts: list[list[int]], budget_nbytes: int, effort: Effort
) -> Iterator[Layout]:
    """Layouts within the budget; if no start leads to any, what `lowered` finds from the first."""
    found = False
    for number, steps in enumerate(starts):
        search = Rearranger(rules, budget_nbytes, effort.part(1 / (len(starts) - number)))
        layout = search.repaired(rules.take_apart(steps))
        if layout is not None:
            found = True
            yield layout
    for steps in [] if found else starts[:1]:
        lowest = [steps, *lowered(rules.indexed, steps, budget_nbytes, effort)][-1]
        layout = Layout(rules.indexed, rules.take_apart(lowest))
        if layout.peak_nbytes <= budget_nbytes:
            yield layout


def lowered(
    indexed: Indexed, steps: list[int], budget_nbytes: int, effort: Effort
) -> Iterator[list[int]]:
    """Schedules of ever smaller peaks, step by step; none below the budget, if it can be.

    Args:
        indexed: the step.
        steps: the schedule to start from.
        budget_nbytes: the peak at which to stop.
        effort: for the simulations.
    """
    if not steps:
        return
    rules = Rules(indexed)
    layout = Layout(indexed, rules.take_apart(steps))
    step = FIRST_STEP
    while step >= LAST_STEP and not effort.is_spent:
        peak = layout.peak_nbytes
        if peak <= budget_nbytes:
            break
        goal = max(budget_nbytes, int(peak * (1 - step)))
        lower = Rearranger(rules, goal, effort).repaired(layout.arrangement)
        if lower is None:
            step /= 2
        else:
            layout = lower
            yield layout.steps


class Rearranger:
    """Searches near one budget.

    Args:
        rules: what may run where.
        budget_nbytes: the peak allowed.
        effort: for the simulations.
        seed: of the random choices.
    """

    def __init__(self, rules: Rules, budget_nbytes: int, effort: Effort, *, seed: int = 0) -> None:
        """Nothing runs before a method is called."""
        self._rules, self._indexed = rules, rules.indexed
        self._budget = budget_nbytes
        self._effort = effort
        self._random = random.Random(seed)

    def repaired(self, start: Arrangement) -> Layout | None:
        """`repair` with more and more noise until it succeeds, at last from ruins of the start."""
        for noise in REPAIR_NOISES:
            layout = self.repair(start, noise=noise, setbacks=SETBACKS)
            if layout is not None:
                return layout
        for _ in range(min(MOST_RUINS, STEPS_OF_RUINS // (len(start.order) + 1))):
            layout = self.repair(self._ruined(start), noise=NOISE, setbacks=SETBACKS)
            if layout is not None or self._effort.is_spent:
                return layout
        return None

    def repair(
        self,
        start: Arrangement,
        *,
        noise: float = 0.0,
        most_us: float = math.inf,
        setbacks: int = 0,
    ) -> Layout | None:
        """An arrangement within the budget, or None if no step brought it nearer.

        What is let go in one place may have to be made again where there is no room for that yet:
        then the least excess that is worse leads on.

        Args:
            start: what to begin with.
            noise: by which share prices are drawn at random.
            most_us: give up once the reruns take longer.
            setbacks: steps that may lead further away.
        """
        layout = self._laid_out(start)
        if layout is None:
            return None
        excess, barred = self._excess(layout), set[tuple[int, int, int]]()
        for _ in range(REPAIR_STEPS):
            if excess == 0:
                return layout
            step = self._repair_step(layout, excess, noise, barred)
            if step is None or self._effort.is_spent:
                return None
            before, layout, excess = excess, step, self._excess(step)
            setbacks -= excess >= before
            if setbacks < 0 or self.rerun_us(layout) > most_us:
                return None
        return None

    def _repair_step(
        self, layout: Layout, excess: int, noise: float, barred: set[tuple[int, int, int]]
    ) -> Layout | None:
        """What the first change leads to that brings less excess; else what has the least then."""
        changes = self._changes(layout, noise, barred)
        found: list[Layout] = []
        for change in [*(() if noise else together(changes)), *changes[:TRIED]]:
            new = self._applied(layout.arrangement, change)
            if new is not None:
                if self._excess(new) < excess:
                    return new
                found.append(new)
            barred.add(change.key)
            if self._effort.is_spent:
                break
        return min(found, key=self._excess, default=None)

    def improve(self, start: Layout) -> Layout:
        """The fastest arrangement that ruins and repairs of a fitting one lead to."""
        best = current = self._pruned(start)
        best_us = current_us = self.rerun_us(best)
        heat = HOT * math.fsum(self._indexed.time_us)
        whole = max(1, self._effort.operations)
        while best_us > 0 and not self._effort.is_spent:
            left = self._effort.operations / whole
            allowed = heat * left**2 * self._random.expovariate(1.0)
            new = self.repair(
                self._ruined(current.arrangement),
                noise=NOISE,
                most_us=SLACK * (current_us + allowed),
            )
            if new is None:
                continue
            new = self._pruned(new)
            new_us = self.rerun_us(new)
            if new_us <= current_us + allowed:
                current, current_us = new, new_us
            if new_us < best_us:
                best, best_us = new, new_us
        return best

    def descended(self, start: Layout) -> Layout:
        """The fastest arrangement that single detours of a fitting one lead to.

        A detour makes a value again though there is room for it, and often for no time at all:
        a chain of reruns that begins earlier may serve two reads. Then more can be pruned.
        """
        best = self._pruned(start)
        most_us = DETOUR * math.fsum(self._indexed.time_us)
        better: Layout | None = best
        while better is not None:
            best = better
            changes = sorted(
                (change for change in self._detours(best) if change.cost_us <= most_us),
                key=lambda change: (change.cost_us, change.key),
            )
            better = self._first_better(best, changes)
        return best

    def _detours(self, layout: Layout) -> Iterator[Change]:
        closures = Closures(self._rules, layout, self._budget)
        for gap in all_gaps(self._indexed, layout):
            if self._effort.is_spent:
                return
            self._effort.simulated(0)
            yield from closures.ways(gap, sharing=True)

    def _first_better(self, layout: Layout, changes: list[Change]) -> Layout | None:
        most_us = self.rerun_us(layout) * (1 - 1e-9)
        for change in changes:
            if self._effort.is_spent:
                break
            new = self._applied(layout.arrangement, change)
            if new is not None and self._excess(new) == 0:
                new = self._pruned(new)
                if self.rerun_us(new) < most_us:
                    return new
        return None

    def rerun_us(self, layout: Layout) -> float:
        """Time of all reruns."""
        again = layout.arrangement.all_reruns()
        return math.fsum(self._indexed.time_us[op] for op, _ in again)

    def _excess(self, layout: Layout) -> int:
        return int(np.add.reduce(np.maximum(layout.live - self._budget, 0)))

    def _changes(
        self, layout: Layout, noise: float, barred: set[tuple[int, int, int]]
    ) -> list[Change]:
        """The most promising changes, best first."""
        factors = partial(self._factors, noise) if noise else None
        gaps = gaps_above(self._indexed, layout, self._budget, 2 * LOOKED_AT, factors)
        closures = Closures(self._rules, layout, self._budget)
        found: list[Change] = []
        count = GLANCED_AT if noise else LOOKED_AT
        for gap in gaps[:count]:
            found += closures.ways(gap)
        if self._rules.may_reorder:
            for gap in gaps[: 2 * count]:
                found += moves(self._indexed, layout, gap)
        found = [change for change in found if change.key not in barred]
        if noise:
            weigh = {
                change.key: change.price * (1 + noise * self._random.uniform(-1, 1))
                for change in found
            }
            found.sort(key=lambda change: (weigh[change.key], change.key))
        else:
            found.sort(key=lambda change: (change.price, change.key))
        return found

    def _factors(self, noise: float, count: int) -> NDArray[np.float64]:
        return np.array([1 + noise * self._random.uniform(-1, 1) for _ in range(count)])

    def _applied(self, arrangement: Arrangement, change: Change) -> Layout | None:
        order = Order(change.order) if change.order else arrangement.order
        if change.dropped:
            arrangement = arrangement.without(set(change.dropped))
        reruns = dict(arrangement.reruns)
        for before, ops in change.reruns.items():
            reruns[before] = tuple({*reruns.get(before, ()), *ops})
        place = order.place
        rank = place.__getitem__ if self._rules.may_reorder else self._indexed.rank.__getitem__
        for before in list(reruns) if change.order else change.reruns:
            reruns[before] = tuple(sorted(reruns[before], key=rank))
        if change.order and any(
            place[op] >= place[before] for before, ops in reruns.items() for op in ops
        ):
            return None
        return self._laid_out(Arrangement(order, reruns))

    def _laid_out(self, arrangement: Arrangement) -> Layout | None:
        """The layout; None if a read finds no instance."""
        try:
            layout = Layout(self._indexed, arrangement)
        except KeyError:
            return None
        self._effort.simulated(len(layout.steps))
        return layout

    def _pruned(self, layout: Layout) -> Layout:
        """Without the reruns, longest first, that the budget does not need."""
        again = layout.arrangement.all_reruns()
        again.sort(key=lambda entry: (-self._indexed.time_us[entry[0]], entry))
        steps = layout.rerun_steps()
        for entry in again:
            if self._effort.is_spent:
                break
            if not self._may_hold(layout, entry[0], steps[entry]):
                continue
            new = self._laid_out(layout.arrangement.without({entry}))
            if new is not None and self._excess(new) == 0:
                layout, steps = new, new.rerun_steps()
        return layout

    def _may_hold(self, layout: Layout, op: int, step: int) -> bool:
        """Whether what a rerun makes could be held from its last read until then instead."""
        indexed = self._indexed
        for v in indexed.outputs[op]:
            earlier = layout.before(v, step)
            if earlier is None or self._is_barred(layout, v, earlier):
                return False
            this = layout.before(v, step + 1)
            if this is None or not layout.reads(this):
                continue
            begin = layout.last[earlier] + 1
            idle = layout.live[begin:step].copy()
            for u in indexed.inputs[op]:
                read = layout.before(u, step)
                if read is not None and layout.last[read] == step and not indexed.pinned[u]:
                    reads = layout.reads(read)
                    freed = reads[-2] if len(reads) > 1 else layout.born[read]
                    idle[max(0, freed + 1 - begin) :] -= indexed.nbytes[u]
            if idle.max(initial=0) + indexed.nbytes[v] > self._budget:
                return False
        return True

    def _is_barred(self, layout: Layout, value: int, instance: int) -> bool:
        """Whether the backward must not read this instance: the forward's of a must_recompute."""
        backward = self._indexed.is_backward
        made = layout.born[instance]
        return self._indexed.barred[value] and not any(backward[op] for op in layout.steps[:made])

    def _ruined(self, arrangement: Arrangement) -> Arrangement:
        """Some reruns taken out, near each other or anywhere; some first runs moved."""
        place = arrangement.order.place
        again = [
            (op, before)
            for op, before in arrangement.all_reruns()
            if op in place and not any(self._indexed.barred[v] for v in self._indexed.outputs[op])
        ]
        chosen: set[tuple[int, int]] = set()
        if again:
            count = min(len(again), 1 + int(self._random.expovariate(0.4)))
            if self._random.random() < 0.5:
                centre = place[self._random.choice(again)[1]]
                again.sort(key=lambda entry: (abs(place[entry[1]] - centre), entry))
                chosen = set(again[:count])
            else:
                chosen = set(self._random.sample(again, count))
        ruined = arrangement.without(chosen)
        if self._rules.may_reorder:
            for _ in range(self._random.randrange(SHIFTS)):
                ruined = _shifted(self._indexed, ruined, self._random)
        return ruined


def _shifted(indexed: Indexed, arrangement: Arrangement, chance: random.Random) -> Arrangement:
    """One first run moved to another place between its inputs and its readers."""
    order = list(arrangement.order)
    place = arrangement.order.place
    op = chance.choice(order)
    low = max((place[indexed.producer[v]] for v in indexed.inputs[op]), default=-1) + 1
    read = (place[reader] for v in indexed.outputs[op] for reader in indexed.readers[v])
    high = min(read, default=len(order)) - 1
    if low >= high:
        return arrangement
    order.remove(op)
    order.insert(chance.randint(low, high), op)
    moved = Order(order)
    late = {
        (again, before)
        for again, before in arrangement.all_reruns()
        if moved.place[again] >= moved.place[before]
    }
    return Arrangement(moved, arrangement.without(late).reruns)
