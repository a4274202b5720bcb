"""What an edit says it changes is what `simulate` says after it."""

from __future__ import annotations

import random

import pytest
from autoremat_solver import Op, Phase, Problem, Value
from autoremat_solver.model.indexed import index
from autoremat_solver.search.live_schedule import Insertion, LiveSchedule, Removal, Shift
from autoremat_solver.simulate import measure

from tests.solver.random_problems import MIDDLE, random_graph

TOLL = 7


def random_edit(schedule: LiveSchedule, draw: random.Random) -> Shift | Insertion | Removal | None:
    """Any edit that may be made, or none."""
    run = draw.choice(schedule.seq)
    kind = draw.randrange(3)
    if kind == 0:
        boundary = draw.randint(*schedule.boundaries(run))
        stays = boundary - schedule.pos[run] in (0, 1)
        return None if stays else schedule.shift(run, boundary)
    if kind == 1:
        ops = sorted({schedule.op[draw.choice(schedule.seq)] for _ in range(draw.randint(1, 3))})
        return schedule.insertion(ops, draw.randint(0, len(schedule.seq)))
    return schedule.removal(run)


@pytest.mark.parametrize("unit", [1, 1 << 55], ids=["bytes", "beyond 64 bits"])
@pytest.mark.parametrize("seed", range(12))
def test_edits_tell_what_simulate_says(seed: int, unit: int) -> None:
    """Excess, time and live bytes after each edit are those of the simulated schedule."""
    indexed = index(random_graph(seed, MIDDLE))
    indexed.nbytes[:] = [nbytes * unit for nbytes in indexed.nbytes]
    draw = random.Random(seed)
    steps = list(range(len(indexed.inputs)))
    budget = int(0.7 * measure(indexed, steps).peak_nbytes)
    schedule = LiveSchedule(indexed, steps, budget, TOLL)
    made: set[type] = set()
    for _ in range(150):
        edit = random_edit(schedule, draw)
        if edit is None:
            continue
        schedule.apply(edit)
        made.add(type(edit))
        timeline = measure(indexed, schedule.steps)
        over = [nbytes - budget for nbytes in timeline.live_nbytes]
        assert schedule.over.tolist() == over
        assert schedule.excess == sum(n + TOLL for n in over if n > 0)
        assert schedule.time_us == pytest.approx(timeline.time_us)
    assert made == {Shift, Insertion, Removal}


def test_a_run_that_nobody_reads_any_more_is_taken_out() -> None:
    """Made again before its only reader, a chain moves there: nothing runs twice."""
    reads: dict[str, tuple[str, ...]] = {"a": (), "b": ("a",), "c": (), "d": ("b", "c")}
    ops = tuple(Op(n, r, (n,), 5.0, phase=Phase.ANY) for n, r in reads.items())
    indexed = index(Problem(tuple(Value(n, 1) for n in reads), ops))
    schedule = LiveSchedule(indexed, [0, 1, 2, 3], 100, TOLL)
    edit = schedule.insertion([0, 1], 3)
    assert edit is not None
    assert edit.time_us == 0
    schedule.apply(edit)
    assert schedule.steps == [2, 0, 1, 3]
    assert schedule.time_us == 20
