"""Blocks that are compiled once and run many times: one budget for all of their runs."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoremat
from autoremat import _torch
from autoremat.backend import session_behind
from autoremat.memory.meter import measure_peak, resident_nbytes
from autoremat.watch.eager_backward import Foreseen, foresee
from autoremat.watch.situations import PARTIAL_LOOKS
from tests.tiny import WIDTH, Chain, many_rows
from tests.training import UNBOUNDED, close, make_seeded, measured, optimized, step

# Dynamo looks at `.grad` of what a block is given.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.shares_plans,
]

BLOCKS = 8
BATCH = many_rows()
STATE = torch.get_rng_state().nbytes  # of a generator, which a checkpoint keeps


class Body(nn.Module):
    """A residual block of operations that cost much and others that cost little."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(nn.functional.gelu(self.wide(self.norm(x)))))


class Stack(nn.Module):
    """Equal blocks between code in eager mode, each `every`-th of them in a checkpoint if asked."""

    def __init__(self, every: int = 0, *, is_reentrant: bool = False) -> None:
        super().__init__()
        self.every, self.is_reentrant = every, is_reentrant
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Body() for _ in range(BLOCKS))
        self.skipped: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            if self.every and number % self.every == 0:
                x = checkpoint(block, x, use_reentrant=self.is_reentrant)
            else:
                x = x if number in self.skipped else block(x)
        return x.square().mean()


class Parts(Stack):
    """Its blocks are of two kinds, in turn."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[::2]:
            block.wide, block.narrow = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class Afterwards(Stack):
    """Code in eager mode takes more than any block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return torch.cat([x] * 8).tanh().square().mean()


def options(budget: int | str, **more: Any) -> dict[str, Any]:
    """For the backend."""
    return {"budget": budget, "compiler": "eager", "verbose": False, "time_limit": 2.0} | more


def blockwise(budget: int | str, make: Callable[[], Stack] = Stack, **more: Any) -> Stack:
    """A stack whose blocks are compiled alone, under one budget."""
    torch._dynamo.reset()
    model, given = make_seeded(make), options(budget, **more)
    for block in model.blocks:
        block.compile(backend="autoremat", options=given)
    return model


def budget_at(share: float) -> int:
    """A share of what a step takes without a plan, above what is resident."""
    model = make_seeded(Stack)
    step(model, (BATCH,))
    highest, resident = measured(model, (BATCH,)), resident_nbytes(model, BATCH)
    return resident + int(share * (highest - resident))


def settle(model: nn.Module, reference: Any) -> None:
    """Steps until nothing changes any more, all with these gradients; the first may be above."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autoremat.OverBudgetWarning)
        for _ in range(4):
            close(reference, step(model, (BATCH,)), 1e-5)


def compiles(model: nn.Module) -> list[int]:
    """How often graphs were compiled, in which step the latest, and how many steps there were."""
    facts = {fact.name: fact.text for fact in autoremat.report(model).facts}
    return list(map(int, re.findall(r"\d+", facts["Compiles"])))


def peak_of(model: nn.Module, batch: Tensor = BATCH) -> int:
    """Measured bytes of one step, from no gradients."""
    model.zero_grad(set_to_none=True)
    resident = resident_nbytes(model, batch)
    return resident + measure_peak(lambda: model(batch).backward(), device="cpu")


@pytest.mark.parametrize("share", [0.7, 0.45])
def test_equal_blocks_keep_one_budget_and_settle(share: float):
    """From the first step on; at the second they get their plans, and nothing is compiled later."""
    reference, budget = step(make_seeded(Stack), (BATCH,)), budget_at(share)
    model = blockwise(budget)
    graphs = _torch.dynamo_counters["stats"]["unique_graphs"]
    for _ in range(3):
        close(reference, step(model, (BATCH,)), 1e-5)
    assert peak_of(model) <= budget
    report = autoremat.report(model.blocks[0])
    assert [graph.name for graph in report.graphs] == ["graph 0", "graph 0, last runs"]
    assert report.is_within_budget
    for _ in range(20):
        step(model, (BATCH,))
    assert compiles(model.blocks[3]) == [3, 2, 24]
    assert _torch.dynamo_counters["stats"]["unique_graphs"] == graphs + 1


@pytest.mark.parametrize("make", [Stack, Parts, Afterwards])
def test_a_report_says_what_all_runs_together_take_without_a_plan(make: Callable[[], Stack]):
    """Before the plan no graph has one: what the others keep then is beside each."""
    plain = blockwise(UNBOUNDED, make, policy="save-all")
    settle(plain, step(make_seeded(make), (BATCH,)))
    of_plain = autoremat.report(plain.blocks[0])
    assert bool(of_plain.eager_peak_nbytes) == (make is Afterwards)
    model = blockwise(budget_at(0.45), make)
    settle(model, step(make_seeded(make), (BATCH,)))
    report = autoremat.report(model.blocks[0])
    assert report.baseline_peak_nbytes == of_plain.predicted_peak_nbytes
    measured_nbytes = peak_of(plain)
    assert 0 <= report.baseline_peak_nbytes - measured_nbytes <= 0.03 * measured_nbytes
    highest = max(graph.baseline_peak_nbytes for graph in report.graphs)
    lines = [max(graph.timeline.baseline_live_nbytes) for graph in report.graphs if graph.timeline]
    assert 0 <= max(lines) - highest <= BATCH.nbytes


def test_blocks_in_checkpoints_keep_what_they_return():
    """What they save is dropped; the backward runs them again, which is no further step."""
    reference = step(make_seeded(Stack), (BATCH,))
    model = blockwise("1GB", partial(Stack, 1))
    for _ in range(3):
        close(reference, step(model, (BATCH,)), 1e-5)
    predicted, highest = autoremat.report(model.blocks[0]).predicted_peak_nbytes, peak_of(model)
    assert highest <= predicted <= highest + STATE
    assert compiles(model.blocks[0])[2] == 4


def test_blocks_in_checkpoints_are_planned_for_what_they_return():
    """A step that is told to be above its budget, and those after it."""
    budget = int(0.95 * peak_of(make_seeded(partial(Stack, 1))))
    model = blockwise(budget, partial(Stack, 1))
    with pytest.warns(autoremat.OverBudgetWarning, match="From the next step on it is planned"):
        step(model, (BATCH,))
    step(model, (BATCH,))
    assert peak_of(model) <= budget


@pytest.mark.parametrize("every", [2, 3])
def test_some_blocks_in_checkpoints_have_the_plan_of_the_others(every: int):
    """A rerun has to save what the first run has saved, so that no run has a plan of its own."""
    budget, reference = budget_at(0.6), step(make_seeded(Stack), (BATCH,))
    model = blockwise(budget, partial(Stack, every))
    for _ in range(4):
        close(reference, step(model, (BATCH,)), 1e-5)
    assert peak_of(model) <= budget
    assert [graph.name for graph in autoremat.report(model.blocks[0]).graphs] == ["graph 0"]


class InRegions(Stack):
    """Checkpoints around several blocks each, and around every `each`-th such group only."""

    def __init__(self, blocks: int, each: int = 1, *, collects: bool = False) -> None:
        super().__init__()
        self.size, self.each, self.collects = blocks, each, collects

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor, first: int) -> list[Tensor]:
            found = []
            for block in self.blocks[first : first + self.size]:
                x = block(x)
                found = [*found, x] if self.collects else [x]
            return found

        x, found = self.stem(x), []
        for number, first in enumerate(range(0, BLOCKS, self.size)):
            is_checkpointed = number % self.each == 0
            *rest, x = (
                checkpoint(run, x, first, use_reentrant=False) if is_checkpointed else run(x, first)
            )
            found += rest
        return sum(x.square().mean() for x in (*found, x))


@pytest.mark.parametrize(
    "make",
    [
        Stack,
        partial(Stack, 1),
        partial(Stack, 3),
        partial(InRegions, 2),
        partial(InRegions, 4, 2),
        partial(InRegions, BLOCKS),
    ],
)
@pytest.mark.parametrize("share", [1.1, 0.85])
def test_blocks_in_checkpoints_are_predicted_to_the_byte(make: Callable[[], Stack], share: float):
    """A region of several runs holds in its backward what each of them saves."""
    reference, budget = step(make_seeded(make), (BATCH,)), int(share * peak_of(make_seeded(make)))
    model = blockwise(budget, make)
    settle(model, reference)
    report, highest = autoremat.report(model.blocks[0]), peak_of(model)
    assert highest <= report.predicted_peak_nbytes <= highest + STATE
    assert highest <= max(budget, int(1.02 * peak_of(blockwise_at_least(make))))


class Mixed(Stack):
    """Each two blocks in a checkpoint, with code in eager mode before, between and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.mixes = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor, first: int) -> Tensor:
            for number in (first, first + 1):
                x = self.blocks[number](torch.exp(torch.sin(x)))
            return torch.tanh(self.mixes[first](x))

        x = self.stem(x)
        for first in range(0, BLOCKS, 2):
            x = checkpoint(run, x, first, use_reentrant=False)
        return x.square().mean()


@pytest.mark.parametrize("share", [1.1, 0.85])
def test_code_in_eager_mode_in_checkpoints_counts(share: float):
    """What it saves cannot be seen before a region has run again, and is known from then on."""
    reference, budget = step(make_seeded(Mixed), (BATCH,)), int(share * peak_of(make_seeded(Mixed)))
    model = blockwise(budget, Mixed)
    settle(model, reference)
    report, highest = autoremat.report(model.blocks[0]), peak_of(model)
    assert highest <= report.predicted_peak_nbytes <= 1.01 * highest
    assert highest <= budget


class Varying(Stack):
    """Beside its blocks a checkpoint whose sizes are new in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.rand(100))
        self.length = 0

    def forward(self, x: Tensor) -> Tensor:
        def run(weights: Tensor, length: int) -> Tensor:
            return weights[:length].exp().sum()

        self.length += 1
        x = self.stem(x) + checkpoint(run, self.weights, self.length, use_reentrant=False)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_looks_at_checkpoints_whose_sizes_vary_become_rare(monkeypatch: pytest.MonkeyPatch):
    """Each step has what was never seen, and steps that are all alike cost nothing at last."""
    looks: list[int] = []

    def note(*args: Any, **options: Any) -> Foreseen:
        looks.append(model.length)
        return foresee(*args, **options)

    monkeypatch.setattr("autoremat.watch.audit.foresee", note)
    model = blockwise(UNBOUNDED, Varying)
    after(model, 32)
    alike = [1, 2, 4, 8, 16, 32]  # in steps that leave nothing unseen
    assert len(alike) < len(looks) <= len(alike) + PARTIAL_LOOKS
    assert sum(16 < step < 32 for step in looks) <= 1


class Within(Stack):
    """Each block in a checkpoint, and groups of four of these in one."""

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor, first: int) -> Tensor:
            for block in self.blocks[first : first + 4]:
                x = checkpoint(block, x, use_reentrant=False)
            return x

        x = self.stem(x)
        for first in range(0, BLOCKS, 4):
            x = checkpoint(run, x, first, use_reentrant=False)
        return x.square().mean()


def test_what_goes_into_checkpoints_within_checkpoints_is_there_again_together():
    """As soon as the outer one runs again; states of generators that inner ones keep are not."""
    model = after(blockwise(UNBOUNDED, Within), 3)
    predicted, highest = autoremat.report(model.blocks[0]).predicted_peak_nbytes, peak_of(model)
    assert highest - BLOCKS * STATE <= predicted <= highest + STATE


class Recurrent(Stack):
    """Before every other block an LSTM, whose result is laid out in another way than a block's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).unflatten(0, (8, -1))
        for number, (block, layer) in enumerate(zip(self.blocks, self.layers, strict=True)):
            x = block(layer(x)[0] if number % 2 else x)
        return x.square().mean()


def test_another_layout_is_no_other_size():
    """A graph whose strides vary is planned for what code in eager mode takes beside it."""
    reference = step(make_seeded(Recurrent), (BATCH,))
    budget = int(0.8 * peak_of(make_seeded(Recurrent)))
    model = blockwise(budget, Recurrent)
    settle(model, reference)
    assert peak_of(model) <= budget


def test_what_blocks_in_a_checkpoint_return_waits_if_it_is_collected():
    """What eager code saves of it counts besides: predicted a little too high."""
    make = partial(InRegions, 4, collects=True)
    model = after(blockwise(UNBOUNDED, make), 3)
    predicted, highest = autoremat.report(model.blocks[0]).predicted_peak_nbytes, peak_of(model)
    assert highest <= predicted <= 1.15 * highest


def blockwise_at_least(make: Callable[[], Stack]) -> Stack:
    """The leanest that there is, after it has settled."""
    return after(blockwise("min", make), 3)


def test_checkpoints_that_come_and_go_save_what_their_reruns_save():
    """All runs in them go by one plan, also where others have one of their own."""
    reference, budget = step(make_seeded(Stack), (BATCH,)), budget_at(0.6)
    model = blockwise(budget)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autoremat.OverBudgetWarning)
        for every in (0, 0, 1, 0, 2, 1):
            model.every = every
            close(reference, step(model, (BATCH,)), 1e-5)


def test_a_backward_may_begin_at_a_parameter_too():
    """As of losses that weigh each other."""
    model, weight = blockwise(UNBOUNDED, strict=True), nn.Parameter(torch.zeros(()))
    for _ in range(3):
        torch.autograd.backward([model(BATCH), weight])
    assert weight.grad == 3


class Head(nn.Module):
    """A loss, and what it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 2000)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        results = self.wide(x)
        return results.logsumexp(-1).mean(), results


class Holding(Stack):
    """Its last graph returns much, which the caller holds while the others go backward."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Head()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_results_that_the_caller_holds_are_beside_earlier_graphs():
    """All of the step: what of its backwards comes first, and what waits for the others."""
    torch._dynamo.reset()
    model, given = make_seeded(Holding), options(UNBOUNDED)
    for block in (*model.blocks, model.head):
        block.compile(backend="autoremat", options=given)

    def take() -> None:
        loss, results = model(BATCH)
        loss.backward()
        del results

    for _ in range(4):
        take()
        model.zero_grad(set_to_none=True)
    highest = resident_nbytes(model, BATCH) + measure_peak(take, device="cpu")
    assert highest <= autoremat.report(model.head).predicted_peak_nbytes <= 1.1 * highest


def test_what_reentrant_checkpoints_keep_counts():
    """Their forwards have no gradients, but their results wait, and the gradients of these."""
    reference = step(make_seeded(Stack), (BATCH,))
    model = blockwise("1GB", partial(Stack, 1, is_reentrant=True))
    for _ in range(3):
        close(reference, step(model, (BATCH,)), 1e-5)
    predicted, highest = autoremat.report(model.blocks[0]).predicted_peak_nbytes, peak_of(model)
    assert abs(predicted - highest) <= 0.01 * highest


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("through", ["optimize", "backend"])
def test_blocks_in_reentrant_checkpoints_keep_the_budget(every: int, through: str):
    """Their reruns are parts of the step, however many there are, and the report is of all."""
    make = partial(Stack, every, is_reentrant=True)
    budget, reference = int(0.92 * peak_of(make_seeded(make))), step(make_seeded(Stack), (BATCH,))
    model = blockwise(budget, make)
    if through == "optimize":
        model = make_seeded(make)
        autoremat.optimize(list(model.blocks), **options(budget))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autoremat.OverBudgetWarning)  # of the first step
        for _ in range(5):
            close(reference, step(model, (BATCH,)), 1e-5)
    report, highest = autoremat.report(model.blocks[0]), peak_of(model)
    assert highest <= budget
    assert 0.99 * highest <= report.predicted_peak_nbytes <= 1.15 * highest
    assert compiles(model.blocks[0])[2] == 6


class Uneven(Stack):
    """A large block that runs in a reentrant checkpoint only, between small ones that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].wide = nn.Linear(WIDTH, 16 * WIDTH)
        self.blocks[1].narrow = nn.Linear(16 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.blocks[1], self.blocks[0](self.stem(x)), use_reentrant=True)
        for block in self.blocks[2:]:
            x = block(x[:16])
        return x.square().mean()


def test_a_graph_that_runs_in_reentrant_checkpoints_alone_is_planned_too():
    """The longest part of the step is not the one that takes the most."""
    plain = make_seeded(Uneven)
    reference = step(plain, (BATCH,))
    budget = int(0.85 * peak_of(plain))
    model = blockwise(budget, Uneven)
    with warnings.catch_warnings():  # predicted too high: what is beside one part may be in another
        warnings.simplefilter("ignore", autoremat.OverBudgetWarning)
        for _ in range(4):
            close(reference, step(model, (BATCH,)), 1e-5)
    report = autoremat.report(model.blocks[0])
    assert peak_of(model) <= min(budget, report.predicted_peak_nbytes)
    assert len(report.graphs) == 3


@pytest.mark.thorough
@pytest.mark.parametrize("order", [(0, 1), (0, 1, 1), (1, 0, 0)])
def test_steps_with_and_without_reruns_are_told_apart(order: tuple[int, ...]):
    """In turn: with every block in a reentrant checkpoint, and with none."""
    model = blockwise(UNBOUNDED, partial(Stack, is_reentrant=True))
    for every in 4 * order:
        model.every = every
        step(model, (BATCH,))
    assert compiles(model.blocks[0])[2] == 4 * len(order)


class Nested(Stack):
    """Blocks in reentrant checkpoints, each half of them in one of its own."""

    def forward(self, x: Tensor) -> Tensor:
        def half(x: Tensor, first: int) -> Tensor:
            for block in self.blocks[first : first + BLOCKS // 2]:
                x = checkpoint(block, x, use_reentrant=True)
            return x

        x = checkpoint(half, self.stem(x), 0, use_reentrant=True)
        return checkpoint(half, x, BLOCKS // 2, use_reentrant=True).square().mean()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_reruns_inside_of_reruns_are_of_one_step():
    """However deep: the outermost backward is the step's."""
    reference, model = step(make_seeded(Stack), (BATCH,)), blockwise(UNBOUNDED, Nested)
    for _ in range(4):
        close(reference, step(model, (BATCH,)), 1e-5)
    highest = peak_of(model)
    assert compiles(model.blocks[0])[2] == 5
    assert autoremat.report(model.blocks[0]).predicted_peak_nbytes >= 0.97 * highest


@pytest.mark.thorough
def test_a_batch_that_grows_between_reruns_is_told_of():
    """What waits for them is looked at again."""
    small, model = BATCH[:128].clone(), make_seeded(partial(Stack, 1, is_reentrant=True))
    step(model, (small,))
    budget = int(1.1 * peak_of(model, small))
    for block in model.blocks:
        block.compile(backend="autoremat", options=options(budget), dynamic=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autoremat.OverBudgetWarning)  # of the first step
        for _ in range(4):
            step(model, (small,))
    with pytest.warns(autoremat.OverBudgetWarning):
        step(model, (BATCH,))


def test_a_list_of_equal_blocks_is_planned_and_compiled_once():
    """Whatever the number of blocks; what one hands to the next counts once."""
    torch._dynamo.reset()
    budget, model = budget_at(0.7), make_seeded(Stack)
    autoremat.optimize(list(model.blocks), **options(budget), strict=True)
    for _ in range(3):
        step(model, (BATCH,))
    report = autoremat.report(model.blocks[0])
    assert report.predicted_peak_nbytes <= 1.03 * peak_of(model)
    assert peak_of(model) <= budget
    assert len(report.graphs) == 2
    assert compiles(model.blocks[0])[:2] == [3, 2]


def test_a_report_of_accumulated_gradients_is_of_the_highest_backward():
    """Of those of one step; the first is lower, since gradients do not exist yet."""
    budget = budget_at(0.6)
    model = blockwise(budget)

    def take() -> None:
        for _ in range(3):
            model(BATCH).backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autoremat.OverBudgetWarning)
        for _ in range(6):
            take()
            model.zero_grad(set_to_none=True)
    resident = resident_nbytes(model, BATCH)
    peak = resident + measure_peak(take, device="cpu")
    assert peak <= autoremat.report(model.blocks[0]).predicted_peak_nbytes <= 1.03 * peak
    assert peak <= budget


class Cast(Stack):
    """Its blocks see neither the batch, which is cast before them, nor what else it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.unread = nn.Parameter(torch.zeros(100_000))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double())


@pytest.mark.parametrize("through", ["optimize", "backend"])
def test_what_no_block_sees_counts_beside_them(through: str):
    """The batch that the caller holds, and parameters of the module around them."""
    plain = after(make_seeded(Cast))
    highest, resident = peak_of(plain), resident_nbytes(plain, BATCH)
    budget = resident + int(0.6 * (highest - resident))
    torch._dynamo.reset()
    model, given = make_seeded(Cast), options(budget)
    if through == "optimize":
        autoremat.optimize(list(model.blocks), **given)
    else:
        for block in model.blocks:
            block.compile(backend="autoremat", options=given)
    after(model, 3)
    assert 0.97 * autoremat.report(model.blocks[0]).predicted_peak_nbytes <= peak_of(model)
    assert peak_of(model) <= budget


@pytest.mark.parametrize("through", ["optimize", "backend"])
def test_as_little_as_can_be_is_said_of_all_runs(through: str):
    """Not of each block alone, whose own peak is least where all keep what they can."""
    model, lean = blockwise("min"), budget_at(0.4)
    if through == "optimize":
        model = make_seeded(Stack)
        autoremat.optimize(list(model.blocks), **options("min"))
    for _ in range(3):
        step(model, (BATCH,))
    assert peak_of(model) <= lean
    assert compiles(model.blocks[0])[1:] == [2, 4]


class Repeated(Stack):
    """One block that runs eight times: its runs share all parameters, and their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0]] * BLOCKS)


class Tied(Stack):
    """A large matrix that the first and the last graph read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(3000, WIDTH) / 100)

    def forward(self, x: Tensor) -> Tensor:
        x = x + (x @ self.table[:WIDTH].T).tanh()
        torch._dynamo.graph_break()
        x = super().forward(x)[None]
        torch._dynamo.graph_break()
        return (x * self.table.mean(0)).sum()


@pytest.mark.parametrize("make", [Repeated, Tied])
def test_a_gradient_that_several_runs_return_counts_once(make: Callable[[], Stack]):
    """To the first one that comes, later ones are added."""
    model, batch = make_seeded(make), BATCH[:8].clone()
    planned = model.blocks[0] if make is Repeated else model
    autoremat.optimize(planned, **options(UNBOUNDED))
    for _ in range(3):
        step(model, (batch,))
    predicted = autoremat.report(planned).predicted_peak_nbytes
    assert peak_of(model, batch) <= predicted <= 1.05 * peak_of(model, batch)


@pytest.mark.filterwarnings("ignore::autoremat.OverBudgetWarning")
def test_no_budget_leads_to_a_leaner_step_than_as_little_as_can_be():
    """Nor does one below it, which the leanest step exceeds by as little."""
    peaks = []
    for budget in ("min", budget_at(0.2), budget_at(0.1)):
        model = blockwise(budget)
        for _ in range(3):
            step(model, (BATCH,))
        peaks.append(peak_of(model))
    assert peaks[0] <= 1.02 * min(peaks)
    assert peaks[0] < budget_at(0.25)


@pytest.mark.parametrize("is_evaluated", [False, True])
def test_equal_mappings_of_one_step_are_one(is_evaluated: bool):
    """Written anew for each block: one budget, also where nothing was planned in a first call."""
    budget, model = budget_at(0.45), blockwise(UNBOUNDED)
    for block in model.blocks:
        block.compile(backend="autoremat", options=options(budget))
    if is_evaluated:
        with torch.no_grad():
            model(BATCH)
    for _ in range(3):
        step(model, (BATCH,))
    assert peak_of(model) <= budget
    assert len({session_behind(block.parameters()) for block in model.blocks}) == 1
    assert compiles(model.blocks[0]) == [3, 2, 4]


def test_equal_mappings_of_two_trainings_are_two():
    """Models that are never in one step have nothing to share."""
    torch._dynamo.reset()
    models = [make_seeded(Stack), make_seeded(Chain)]
    for model in models:
        model.compile(backend="autoremat", options=options(UNBOUNDED))
        step(model, (BATCH,))
    assert len({session_behind(model.parameters()) for model in models}) == 2


def times_of(model: nn.Module) -> tuple[float, float]:
    """Microseconds that the runs of all graphs take by their plans, and without recompute."""
    session = session_behind(model.parameters())
    assert session is not None
    report = session.report()
    runs = Counter(session.steps.graphs.runs)
    planned, plain = (
        sum(runs[graph.name] * time_of(graph) for graph in report.graphs)
        for time_of in (lambda graph: graph.predicted_time_us, lambda graph: graph.baseline_time_us)
    )
    return planned, plain


@pytest.mark.thorough
@pytest.mark.parametrize("share", [0.7, 0.45])
def test_two_plans_of_a_block_are_as_fast_as_one_plan_of_the_model(share: float):
    """What recompute costs is within 2 % of the time that a whole model takes at the budget."""
    budget = budget_at(share)
    whole = autoremat.report(after(optimized(Stack, budget, time_limit=20.0))).graphs[0]
    planned_us, plain_us = times_of(after(blockwise(budget, time_limit=20.0), 3))
    more_us = whole.predicted_time_us - whole.baseline_time_us
    assert planned_us - plain_us <= more_us + 0.02 * whole.predicted_time_us


def after(model: nn.Module, steps: int = 1) -> nn.Module:
    """A model that has run so many steps."""
    for _ in range(steps):
        step(model, (BATCH,))
    return model


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["optimize", "backend"])
def test_a_block_and_its_parent_are_both_optimised(how: str):
    """The inner one is planned by itself beside the rest, and gradients are right."""
    reference, budget = step(make_seeded(Stack), (BATCH,)), budget_at(0.9)
    torch._dynamo.reset()
    model = make_seeded(Stack)
    for module in (model.blocks[2], model):
        if how == "optimize":
            autoremat.optimize(module, **options(budget))
        else:
            module.compile(backend="autoremat", options=options(budget))
    for _ in range(3):
        close(reference, step(model, (BATCH,)), 1e-5)
    assert peak_of(model) <= budget


class Parted(Body):
    """With a graph break inside."""

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.gelu(self.wide(self.norm(x)))
        torch._dynamo.graph_break()
        return x + self.narrow(torch.tanh(h))


class PartedStack(Stack):
    """Dynamo cannot take one of its blocks as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Parted(), Body()])


def test_a_block_with_a_graph_break_is_one_with_its_optimised_parent():
    """As one without: its graphs are the parent's, and nobody is told of eager mode."""
    reference = step(make_seeded(PartedStack), (BATCH,))
    torch._dynamo.reset()
    model = make_seeded(PartedStack)
    for module in (*model.blocks, model):
        autoremat.optimize(module, **options(UNBOUNDED))
    close(reference, step(model, (BATCH,)), 1e-5)
    report = autoremat.report(model)
    assert len(report.graphs) > 1
    assert not report.fallbacks


@pytest.mark.thorough
def test_sizes_that_change_between_steps_keep_the_budget():
    """A graph with symbolic sizes has two plans as well; its second compile asks for no guard."""
    budget, plain = budget_at(0.6), make_seeded(Stack)
    model = blockwise(budget)
    for rows in (256, 192, 256, 224, 256, 192, 256):
        batch = BATCH[:rows]
        close(step(plain, (batch,)), step(model, (batch,)), 1e-5)
    assert peak_of(model) <= budget
    assert not autoremat.report(model).fallbacks


def test_a_step_is_planned_anew_under_the_options_for_inductor(monkeypatch: pytest.MonkeyPatch):
    """The code that is read between two steps is the code that is compiled then."""
    seen: list[tuple[int, bool, bool]] = []
    config: Any = torch._inductor.config

    def plan_anew(*_: object) -> dict[str, Any]:
        has_limit = config._pre_fusion_custom_pass is not None
        seen.append((config.realize_opcount_threshold, has_limit, config.cpp.enable_loop_tail_vec))
        return {}

    monkeypatch.setattr("autoremat.session.session.plan_anew", plan_anew)
    model = blockwise(budget_at(0.6), realize_opcount_threshold=7)
    for _ in range(2):
        step(model, (BATCH,))
    assert seen == [(7, True, False)]


@pytest.mark.thorough
def test_blocks_of_different_shapes_under_one_class_share_the_budget():
    """Each shape has plans of its own."""

    def make() -> Stack:
        model = make_seeded(Stack)
        for number, block in enumerate(model.blocks):
            inner = WIDTH * (2, 4, 6)[number % 3]
            block.wide, block.narrow = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        return model

    torch.manual_seed(0)
    plain = make()
    reference = step(plain, (BATCH,))
    resident = resident_nbytes(plain, BATCH)
    budget = resident + int(0.6 * (measured(plain, (BATCH,)) - resident))
    torch.manual_seed(0)
    model = make()
    autoremat.optimize(list(model.blocks), **options(budget))
    for _ in range(3):
        close(reference, step(model, (BATCH,)), 1e-5)
    assert peak_of(model) <= budget


@pytest.mark.thorough
@pytest.mark.parametrize("blocks_apart", [False, True])
def test_a_model_that_moves_to_another_precision_is_planned_anew(blocks_apart: bool):
    """After it was planned and has trained; gradients are those of the precision it has now."""
    torch._dynamo.reset()
    budget, model, plain = budget_at(1.3), make_seeded(Stack), make_seeded(Stack).double()
    autoremat.optimize(list(model.blocks) if blocks_apart else model, **options(budget))
    for _ in range(2):
        step(model, (BATCH,))
    model.double()
    for _ in range(3):
        close(step(plain, (BATCH.double(),)), step(model, (BATCH.double(),)), 1e-12)
    assert peak_of(model, BATCH.double()) <= budget


@pytest.mark.thorough
@pytest.mark.inductor
def test_inductor_compiles_a_block_again():
    """Gradients are eager's, and generated code keeps the budget with two plans of one block."""
    reference, budget = step(make_seeded(Stack), (BATCH,)), budget_at(0.6)
    model = blockwise(budget, compiler="inductor")
    for _ in range(3):
        close(reference, step(model, (BATCH,)), 1e-5)
    assert peak_of(model) <= budget
    assert compiles(model)[:2] == [3, 2]


def test_a_block_that_cannot_be_compiled_again_keeps_its_plan(monkeypatch: pytest.MonkeyPatch):
    """AR116: the step goes on under the plan that it has."""
    reference, model = step(make_seeded(Stack), (BATCH,)), blockwise(budget_at(0.6))
    step(model, (BATCH,))

    def fails(*_: object, **_keywords: object) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr("autoremat.session.code.Written.partition", fails)
    with pytest.warns(autoremat.FallbackWarning, match=r"AR116: graph 0 keeps .* no luck"):
        close(reference, step(model, (BATCH,)), 1e-5)
    assert compiles(model)[0] == 1
    assert peak_of(model) <= autoremat.report(model).predicted_peak_nbytes


@pytest.mark.thorough
@pytest.mark.inductor
def test_blocks_compiled_by_the_backend_s_name_share_the_budget_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
):
    """As trainers do it that know nothing of options."""
    reference, budget = step(make_seeded(Stack), (BATCH,)), budget_at(0.6)
    torch._dynamo.reset()
    monkeypatch.setenv("AUTOREMAT_BUDGET", str(budget))
    model = make_seeded(Stack)
    for block in model.blocks:
        block.compile(backend="autoremat", fullgraph=True)
    for _ in range(3):
        close(reference, step(model, (BATCH,)), 1e-4)
    assert peak_of(model) <= budget
    assert autoremat.report(model.blocks[0]).budget_nbytes == budget
