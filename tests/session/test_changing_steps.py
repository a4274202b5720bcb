"""Steps that differ in more than how many blocks run: within the budget, and most of it is used.

Gradients that are accumulated while blocks are skipped, what is found only later, kinds of blocks
that come later or in turn, lists of blocks that grow, and models that train in turn.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat.memory.meter import measure_peak, resident_nbytes
from autoremat.planning.repeats import STEADY
from tests.session.test_blocks import BATCH, BLOCKS, Body, Stack, compiles, options
from tests.tiny import WIDTH
from tests.training import close, make_seeded, step

# Dynamo looks at `.grad` of what a block is given.
pytestmark = [
    pytest.mark.shares_plans,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

Take = Callable[[nn.Module], object]
Skipped = Sequence[set[int]]  # blocks, by micro-batch
NONE: set[int] = set()


def accumulated(skipped: Skipped, optimizers: Sequence[torch.optim.Optimizer] = ()) -> Take:
    """A step of micro-batches that skip blocks."""

    def take(model: nn.Module) -> None:
        for model.skipped in skipped:
            model(BATCH).backward()
        for optimizer in optimizers:
            optimizer.step()

    return take


def random_skips(seed: int, steps: int, micro_batches: int) -> list[Skipped]:
    """From none to all but one block."""
    numbers = random.Random(seed)
    return [
        [set(numbers.sample(range(BLOCKS), numbers.randint(0, BLOCKS - 1))) for _ in range(calls)]
        for calls in [micro_batches] * steps
    ]


def measured(model: nn.Module, take: Take, optimizers: Sequence[torch.optim.Optimizer] = ()) -> int:
    """Bytes of a step that begins without gradients."""
    model.zero_grad(set_to_none=True)
    resident = resident_nbytes(model, BATCH, *optimizers)
    return resident + measure_peak(lambda: take(model), device="cpu")


def budget_for(make: Callable[[], nn.Module], take: Take, share: float) -> int:
    """A share of what a step takes without a plan, above what is resident."""
    plain = make_seeded(make)
    take(plain)
    plain.zero_grad(set_to_none=True)
    resident = resident_nbytes(plain, BATCH)
    return resident + int(share * (measured(plain, take) - resident))


def under(budget: int, model: nn.Module, blocks: Iterable[nn.Module], how: str) -> nn.Module:
    """A model whose blocks share a budget."""
    torch._dynamo.reset()
    if how == "optimize":
        autoremat.optimize(list(blocks), **options(budget))
    else:
        given = options(budget)
        for block in blocks:
            block.compile(backend="autoremat", options=given)
    return model


def run(model: nn.Module, takes: Iterable[Take]) -> None:
    """Steps in which a kind is planned for the first time: nobody can measure their memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autoremat.OverBudgetWarning)
        for take in takes:
            take(model)
            model.zero_grad(set_to_none=True)


def peaks(model: nn.Module, takes: Iterable[Take]) -> list[int]:
    """Measured bytes of these steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autoremat.OverBudgetWarning)
        return [measured(model, take) for take in takes]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_accumulated_gradients_of_skipped_blocks(seed: int):
    """Which plan is taken depends on what may run, not on what the latest step ran."""
    whole = [NONE, NONE]
    budget = budget_for(Stack, accumulated(whole), 0.5)
    model = under(budget, stack := make_seeded(Stack), stack.blocks, "optimize")
    first, *later = map(accumulated, [*random_skips(seed, 8, 2), whole])
    first(model)
    assert max(peaks(model, later)) <= budget


@pytest.mark.parametrize(
    "share", [0.9, *(pytest.param(s, marks=pytest.mark.thorough) for s in (0.5, 0.7))]
)
def test_gradients_that_a_backend_finds_later(share: float):
    """Beside as many runs as there may be, however few there were when they were found."""
    whole = [NONE, NONE]
    budget = budget_for(Stack, accumulated(whole), share)
    model = under(budget, stack := make_seeded(Stack), stack.blocks, "backend")
    before, after = random_skips(0, 6, 1), random_skips(0, 6, 2)
    first, *later = map(accumulated, [*before, *after, whole])
    first(model)
    assert max(peaks(model, later)) <= budget


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["optimize", "backend"])
def test_an_optimizer_that_is_found_later(how: str):
    """As few blocks run."""
    model, plain = make_seeded(Stack), make_seeded(Stack)
    adam, plains = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(plain.parameters())
    whole = accumulated([NONE], [plains])
    whole(plain)
    budget = int(0.6 * measured(plain, whole, [plains]))
    under(budget, model, model.blocks, how)
    before, after = random_skips(0, 4, 1), random_skips(1, 6, 1)
    first, *later = map(accumulated, before)
    first(model)
    found = peaks(model, later)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autoremat.OverBudgetWarning)
        for skipped in (*after, [NONE]):
            found.append(measured(model, accumulated(skipped, [adam]), [adam]))
    assert max(found) <= budget


class TwoKinds(Stack):
    """Blocks of two kinds, of which each step runs some."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.ModuleList(Body() for _ in range(BLOCKS))
        for block in self.others:
            block.wide, block.narrow = nn.Linear(WIDTH, 6 * WIDTH), nn.Linear(6 * WIDTH, WIDTH)
        self.run = (0, 0)  # of each kind

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in (*self.blocks[: self.run[0]], *self.others[: self.run[1]]):
            x = block(x)
        return x.square().mean()


def running(ones: int, others: int) -> Take:
    """A step that runs so many blocks of each kind."""

    def take(model: nn.Module) -> None:
        model.run = ones, others
        model(BATCH).backward()

    return take


def two_kinds(budget: int, how: str) -> nn.Module:
    """Both share a budget."""
    model = make_seeded(TwoKinds)
    under(budget, model, [*model.blocks, *model.others], how)
    return model


@pytest.mark.parametrize("how", ["optimize", "backend"])
def test_a_kind_of_blocks_that_no_long_step_had(how: str):
    """All of both kinds may run once both are known, though no step has had both."""
    steps = [(8, 0), (8, 0), (0, 4), (0, 4), (8, 4), (8, 8), (8, 8)]
    budget = budget_for(TwoKinds, running(8, 8), 0.5)
    model = two_kinds(budget, how)
    takes = [running(*pair) for pair in steps]
    run(model, takes[:3])
    found = peaks(model, takes[3:])
    assert max(found) <= budget
    assert found[-1] > 0.9 * budget


@pytest.mark.parametrize("share", [0.6, pytest.param(0.3, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("how", ["optimize", "backend"])
def test_kinds_of_blocks_in_turn_use_the_budget(how: str, share: float):
    """Each step is planned for what it runs, once many have shown that they stay apart.

    Or at once, where no plans have room for a step that runs all of both.
    """
    ones, others = running(8, 0), running(0, 8)
    budget = budget_for(TwoKinds, others, share)
    model = two_kinds(budget, how)
    run(model, [ones, others])
    found = peaks(model, [ones, others] * (STEADY // 2 + 2))
    assert max(found) <= budget
    assert min(found[-2:]) > 0.85 * budget
    compiled = compiles(model.blocks[0])
    peaks(model, [ones, others] * 2)
    assert compiles(model.blocks[0])[0] == compiled[0]


def test_plans_of_changing_steps_have_the_gradients_of_eager_mode():
    """Whichever plan a run gets."""
    plain = make_seeded(TwoKinds)
    model = two_kinds(budget_for(TwoKinds, running(8, 8), 0.5), "optimize")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autoremat.OverBudgetWarning)
        for pair in [(8, 0), (0, 8), (8, 0), (2, 3), (8, 8), (8, 8), (0, 8)]:
            plain.run = model.run = pair
            close(step(plain, (BATCH,)), step(model, (BATCH,)), 1e-5)


@pytest.mark.parametrize(
    "share", [0.5, *(pytest.param(s, marks=pytest.mark.thorough) for s in (0.7, 0.9))]
)
def test_a_list_of_blocks_that_grows(share: float):
    """What is new has room in its first step; nothing is left for more than there are."""
    budget = budget_for(Stack, accumulated([NONE]), share)
    model, given = make_seeded(Stack), options(budget)
    model.blocks = model.blocks[:4]
    under(budget, model, [], "backend")
    for block in model.blocks:
        block.compile(backend="autoremat", options=given)
    accumulated([NONE])(model)
    found = []
    for _ in range(4, BLOCKS):
        found += peaks(model, [accumulated([NONE])] * 2)
        block = Body()
        block.compile(backend="autoremat", options=given)
        model.blocks.append(block)
    found += peaks(model, [accumulated([NONE])] * 3)
    assert max(found) <= budget
    assert found[-1] > 0.9 * budget


class Whole(nn.Module):
    """A model of blocks with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Body() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize(
    "share", [0.5, *(pytest.param(s, marks=pytest.mark.thorough) for s in (0.7, 0.9))]
)
def test_models_that_train_in_turn_use_the_budget(share: float):
    """From the third step on, when each has run by itself; a step that runs both is within it."""
    models = nn.ModuleList([make_seeded(Whole), make_seeded(Whole)])

    def one(number: int) -> Take:
        return lambda models: models[number](BATCH).backward()

    resident = resident_nbytes(models, BATCH)
    budget = resident + int(share * (measured(models, one(0)) - resident))
    models.zero_grad(set_to_none=True)
    torch._dynamo.reset()
    autoremat.optimize(list(models), **options(budget))
    one(0)(models)
    found = peaks(models, [one(1), one(0), one(1), one(0)])
    assert max(found) <= budget
    assert min(found[1:]) > 0.9 * budget


def test_a_report_of_a_block_that_was_skipped():
    """It is that of its graph, which another block has run; of another kind there is none."""
    model, given = make_seeded(TwoKinds), options("1GB")
    under(0, model, [], "backend")
    for block in (*model.blocks, *model.others):
        block.compile(backend="autoremat", options=given)
    running(3, 0)(model)
    asked: dict[str, Any] = {
        name: autoremat.report(block) for name, block in model.blocks.named_children()
    }
    assert len(asked) == BLOCKS
    assert {report.graphs[0].name for report in asked.values()} == {"graph 0"}
    with pytest.raises(ValueError, match="has run in no training step"):
        autoremat.report(model.others[0])


class BehindAnother(nn.Module):
    """A head that is planned, behind layers in eager mode of which none run at first."""

    def __init__(self) -> None:
        super().__init__()
        self.eager = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.head = Body()
        self.run = 0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.eager[0].weight)
        for layer in self.eager[: self.run]:
            x = torch.tanh(layer(x))
        return self.head(x).square().mean()


@pytest.mark.parametrize("how", ["optimize", "backend"])
def test_eager_code_that_comes_before_a_graph_later_is_told_of_in_that_step(how: str):
    """Its backward begins as all before it did, and goes through the same graph."""
    budget = budget_for(BehindAnother, lambda model: model(BATCH).backward(), 1.1)
    model = make_seeded(BehindAnother)
    under(budget, model, [model.head], how)
    with warnings.catch_warnings():
        warnings.simplefilter("error", autoremat.OverBudgetWarning)
        for _ in range(5):  # the next would be looked into for its number alone if it were the 8th
            model(BATCH).backward()
            model.zero_grad(set_to_none=True)
    model.run = BLOCKS
    with pytest.warns(autoremat.OverBudgetWarning):
        model(BATCH).backward()
