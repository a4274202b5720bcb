"""Steps that run a block more often, or more blocks, than any step before: within the budget."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat.backend import session_behind
from autoremat.memory.meter import resident_nbytes
from autoremat.optimized import optimized_call
from autoremat.planning import room
from autoremat.planning import step as planned_step
from autoremat.planning.forms import Forms
from autoremat.planning.repeats import STEADY
from tests.session.test_blocks import (
    BATCH,
    BLOCKS,
    Parted,
    Stack,
    blockwise,
    budget_at,
    compiles,
    options,
    peak_of,
)
from tests.training import close, make_seeded, measured, step

# Dynamo looks at `.grad` of what a block is given.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Looped(Stack):
    """One block that runs again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = self.blocks[:1]
        self.times = BLOCKS

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(self.times):
            x = self.blocks[0](x)
        return x.square().mean()


class Broken(Stack):
    """Blocks of two graphs each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Parted() for _ in range(BLOCKS))


def listed(budget: int, make: Callable[[], Stack] = Stack) -> Stack:
    """A stack whose blocks are optimised together."""
    torch._dynamo.reset()
    model = make_seeded(make)
    autoremat.optimize(list(model.blocks), **options(budget))
    return model


def budget_of(plain: Stack, share: float = 0.5) -> int:
    """A share of what its steps take without a plan, above what is resident."""
    step(plain, (BATCH,))
    highest, resident = measured(plain, (BATCH,)), resident_nbytes(plain, BATCH)
    return resident + int(share * (highest - resident))


def peaks(model: Stack, attribute: str, values: Iterable[object]) -> list[int]:
    """Measured bytes of one step each, where any that is known to be above the budget fails.

    But of the first: planning measures operators, as nobody can while the step is measured.
    """
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", autoremat.OverBudgetWarning)
        for number, value in enumerate(values):
            setattr(model, attribute, value)
            if number:
                found.append(peak_of(model))
            else:
                step(model, (BATCH,))
    return found


VARYING = [{1, 5}, {0}, {2, 3, 7}, set(), {4}, {6, 7}, set()]  # stochastic depth
GROWING = [{4, 5, 6, 7}, {4, 5, 6, 7}, {4, 5, 6, 7}, {6, 7}, set(), set()]  # early exit


@pytest.mark.parametrize("skipped", [VARYING, GROWING], ids=["varying", "growing"])
@pytest.mark.parametrize("optimise", [blockwise, listed])
def test_as_many_blocks_as_there_are_may_run_in_any_step(
    optimise: Callable[[int], Stack], skipped: Sequence[set[int]]
):
    """From the first step on, and what recomputes the least is settled in few steps."""
    budget = budget_at(0.5)
    model = optimise(budget)
    found = peaks(model, "skipped", skipped)
    assert max(found) <= budget
    assert found[-1] > 0.9 * budget
    assert compiles(model.blocks[0])[1] <= len(skipped)
    before = compiles(model.blocks[0])[0]
    peaks(model, "skipped", [{1}, set(), {2, 6}])
    assert compiles(model.blocks[0])[0] == before


@pytest.mark.parametrize("optimise", [blockwise, listed])
def test_steps_that_are_all_alike_are_counted_once(
    optimise: Callable[[int], Stack], monkeypatch: pytest.MonkeyPatch
):
    """What is known of them is kept, and found anew as soon as a step is another one."""
    model = optimise(budget_at(0.5))
    peaks(model, "skipped", [{BLOCKS - 1}] * (STEADY + 4))
    found = []
    for owner, name in ((planned_step, "peaks_of"), (room, "with_spare"), (Forms, "note")):
        known = getattr(owner, name)

        def counting(*args: Any, known: Callable[..., Any] = known) -> Any:
            found.append(known.__name__)
            return known(*args)

        monkeypatch.setattr(owner, name, counting)
    peaks(model, "skipped", [{BLOCKS - 1}] * 3)
    assert not found
    peaks(model, "skipped", [{BLOCKS - 2, BLOCKS - 1}] * 2)
    assert {"peaks_of", "note"} <= set(found)


@pytest.mark.parametrize("optimise", [blockwise, listed])
def test_what_is_kept_of_a_step_is_what_would_be_found(optimise: Callable[[int], Stack]):
    """After each step, whatever came before it."""
    model = optimise(budget_at(0.5))
    for skipped in [*VARYING, *GROWING, {1}]:
        model.skipped = skipped
        step(model, (BATCH,))
        block = model.blocks[0]
        session = session_behind(block.parameters()) or optimized_call(block).session
        steps = session.steps
        steps.graphs.note_longest()  # as whoever asks for what is to come does
        now = steps.surroundings.now
        kept = steps.graphs.peak_nbytes(now), steps.graphs.peak_to_come(now)
        anew = steps.graphs.apart()
        assert kept == (anew.peak_nbytes(now), anew.peak_to_come(now))


@pytest.mark.thorough
def test_blocks_of_two_graphs_each_may_all_run():
    """Each graph is one of its own kind: there are as many of both as there are blocks."""
    budget = budget_of(make_seeded(Broken), 0.7)
    assert max(peaks(blockwise(budget, Broken), "skipped", VARYING)) <= budget


def test_skipped_blocks_have_the_gradients_of_eager_mode():
    """Whichever plan a run gets."""
    plain, model = make_seeded(Stack), blockwise(budget_at(0.5))
    for skipped in VARYING:
        plain.skipped = model.skipped = skipped
        close(step(plain, (BATCH,)), step(model, (BATCH,)), 1e-5)


def test_no_room_is_left_for_blocks_that_never_run():
    """Once many steps have run the same number, they are as fast as without the others."""
    budget = budget_at(0.5)
    as_fast = plans_after(blockwise(budget, without_last), [set()] * 3)
    model = blockwise(budget)
    assert plans_after(model, [{BLOCKS - 1}] * STEADY) != as_fast
    assert plans_after(model, [{BLOCKS - 1}]) == as_fast
    before = compiles(model.blocks[0])[0]
    peaks(model, "skipped", [{BLOCKS - 1}] * 3)
    assert compiles(model.blocks[0])[0] == before


def without_last() -> Stack:
    """A stack whose last block is there and runs in no step, as it is not one of its parts."""
    model = Stack()
    model.blocks, model.unused = model.blocks[:-1], nn.Linear(1, 1)
    return model


def plans_after(model: Stack, skipped: Sequence[set[int]]) -> list[tuple[str, float]]:
    """Times of the graphs by the plans that they have after some steps."""
    peaks(model, "skipped", skipped)
    return [(g.name, g.predicted_time_us) for g in autoremat.report(model.blocks[0]).graphs]


def test_a_number_that_cannot_be_known_may_double():
    """A block in a loop: a step that runs it twice as often as any before is within the budget."""
    plain = make_seeded(Looped)
    budget = budget_of(plain)
    model = blockwise(budget, Looped)
    times = [6, 8, 5, 9, 6, 10, 12, 12, 6]
    assert max(peaks(model, "times", times)) <= budget
    before = compiles(model.blocks[0])[0]
    for again in times:
        plain.times = model.times = again
        close(step(plain, (BATCH,)), step(model, (BATCH,)), 1e-5)
    assert compiles(model.blocks[0])[0] == before


def test_a_loop_whose_number_stays_is_planned_for_it():
    """Nothing is left for more, and one step more than blocks need shows that it stays."""
    budget = budget_of(make_seeded(Looped))
    model = blockwise(budget, Looped)
    found = peaks(model, "times", [BLOCKS] * 5)
    assert 0.9 * budget < found[-1] <= budget
    assert compiles(model.blocks[0])[1] == 3


def test_the_first_number_that_varies_is_told_once():
    """After many equal steps nobody can know: it is told, and later ones have room."""
    budget = budget_of(make_seeded(Looped))
    model = blockwise(budget, Looped)
    peaks(model, "times", [BLOCKS] * 4)
    model.times = BLOCKS + 1
    with pytest.warns(autoremat.OverBudgetWarning, match="From the next step on"):
        step(model, (BATCH,))
    assert max(peaks(model, "times", [BLOCKS + 1, BLOCKS + 2, BLOCKS + 4])) <= budget


def test_where_no_plan_has_room_for_all_blocks_there_is_as_much_as_can_be():
    """A budget that the blocks which run fit, and all of them at their leanest do not."""
    make = partial(wide_stack, 3 * BLOCKS)
    plain = make()
    plain.skipped = set(range(4, 3 * BLOCKS))
    budget = budget_of(plain, 0.45)
    torch._dynamo.reset()
    model = make()
    autoremat.optimize(list(model.blocks), **options(budget))
    skips = [set(range(4, 3 * BLOCKS)), set(range(5, 3 * BLOCKS))] * 3
    assert max(peaks(model, "skipped", skips)) <= budget


def wide_stack(blocks: int) -> Stack:
    """A stack of so many blocks."""
    model = make_seeded(Stack)
    body = type(model.blocks[0])
    model.blocks = nn.ModuleList(body() for _ in range(blocks))
    return model
