"""What a step holds beside a planned graph is known, and never passed over in silence."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoremat
from autoremat.backend import autoremat as backend
from autoremat.memory.meter import measure_peak, resident_nbytes
from autoremat.memory.storage_sizes import storage_identities
from autoremat.watch import ledger
from autoremat.watch.ledger import open_runs, returned_storages
from tests.tiny import WIDTH, Chain, many_rows
from tests.training import UNBOUNDED, make_seeded, optimized, step, unbounded
from tests.training import told as told_during

# Dynamo looks at `.grad` of what it resumes with after a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

CPU = torch.device("cpu")
BATCH, OTHER = many_rows(), many_rows()
Step = Callable[[nn.Module], object]


def whole_peak(model: nn.Module, take: Step, *held: Any) -> int:
    """Measured bytes of a step, with what is there before it."""
    model.zero_grad(set_to_none=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autoremat.OverBudgetWarning)
        return resident_nbytes(model, held) + measure_peak(lambda: take(model), device="cpu")


def told(model: nn.Module, take: Step, steps: int = 1) -> list[autoremat.OverBudgetWarning]:
    """What is said of the budget in some steps, each from no gradients."""

    def run() -> None:
        for _ in range(steps):
            model.zero_grad(set_to_none=True)
            take(model)

    return told_during(run)


# --- runs that are open ------------------------------------------------------------------------


def test_a_run_is_open_from_its_forward_to_its_backward():
    """And it holds what its plan says."""
    model = optimized(Chain, UNBOUNDED)
    step(model, (many_rows(),))
    loss = model(many_rows())
    (run,) = open_runs(CPU)
    assert run.held_nbytes > 5 * many_rows().nbytes
    loss.backward()
    assert not open_runs(CPU)


def test_a_backward_that_never_comes_closes_its_run_with_the_graph():
    """What nobody can reach is free again."""
    model = optimized(Chain, UNBOUNDED)
    loss = model(many_rows())
    assert len(open_runs(CPU)) == 1
    del loss
    gc.collect()
    assert not open_runs(CPU)


def test_a_backward_that_keeps_its_graph_leaves_the_run_open():
    """Until the one that does not."""
    model = make_seeded(Chain)
    autoremat.optimize(model, UNBOUNDED, compiler="eager", verbose=False)
    with torch._functorch.config.patch(donated_buffer=False):
        loss = model(many_rows())
        loss.backward(retain_graph=True)
        assert len(open_runs(CPU)) == 1
        loss.backward()
    assert not open_runs(CPU)


def test_no_run_is_open_without_a_gradient():
    """Under `no_grad`, in evaluation, and while a step's forward is compiled."""
    model = optimized(Chain, UNBOUNDED)
    with torch.no_grad():
        model(many_rows())
    assert not open_runs(CPU)


def test_what_a_run_returned_is_known_as_long_as_somebody_holds_it():
    """`out` of the step before is still there while the next one's forward runs."""

    class Predicts(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.layers[0](x))

    model = optimized(Predicts, UNBOUNDED)
    out = model(many_rows())
    out.sum().backward()
    assert sum(nbytes for _, nbytes in returned_storages(CPU)) == out.nbytes
    del out
    assert not [*returned_storages(CPU)]


def test_what_a_run_returns_is_beside_others_once_it_is_over():
    """Until then it counts with that run, or with a later one that returns it again."""

    class Predicts(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.layers[0](x))

    out = optimized(Predicts, UNBOUNDED)(many_rows())
    (run,) = open_runs(CPU)
    owner = run.owner
    del run
    assert not [*returned_storages(CPU)]
    out.sum().backward()
    assert sum(nbytes for _, nbytes in returned_storages(CPU)) == out.nbytes
    later = [out.detach(), out.detach().requires_grad_().sum()]  # as a call in eager mode returns
    ledger.note_run(owner, None, outputs=later, device=CPU)
    assert not [*returned_storages(CPU)]
    later.clear()
    assert sum(nbytes for _, nbytes in returned_storages(CPU)) == out.nbytes


def test_what_a_run_without_a_backward_returns_is_beside_others_once_it_is_gone():
    """The graph of a loss that nobody takes a gradient of: its prediction may be held on."""

    class Predicts(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.layers[0](x))

    out = optimized(Predicts, UNBOUNDED)(many_rows())
    kept = out.detach()
    del out
    gc.collect()
    assert sum(nbytes for _, nbytes in returned_storages(CPU)) == kept.nbytes
    assert not open_runs(CPU)


def test_calls_that_no_backward_follows_leave_nothing():
    """As an evaluation without `torch.no_grad()`: nobody asks for runs there."""
    model = optimized(Chain, UNBOUNDED).eval()
    for _ in range(300):
        model(BATCH)
    assert len(ledger._books.open) <= 3 * 64
    assert len(ledger._books.returned) <= 3 * 64


def test_runs_that_only_garbage_holds_may_go_at_any_time():
    """A collection may begin wherever the books are read; here it does, later each time."""

    class Owner:
        is_nested = True

    def leave(count: int) -> None:
        for _ in range(count):
            cycle: list[Any] = [torch.ones(2, requires_grad=True).sum()]
            cycle.append(cycle)
            ledger.note_run(Owner(), None, outputs=cycle[:1], device=CPU)

    threshold = gc.get_threshold()
    try:
        for later in range(1, 60):
            gc.set_threshold(10**6)
            leave(200)
            gc.disable()
            _pairs = [(number, later) for number in range(2500)]  # else new ones reuse old memory
            gc.set_threshold(gc.get_count()[0] + later)
            gc.enable()
            ledger._books.later(0)
    finally:
        gc.enable()
        gc.set_threshold(*threshold)
    gc.collect()
    assert not open_runs(CPU)
    assert not [*returned_storages(CPU)]


def test_what_nobody_holds_any_more_is_looked_at_once():
    """Each run of a step asks what earlier ones have returned."""
    kept, gone = torch.ones(4), torch.ones(5)
    ledger.note_returned([kept, gone])
    keys = {key for tensor in (kept, gone) for key in storage_identities([tensor])}
    assert keys <= {key for key, _ in returned_storages(CPU)}
    del gone
    (living,) = storage_identities([kept])
    assert keys & {key for key, _ in returned_storages(CPU)} == {living}
    assert keys & ledger._books.returned.keys() == {living}


def test_steps_that_are_all_alike_are_looked_into_ever_more_rarely(monkeypatch: pytest.MonkeyPatch):
    """All others cost a hook and a look-up."""
    looks, number = [], 0
    original = autoremat.watch.audit.foresee
    monkeypatch.setattr(
        "autoremat.watch.audit.foresee", lambda *a, **k: looks.append(number) or original(*a, **k)
    )
    model = optimized(Chain, UNBOUNDED)
    for _ in range(17):
        number += 1
        step(model, (many_rows(),))
    assert looks == [1, 2, 4, 8, 16]


# --- forms of a step ---------------------------------------------------------------------------


def two_calls(model: nn.Module) -> None:
    """Two calls of one model before one backward, as in siamese networks."""
    (model(BATCH) + model(BATCH)).backward()


def three_in_a_pipeline(model: nn.Module) -> None:
    """All forwards before all backwards, in another order."""
    losses = [model(BATCH) for _ in range(3)]
    for loss in losses:
        loss.backward()


class InTurn(nn.Module):
    """Blocks that Dynamo compiles once and runs one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwoLayers() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x.square().mean()


class TwoLayers(nn.Module):
    """`tanh` twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(torch.sin(x)))))


def once(model: nn.Module) -> None:
    """One forward and one backward."""
    model(BATCH).backward()


@pytest.mark.thorough
@pytest.mark.parametrize("take", [two_calls, three_in_a_pipeline])
def test_what_is_open_is_planned_for_from_the_second_step_on(take: Step):
    """The first step cannot know, and says by how much; gradients are the same."""
    plain = make_seeded(Chain)
    highest = whole_peak(plain, take, BATCH)
    budget = int(0.8 * highest)
    model = optimized(Chain, budget)
    first = told(model, take)
    assert first
    assert all(over.is_planned_anew for over in first)
    assert max(over.predicted_nbytes for over in first) == pytest.approx(highest, rel=0.05)
    assert not told(model, take, 2)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-6)
    assert whole_peak(model, take, BATCH) <= budget
    assert autoremat.report(model).is_within_budget


@pytest.mark.thorough
def test_a_backend_tells_of_runs_of_one_graph():
    """Where the leanest plan is above the budget, it says so once, and then no more."""
    highest = whole_peak(make_seeded(InTurn), once, BATCH)
    torch._dynamo.reset()
    model = make_seeded(InTurn)
    options = {"budget": int(0.5 * highest), "compiler": "eager", "verbose": False}
    for block in model.blocks:
        block.compile(backend=backend, options=options)
    first = told(model, once, 2)
    measured = whole_peak(model, once, BATCH)
    assert max(over.predicted_nbytes for over in first) >= 0.99 * measured > int(0.5 * highest)
    assert not told(model, once, 2)


def outside(model: nn.Module) -> None:
    """The loss is eager code's, and saves as much as the model does."""
    scores = model(BATCH)
    F.cross_entropy(scores.repeat(1, 8).float(), torch.zeros(256, dtype=torch.long)).backward()


class Scores(Chain):
    """Returns what a loss is taken of."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.thorough
def test_a_loss_outside_the_model_counts():
    """What it saves, and what its backward takes, is known once it has run, and planned for."""
    highest = whole_peak(make_seeded(Scores), outside, BATCH)
    model = optimized(Scores, int(0.93 * highest))
    first = told(model, outside)
    assert highest <= max(over.predicted_nbytes for over in first) <= 1.1 * highest
    assert not told(model, outside, 2)
    assert whole_peak(model, outside, BATCH) <= int(0.93 * highest)
    report = autoremat.report(model)
    assert report.predicted_peak_nbytes == report.eager_peak_nbytes <= report.budget_nbytes
    assert "code in eager mode" in report.summary()


@pytest.mark.thorough
def test_several_planned_models_of_one_step_know_of_each_other():
    """Each was given the whole budget: what the other one holds counts."""
    towers = nn.ModuleList(make_seeded(Chain) for _ in range(2))

    def both(models: Any) -> None:
        (models[0](BATCH) - models[1](OTHER)).square().backward()

    highest = whole_peak(towers, both, BATCH, OTHER)
    budget = int(0.8 * highest)
    torch._dynamo.reset()
    for tower in towers:
        autoremat.optimize(tower, budget, compiler="eager", verbose=False, time_limit=1)
    first = told(towers, both)
    assert max(over.predicted_nbytes for over in first) == pytest.approx(highest, rel=0.05)
    told(towers, both, 2)
    assert whole_peak(towers, both, BATCH, OTHER) <= budget


def test_a_model_that_cannot_be_compiled_is_told_of_with_its_peak():
    """The fallback has no number, the budget has; no advice is given to lower it."""

    class Uncompiled(Chain):
        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    highest = whole_peak(make_seeded(Uncompiled), once, BATCH)
    model = optimized(Uncompiled, int(0.8 * highest), strict=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        once(model)
    fallback, over = (entry.message for entry in caught)
    assert "AR105" in str(fallback)
    assert "nothing of this step has a plan" in str(over)
    assert "Lower the budget" not in str(over)
    assert highest <= over.predicted_nbytes <= 1.1 * highest


# --- optimizers that come later ----------------------------------------------------------------


def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """A step with an optimizer."""

    def take(_: nn.Module) -> None:
        optimizer.zero_grad()
        model(BATCH).backward()
        optimizer.step()

    return take


def test_an_optimizer_made_after_optimize_is_noticed_when_its_state_appears():
    """The next step is planned for it, and the report knows."""
    budget = unbounded(Chain, (BATCH,)).predicted_peak_nbytes
    model = optimized(Chain, budget)
    take = training(model, torch.optim.Adam(model.parameters(), foreach=False))
    moments = 2 * sum(p.nbytes for p in model.parameters())
    assert not told(model, take, 2)
    model.zero_grad(set_to_none=True)
    batch = BATCH
    peak = resident_nbytes(model, batch) + moments
    peak += measure_peak(lambda: model(batch).backward(), device="cpu")
    assert peak <= budget
    assert autoremat.report(model).resident.optimizer_nbytes >= moments


@pytest.mark.thorough
def test_a_backend_notices_an_optimizer_when_its_state_appears():
    """The next step is planned for it."""
    budget = unbounded(Chain, (BATCH,)).predicted_peak_nbytes
    torch._dynamo.reset()
    model = make_seeded(Chain)
    options = {"budget": budget, "compiler": "eager", "verbose": False}
    compiled = torch.compile(model, backend=backend, options=options)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def step(model: nn.Module) -> None:
        compiled(BATCH).backward()
        optimizer.step()

    assert not told(model, step, 2)
    optimizer.zero_grad(set_to_none=True)
    held = (BATCH, optimizer.state_dict())
    peak = resident_nbytes(model, held)
    assert peak + measure_peak(lambda: compiled(BATCH).backward(), device="cpu") <= budget


def test_an_optimizer_of_another_model_changes_nothing():
    """Nor does one without state."""
    model, other = optimized(Chain, UNBOUNDED), make_seeded(Chain)
    step(model, (BATCH,))
    before = autoremat.report(model)
    other(BATCH).backward()
    torch.optim.Adam(other.parameters()).step()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    assert autoremat.report(model).resident == before.resident


def test_an_optimizer_that_steps_a_model_which_nobody_calls():
    """As Lightning does: it calls `training_step`, and nothing would be planned in silence."""

    class Module(Chain):
        def training_step(self, batch: Tensor) -> Tensor:
            return self.forward(batch)

    model = optimized(Module, UNBOUNDED, strict=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.training_step(BATCH).backward()
    with pytest.warns(autoremat.FallbackWarning, match="AR114"):
        optimizer.step()
    model.training_step(BATCH).backward()
    optimizer.step()  # said once


def test_an_optimizer_that_steps_a_part_of_an_optimised_model():
    """A part that is optimised as well is planned with the whole, and nothing is amiss."""
    model = optimized(Chain, UNBOUNDED, strict=False)
    part = model.layers[0]
    autoremat.optimize(part, UNBOUNDED, compiler="eager", verbose=False)
    step(model, (BATCH,))
    torch.optim.SGD(model.parameters(), lr=0.1).step()  # warnings are errors


# --- sizes -------------------------------------------------------------------------------------


class Positions(nn.Module):
    """A position table, of which a slice is as long as the input: its length has a bound."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(512, WIDTH))
        self.chain = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table[: x.shape[1]]
        for layer in self.chain:
            x = torch.tanh(layer(x))
        return x.square().mean()


def words(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "sizes",
    [
        [(n, 32) for n in (1, 2, 3, 4, 6, 8)],
        [(2, n) for n in (32, 48, 128, 192)],
        [(2, n) for n in (64, 192, 32, 128, 192, 48)],
    ],
)
def test_sizes_that_grow_and_shrink_keep_the_budget(sizes: list[tuple[int, int]]):
    """From one sample on, with a bound that a table sets, and in turn."""
    largest = max(sizes)
    plain = make_seeded(Positions)
    budget = int(0.75 * whole_peak(plain, lambda m: m(words(*largest)).backward(), words(*largest)))
    model = optimized(Positions, budget, time_limit=1)
    for size in sizes:
        batch = words(*size)

        def take(model: nn.Module, batch: Tensor = batch) -> None:
            model(batch).backward()

        assert not told(model, take)
        assert whole_peak(model, take, batch) <= budget


@pytest.mark.thorough
def test_a_backend_tells_of_sizes_beyond_its_last_guard():
    """Dynamo gives a function up that it compiles too often: then the code for less runs."""
    take = lambda model: model(words(13, 32)).backward()  # noqa: E731
    highest = whole_peak(make_seeded(Positions), take, words(13, 32))
    torch._dynamo.reset()
    model, budget = make_seeded(Positions), int(0.4 * highest)
    options = {"budget": budget, "compiler": "eager", "verbose": False, "time_limit": 1}
    compiled = torch.compile(model, backend=backend, options=options)
    kept = []
    for batch in (words(size, 32) for size in range(2, 14)):
        take = lambda _, batch=batch: compiled(batch).backward()  # noqa: E731
        found = [over.predicted_nbytes for over in told(model, take)]
        measured = whole_peak(model, take, batch)
        kept.append(measured <= budget)
        assert found == ([] if kept[-1] else [measured])
    assert any(kept)
    assert not all(kept)


@pytest.mark.thorough
def test_sizes_with_bounds_of_the_users_own_that_do_not_fit_are_refused():
    """A plan is for all of them: the first step says which would do."""
    small, large = words(2, 32), words(8, 32)
    take = lambda model: model(large).backward()  # noqa: E731
    budget = int(0.6 * whole_peak(make_seeded(Positions), take, large))
    model = optimized(Positions, budget, time_limit=1)
    torch._dynamo.mark_dynamic(small, 0, min=2, max=64)
    with pytest.raises(autoremat.InfeasibleBudget):
        model(small)


def test_sizes_within_a_loose_budget_need_one_plan_only():
    """A plan is for as much as fits."""
    model = optimized(Positions, UNBOUNDED)
    for count in (2, 3, 5, 8, 13):
        step(model, (words(count, 32),))
    session = autoremat.optimized.optimized_call(model).session
    assert sum(map(len, session.planned.values())) == 2  # a constant size, then any


# --- bad input ---------------------------------------------------------------------------------


def with_a_call_without_gradients(model: nn.Module) -> None:
    """What it takes for itself comes on top of what waits for the backward."""
    loss = model(BATCH)
    with torch.no_grad():
        model(BATCH)
    loss.backward()


def with_two_backwards(model: nn.Module) -> None:
    """What was saved is still there at the end of the first."""
    loss = model(BATCH)
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("take", [with_a_call_without_gradients, with_two_backwards])
def test_what_comes_between_forward_and_last_backward_is_planned_for(take: Step):
    """The first step that is above the budget tells, and leaves room in those after it."""
    with torch._functorch.config.patch(donated_buffer=False):
        plain = make_seeded(Chain)
        take(plain)
        budget = int(0.8 * whole_peak(plain, take, BATCH))
        model = optimized(Chain, budget)
        assert all(over.is_planned_anew for over in told(model, take, 2))
        assert not told(model, take, 2)
        assert whole_peak(model, take, BATCH) <= budget
        assert autoremat.report(model).is_within_budget
        eager = [parameter.grad for parameter in plain.parameters()]
        ours = [parameter.grad for parameter in model.parameters()]
        assert all(map(torch.equal, eager, ours))


def test_where_no_plan_is_made_for_two_backwards_they_are_told_of_to_the_byte():
    """And nobody says that none takes less."""
    take = with_two_backwards
    with torch._functorch.config.patch(donated_buffer=False):
        alone = optimized(Chain, UNBOUNDED, policy="every-2")
        step(alone, (BATCH,))
        budget = autoremat.report(alone).predicted_peak_nbytes
        model = optimized(Chain, budget, policy="every-2")
        over = told(model, take)[-1]
        assert not over.is_planned_anew
        assert "lean as it can" not in str(over)
        assert over.predicted_nbytes == whole_peak(model, take, BATCH) > budget


def test_outputs_that_are_kept_for_good_are_told_of():
    """A list of losses whose graphs nobody frees holds more with each step."""
    budget = int(1.5 * unbounded(Chain, (BATCH,)).predicted_peak_nbytes)
    model = optimized(Chain, budget)
    kept = []
    assert told(model, lambda m: kept.append(m(BATCH)), 4)
    assert len(open_runs(CPU)) == 4
    kept.clear()
    assert not open_runs(CPU)


def test_three_threads_that_call_one_model_for_the_first_time_at_once():
    """One plans, the others wait; each gets its gradients, and no warning speaks of 0 B."""
    eager = make_seeded(Chain)
    eager(BATCH).backward()
    model = optimized(Chain, UNBOUNDED)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            model(BATCH).backward()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(autoremat.report(model).graphs) == 1
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.allclose(mine.grad, 3 * theirs.grad, atol=1e-6)


def test_a_defect_of_a_look_does_not_end_the_step(monkeypatch: pytest.MonkeyPatch):
    """It is told with its code, and gradients are right; strictly it is an error."""

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a defect")

    eager = make_seeded(Chain)
    eager(BATCH).backward()
    monkeypatch.setattr("autoremat.watch.audit.foresee", fail)
    model = optimized(Chain, UNBOUNDED, strict=False)
    with pytest.warns(autoremat.FallbackWarning, match="AR115.*a defect"):
        model(BATCH).backward()
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-6)
    with pytest.raises(autoremat.FallbackError, match="AR115"):
        optimized(Chain, UNBOUNDED)(BATCH).backward()
