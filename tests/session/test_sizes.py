"""Sizes that vary: one plan for a range, within the budget at every size of it."""

from __future__ import annotations

import gc
import itertools
import random
import warnings
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoremat
from autoremat.ask.sizes import Extent, Sizes
from autoremat.memory.meter import resident_nbytes
from autoremat.optimized import optimized_call
from autoremat.planning.choice import recomputed_share
from autoremat.planning.part import Part
from autoremat.session.call_sizes import CallSizes, ranges_now
from tests.training import UNBOUNDED, close, make_seeded, measured, optimized, recomputes, step

pytestmark = pytest.mark.shares_plans

WORDS, WIDTH = 64, 32
RANGES = {"batch": (1, 8), "sequence": (8, 128)}


class Tokens(nn.Module):
    """Three layers over tokens, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        return self.loss(self.hidden(self.words(ids)), ids)

    def hidden(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.out(x).flatten(0, 1), ids.flatten())


def ids(batch: int, sequence: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch * 1000 + sequence)
    return torch.randint(0, WORDS, (batch, sequence), generator=generator)


def free_nbytes(make: Callable[[], nn.Module], batch: Tensor, **options) -> int:
    """What a step takes without a budget."""
    return measured(make_seeded(make), (batch,), **options)


def plans_of(model: nn.Module) -> int:
    """How many plans were made for its graphs, whether they run or not."""
    parts = optimized_call(model).session.steps.graphs.parts
    return len(parts) + optimized_call(model).session.steps.replans.count


def with_smaller_plans(make: Callable[[], nn.Module], share: float) -> tuple[nn.Module, int]:
    """A model that has plans for smaller sizes by now, and its budget: a share of a free step."""
    budget = int(share * free_nbytes(Tokens, ids(8, 128)))
    model = optimized(make, budget, sizes=RANGES)
    for _ in range(3):
        step(model, (ids(8, 40),))
    parts = optimized_call(model).session.steps.graphs.parts
    assert any(part.smaller for part in parts.values())
    return model, budget


def require_within(
    model: nn.Module, budget: int, sizes: Iterable[tuple[int, int]], **options
) -> None:
    """Run steps of each size until none compiles, and measure one."""
    for size in sizes:
        settle(model, lambda size=size: step(model, (ids(*size),), **options))
        compiled = compiles_of(model)
        assert measured(model, (ids(*size),), **options) <= budget, size
        assert compiled == compiles_of(model)


def settle(model: nn.Module, take: Callable[[], object]) -> None:
    """Take steps until two compile nothing: plans for smaller sizes come before the third."""
    quiet = 0
    for _ in range(12):
        before = compiles_of(model)
        take()
        quiet = quiet + 1 if compiles_of(model) == before else 0
        if quiet == 2:
            return
    pytest.fail("It compiles in each step.")


def compiles_of(model: nn.Module) -> int:
    """In how many steps something of a model was compiled, or how often it was."""
    session = optimized_call(model).session
    again = sum(code.compiles for code in session.codes.values())
    return len(session.steps.compiled_in) + again


def test_one_plan_is_within_the_budget_at_every_size():
    """Made in the first step, whatever its size; predicted to the byte at the largest one."""
    budget = int(0.7 * free_nbytes(Tokens, ids(8, 128)))
    model = optimized(Tokens, budget, sizes=RANGES)
    require_within(model, budget, [(8, 40), (2, 128), (3, 77), (8, 9), (8, 128)])
    assert plans_of(model) == 1
    assert recomputes(model) > 0
    report = autoremat.report(model)
    assert report.predicted_peak_nbytes == measured(model, (ids(8, 128),))
    assert "proven" in next(fact.text for fact in report.facts if fact.name == "Sizes")
    formula = report.peak_formula
    assert formula is not None
    assert formula.at(batch=8, sequence=128) == report.predicted_peak_nbytes
    assert formula.at(batch=8, sequence=127) == measured(model, (ids(8, 127),))


@pytest.mark.thorough
def test_results_are_those_of_the_step_without_a_plan():
    reference, budget = make_seeded(Tokens), int(0.7 * free_nbytes(Tokens, ids(8, 128)))
    model = optimized(Tokens, budget, sizes=RANGES)
    for size in [(8, 20), (4, 128)]:
        close(step(reference, (ids(*size),)), step(model, (ids(*size),)), 1e-5)


@pytest.mark.thorough
def test_a_size_of_one_is_code_of_its_own():
    """As torch compiles it; for it, and for all others, there is one plan."""
    budget = int(0.7 * free_nbytes(Tokens, ids(8, 128)))
    model = optimized(Tokens, budget, sizes=RANGES)
    require_within(model, budget, [(1, 20), (8, 64), (1, 128), (8, 128), (5, 30)])
    assert plans_of(model) == 2


def test_beyond_the_range_is_an_error_with_the_number_before_anything_runs():
    model = optimized(Tokens, UNBOUNDED, sizes={"ids": {1: (8, 64)}})
    step(model, (ids(2, 64),))
    model.zero_grad(set_to_none=True)
    with pytest.raises(autoremat.SizeError, match=r"65 in this call.*at most 64") as caught:
        model(ids(2, 65))
    assert (caught.value.size, caught.value.highest) == (65, 64)
    step(model, (ids(2, 3),))  # what is smaller than the range runs


@pytest.mark.thorough
def test_beyond_the_range_another_plan_is_made_where_it_may_be():
    """For the size, rounded up."""
    budget = int(0.8 * free_nbytes(Tokens, ids(8, 128)))
    model = optimized(
        Tokens, budget, sizes={"batch": (1, 8), "sequence": (8, 64)}, on_larger="plan"
    )
    require_within(model, budget, [(8, 64), (8, 120), (8, 128), (8, 70)])
    assert plans_of(model) == 2


@pytest.mark.thorough
def test_where_no_plan_fits_the_size_rounded_up_one_fits_the_size():
    lean = int(1.02 * smallest_nbytes(ids(8, 96)))
    model = optimized(Tokens, lean, sizes={"batch": (1, 8), "sequence": (8, 64)}, on_larger="plan")
    require_within(model, lean, [(8, 64), (8, 96)])
    with pytest.raises(autoremat.InfeasibleBudget):
        step(model, (ids(8, 128),))


def smallest_nbytes(batch: Tensor) -> int:
    with pytest.raises(autoremat.InfeasibleBudget) as caught:
        step(optimized(Tokens, 60_000), (batch,))
    return caught.value.smallest_peak_nbytes


@pytest.mark.thorough
def test_without_ranges_plans_are_for_what_was_seen_rounded_up():
    budget = int(0.8 * free_nbytes(Tokens, ids(8, 128)))
    model = optimized(Tokens, budget, sizes="seen")
    lengths = [30, 33, 50, 65, 128, 90, 64, 127]
    require_within(model, budget, [(8, length) for length in lengths])
    assert plans_of(model) <= 3


def test_bounds_of_marks_are_a_range():
    """As torch has them, for whoever has marked inputs already."""
    budget = int(0.7 * free_nbytes(Tokens, ids(8, 128)))
    model = optimized(Tokens, budget)
    batch = ids(8, 30)
    torch._dynamo.mark_dynamic(batch, 1, min=2, max=128)
    model(batch).backward()
    del batch
    require_within(model, budget, [(8, 128), (8, 64)])
    assert plans_of(model) == 1


@pytest.mark.thorough
def test_bounds_of_marks_are_a_range_for_the_backend_as_well():
    torch._dynamo.reset()
    budget = int(0.7 * free_nbytes(Tokens, ids(8, 128)))
    options = {"budget": budget, "compiler": "eager", "verbose": False, "time_limit": 4.0}
    model = torch.compile(make_seeded(Tokens), backend="autoremat", options=options)
    batch = ids(8, 30)
    torch._dynamo.mark_dynamic(batch, 1, min=2, max=128)
    model(batch).backward()
    del batch
    assert measured(model, (ids(8, 128),)) <= budget
    report = autoremat.report(model)
    assert len(report.graphs) == 1
    assert any(fact.name == "Sizes" for fact in report.facts)


@pytest.mark.thorough
def test_gradients_that_exist_do_not_grow_with_the_sizes():
    """Accumulated over small batches, they leave the plan for large ones as it is."""
    budget = int(1.1 * free_nbytes(Tokens, ids(8, 128)))
    model = optimized(Tokens, budget, sizes=RANGES)
    for size in [(8, 9), (8, 10), (8, 128), (2, 20)]:
        model(ids(*size)).backward()
    assert plans_of(model) == 1
    assert autoremat.report(model).predicted_peak_nbytes <= budget


@pytest.mark.thorough
def test_a_range_that_does_not_fit_names_the_largest_sizes_that_do():
    """Which are accepted."""
    budget = int(0.4 * free_nbytes(Tokens, ids(8, 128)))
    model = optimized(Tokens, budget, sizes=RANGES)
    with pytest.raises(autoremat.InfeasibleBudget, match="it would do for batch up to") as caught:
        step(model, (ids(4, 16),))
    found = dict(caught.value.largest_sizes)
    assert set(found) == {"batch", "sequence"}
    model = optimized(Tokens, budget, sizes=RANGES | {"sequence": (8, found["sequence"])})
    require_within(model, budget, [(4, 16), (8, found["sequence"])])


class Limited(Tokens):
    """Takes 100 tokens at most."""

    def forward(self, ids: Tensor) -> Tensor:
        assert ids.shape[1] <= 100, "too long"
        return super().forward(ids)


class Counting(Tokens):
    """Its graph has the length in it as a number."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for number in range(ids.shape[1]):
            x = x + number if number < 2 else x
        return self.loss(self.hidden(x), ids)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Limited, r"at most 100.*test_sizes.py:\d+: assert ids.shape\[1\] <= 100"),
        pytest.param(
            Counting, r"only 30.*test_sizes.py:\d+: .*ids.shape\[1\]", marks=pytest.mark.thorough
        ),
    ],
)
def test_what_the_model_makes_of_a_range_is_told_with_its_line(make: type[Tokens], says: str):
    budget = int(0.8 * free_nbytes(Tokens, ids(8, 128)))
    model = optimized(make, budget, sizes=RANGES, strict=False)
    with pytest.warns(autoremat.FallbackWarning, match=says):
        step(model, (ids(8, 30),))


def test_an_input_that_a_call_does_not_have_is_named():
    model = optimized(Tokens, UNBOUNDED, sizes={"tokens": {1: (8, 64)}})
    with pytest.raises(ValueError, match="names 'tokens', and the model is called with argument 0"):
        model(ids(2, 8))


class Broken(Tokens):
    """Two graphs: what the second is given has the sizes of the inputs of the first."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.hidden(self.words(ids))
        torch._dynamo.graph_break()
        return self.loss(x, ids)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*From the next step on:autoremat.OverBudgetWarning")
def test_a_graph_break_keeps_the_ranges():
    """What is planned for: a second graph, that step as a whole, and room that results leave."""
    budget = int(0.75 * free_nbytes(Tokens, ids(8, 128)))
    model = optimized(Broken, budget, sizes=RANGES)
    require_within(model, budget, [(8, 64), (3, 128), (8, 128), (2, 77)])
    assert plans_of(model) <= 4


class Labelled(Tokens):
    """Two graphs: of the batch, each is given something that the other is not."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.hidden(self.words(ids))
        torch._dynamo.graph_break()
        return self.loss(x, labels)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*From the next step on:autoremat.OverBudgetWarning")
def test_a_batch_that_several_graphs_are_given_is_known_at_all_sizes():
    """What small steps show, the plans for the largest have counted, to the byte."""
    budget = int(0.75 * free_nbytes(Tokens, ids(8, 128)))
    model = optimized(Labelled, budget, sizes=RANGES)
    for size in [(8, 64), (3, 128), (2, 77), (5, 30)]:
        step(model, (ids(*size), ids(*size)))
    session = optimized_call(model).session
    around = session.steps.surroundings.now
    assert around.held_nbytes == around.returned_nbytes == around.passing_nbytes == 0
    first, second = session.steps.graphs.parts.values()
    largest = (ids(8, 128), ids(8, 128))
    step(model, largest)
    peak_nbytes = measured(model, largest)
    assert peak_nbytes <= budget
    assert autoremat.report(model).predicted_peak_nbytes == peak_nbytes
    model.zero_grad(set_to_none=True)
    resident = [part.resident_nbytes for part in (first, second)]
    assert resident == [resident_nbytes(model, largest)] * 2


def test_of_a_batch_only_whole_storages_tell_what_they_take_at_other_sizes():
    """Of a part of one nobody knows the rest, and what is expanded takes no more."""
    whole, part = torch.ones(4, 16), torch.ones(4, 17)[:, 1:]
    expanded = torch.ones(4, 1, 16).expand(4, 8, 16)
    sparse = torch.ones(4, 16).to_sparse()
    jagged = torch.nested.nested_tensor([torch.ones(3), torch.ones(5)], layout=torch.jagged)
    batch = Extent("batch", 1, 8)
    asked = Sizes(words=((0, batch),), inputs=(("expanded", 1, Extent("heads", 1, 8)),))
    given = {"whole": whole, "again": whole[:], "part": part, "expanded": expanded}
    others = {"sparse": sparse, "jagged": jagged}
    with CallSizes(asked).of(lambda **inputs: None, (), given | others):
        ranges = ranges_now()
    assert {one.nbytes for one in ranges.batch} == {whole.nbytes, 4 * 16 * 4}
    assert [one.nbytes_at({"batch": 2}) for one in ranges.batch] == [2 * 16 * 4] * 2
    assert [one.nbytes_at({}) for one in ranges.absent([whole])] == [8 * 16 * 4]


class Joined(Tokens):
    """A second graph comes later, beside which nobody has looked at plans for smaller sizes."""

    is_joined = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.hidden(self.words(ids))
        loss = self.loss(x, ids)
        if self.is_joined:
            torch._dynamo.graph_break()
            loss = loss + x.square().mean()
        return loss


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*From the next step on:autoremat.OverBudgetWarning")
def test_plans_for_smaller_sizes_go_where_another_graph_joins_the_step():
    model, budget = with_smaller_plans(Joined, 0.7)
    steps = optimized_call(model).session.steps
    before = set(steps.graphs.parts)
    model.is_joined = True
    for _ in range(3):
        step(model, (ids(2, 20),))
    ran = steps.graphs.graphs
    assert len(ran) > 1
    assert not any(steps.graphs.parts[name].smaller for name in before if name in ran)
    step(model, (ids(8, 128),))
    assert measured(model, (ids(8, 128),)) <= budget


class Logits(Tokens):
    """Its loss is outside."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.hidden(self.words(ids)))


@pytest.mark.thorough
def test_what_code_outside_takes_is_known_of_larger_sizes_from_a_small_one():
    """The first step shows what a loss takes: that of the largest size is planned for."""
    loss_of = lambda logits: logits.log_softmax(-1).square().mean()  # noqa: E731
    budget = int(0.85 * free_nbytes(Logits, ids(8, 128), loss_of=loss_of))
    model = optimized(Logits, budget, sizes=RANGES)
    require_within(model, budget, [(8, 40), (8, 128), (4, 100)], loss_of=loss_of)


class Padded(Tokens):
    """What is missing to 128 tokens is filled up by what takes twice as much."""

    def forward(self, ids: Tensor) -> Tensor:
        missing = torch.ones(128 - ids.shape[1], 16 * WIDTH)
        return super().forward(ids) + torch.tanh(missing * self.out.bias.sum()).square().sum()


@pytest.mark.thorough
def test_what_is_higher_at_smaller_sizes_is_planned_for_as_well():
    budget = int(0.9 * free_nbytes(Padded, ids(2, 8)))
    model = optimized(Padded, budget, sizes={"ids": {1: (8, 126)}})
    require_within(model, budget, [(2, 120), (2, 126), (2, 60), (2, 8)])
    fact = next(fact for fact in autoremat.report(model).facts if fact.name == "Sizes")
    assert "not all of it grows with the sizes" in fact.text


class Chosen(Tokens):
    """Only the tokens that are not zero count: data decide how many they are."""

    def forward(self, ids: Tensor) -> Tensor:
        kept = ids.flatten().nonzero().flatten()
        x = self.hidden(self.words(ids)).flatten(0, 1)[kept]
        return F.cross_entropy(self.out(x), ids.flatten()[kept])


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::autoremat.OverBudgetWarning")
def test_sizes_that_data_decide_are_told_of_if_they_are_above():
    """They have no range; no step is above the budget in silence, nor wrong."""
    budget = int(0.9 * free_nbytes(Chosen, ids(8, 128)))
    model, reference = optimized(Chosen, budget, sizes=RANGES, strict=False), make_seeded(Chosen)
    for size in [(8, 30), (8, 128), (3, 70), (8, 128), (8, 128)]:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            close(step(reference, (ids(*size),)), step(model, (ids(*size),)), 1e-5)
        assert measured(model, (ids(*size),)) <= budget or told


@pytest.mark.thorough
@pytest.mark.inductor
def test_under_inductor_the_peak_is_read_at_the_largest_sizes():
    """One plan, or another in the second step; no step is above the budget."""
    budget = int(0.8 * free_nbytes(Tokens, ids(8, 128)))
    model = optimized(Tokens, budget, sizes=RANGES, compiler="inductor")
    require_within(model, budget, [(8, 64), (4, 128), (8, 128), (3, 77)])
    assert plans_of(model) <= 2
    assert measured(model, (ids(8, 128),)) == autoremat.report(model).predicted_peak_nbytes


class Attending(Tokens):
    """With attention, whose scores grow with the square of the length."""

    def __init__(self) -> None:
        super().__init__()
        self.mixes = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(3))
        self.drop = nn.Dropout(0.1)

    def hidden(self, x: Tensor) -> Tensor:
        for mix, layer in zip(self.mixes, self.layers, strict=True):
            q, k, v = mix(x).chunk(3, -1)
            scores = torch.softmax(q @ k.transpose(1, 2) / WIDTH**0.5, -1)
            x = x + self.drop(torch.tanh(layer(scores @ v)))
        return x


@pytest.mark.thorough
def test_nothing_is_planned_in_steady_state():
    """Two hundred steps: random lengths, batches that alternate, a smaller last one, evaluation.

    At most three plans, all within ten steps; every step within the budget, and none padded.
    """
    random.seed(18)
    budget = int(0.75 * free_nbytes(Attending, ids(4, 512)))
    ranges = {"batch": (1, 4), "sequence": (128, 512)}
    torch._dynamo.reset()
    model = make_seeded(Attending)
    optimizer = torch.optim.AdamW(model.parameters())
    state = 2 * sum(p.nbytes for p in model.parameters()) + 64
    budget += 2 * state
    given = {"compiler": "eager", "strict": True, "verbose": False, "time_limit": 4.0}
    autoremat.optimize(model, budget, optimizer=optimizer, sizes=ranges, **given)
    batches = itertools.cycle([4, 4, 2, 4, 3, 4, 4, 1])
    plans, highest = [], 0
    for number in range(200):
        batch = ids(next(batches) if number % 20 else 1, random.randint(128, 512))
        if number < 10:
            step(model, (batch,))  # what compiles is not measured
        if number == 10:
            gc.freeze()  # a measurement looks at all that Python has
        highest = max(highest, measured(model, (batch,)))
        optimizer.step()
        if number % 25 == 24:
            model.eval()
            with torch.no_grad():
                model(ids(4, 512))
            model.train()
        plans.append(plans_of(model))
    gc.unfreeze()
    assert plans[9] == plans[-1] <= 3
    steps = optimized_call(model).session.steps
    assert max(steps.compiled_in) <= 20, "of two calls each in the first ten"
    assert highest <= budget


def require_formula_of_each(model: nn.Module, whole: Part) -> None:
    """Each further plan's formula holds up to its corner, and says what is measured there."""
    report = autoremat.report(model)
    assert whole.smaller is not None
    assert len(report.smaller_formulas) == len(whole.smaller)
    compared = 0
    for part, formula in zip(whole.smaller, report.smaller_formulas, strict=True):
        highest = {symbol.name: symbol.highest for symbol in formula.symbols}
        assert sorted(highest.values()) == sorted(part.subject.sizes.values())
        batch, sequence = highest["batch"], highest["sequence"]
        assert f"by the plan for up to batch {batch}, sequence {sequence}: " in report.summary()
        for size in [(batch, sequence), (batch, sequence - 1), (2, sequence // 2)]:
            given = dict(zip(("batch", "sequence"), size, strict=True))
            names = part.covered.names
            numbers = {symbol: given[names[symbol]] for symbol in part.subject.sizes}
            if whole.for_call(numbers) is part:
                assert formula.at(**given) == measured(model, (ids(*size),))
                compared += 1
        with pytest.raises(ValueError, match="out of range"):
            formula.at(batch=batch + 1)
    assert compared >= len(whole.smaller)


def test_smaller_sizes_have_plans_of_their_own_where_that_is_faster():
    """Made once, after two steps; each is within the budget, and recomputes less or nothing."""
    budget = int(0.55 * free_nbytes(Tokens, ids(8, 128)))
    model = optimized(Tokens, budget, sizes=RANGES)
    require_within(model, budget, [(8, 40), (4, 120)])
    session = optimized_call(model).session
    (whole,) = session.steps.graphs.parts.values()
    assert 1 <= len(whole.smaller) <= 3
    assert all(part.covered.is_proven for part in whole.smaller)
    draw = random.Random(18)
    drawn = [(draw.randint(2, 8), draw.randint(2, 128)) for _ in range(12)]
    require_within(model, budget, [*drawn, (8, 128)])
    (after,) = session.steps.graphs.parts.values()
    assert after.smaller == whole.smaller
    assert plans_of(model) == 1
    fastest, numbers = whole.smaller[0], whole.smaller[0].subject.sizes
    assert whole.for_call(numbers) is fastest
    assert whole.for_call({symbol: n + 1 for symbol, n in numbers.items()}) is not fastest
    assert recomputed_share(fastest.choice) < recomputed_share(whole.choice)
    facts = [fact.text for fact in autoremat.report(model).facts if fact.name == "Sizes"]
    assert len(facts) == 1 + len(whole.smaller)
    require_formula_of_each(model, whole)
    reference = make_seeded(Tokens)
    close(step(reference, (ids(3, 20),)), step(model, (ids(3, 20),)), 1e-5)


def test_plans_of_smaller_sizes_are_dropped_where_the_step_has_no_room_for_them():
    """What has come to be held beside the graph since they were made, they do not count."""
    model, budget = with_smaller_plans(Tokens, 0.55)
    steps = optimized_call(model).session.steps
    (whole,) = steps.graphs.parts.values()
    steps.surroundings.note_resident(budget - steps.peak_nbytes)  # of which the largest has room
    step(model, (ids(8, 40),))
    (after,) = steps.graphs.parts.values()
    assert all(part in whole.smaller for part in after.smaller)
    for part in after.smaller:
        steps.graphs.parts[next(iter(steps.graphs.parts))] = part
        assert steps.peak_nbytes <= budget


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*From the next step on:autoremat.OverBudgetWarning")
def test_graphs_of_one_step_have_plans_for_smaller_sizes_together():
    """A step is within the budget whichever of them each graph runs by, and recomputes less."""
    budget = int(0.6 * free_nbytes(Broken, ids(8, 128)))
    model = optimized(Broken, budget, sizes=RANGES)
    for _ in range(4):
        step(model, (ids(7, 120),))
    steps = optimized_call(model).session.steps
    first, second = steps.graphs.parts.values()
    assert 1 <= len(first.smaller) == len(second.smaller) <= 3
    assert recomputed_share(first.smaller[0].choice) < recomputed_share(first.choice)
    assert all(part.kept_growth == part.corner for part in (*first.smaller, *second.smaller))
    corners = [tuple(part.subject.sizes.values()) for part in first.smaller]
    compiled = len(steps.compiled_in)
    require_within(model, budget, [*corners, (2, 20), (8, 33), (3, 128), (8, 128), (5, 64)])
    assert len(steps.compiled_in) > compiled
    assert [part.smaller for part in steps.graphs.parts.values()] == [first.smaller, second.smaller]
    reference = make_seeded(Broken)
    close(step(reference, (ids(3, 20),)), step(model, (ids(3, 20),)), 1e-5)


def test_a_batch_of_two_after_one_of_one_can_be_planned_again():
    """Its plan holds for no larger one, which makes a number of the symbol of the same graph."""
    budget = int(0.9 * free_nbytes(Tokens, ids(2, 128)))
    model = optimized(Tokens, budget)
    optimizer = torch.optim.AdamW(model.parameters())
    for size in (1, 2, 2, 2):
        step(model, (ids(size, 128),))
        optimizer.step()  # its state is beside the plan from the second step on
    assert not autoremat.report(model).fallbacks
    assert optimized_call(model).session.steps.compiled_in[-1] > 2
