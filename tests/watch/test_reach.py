"""What a step's own code holds is found where that code can name it, and planned for or told of."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoremat
from autoremat.memory.meter import measure_peak, resident_nbytes
from autoremat.watch.reach import Reach
from tests.tiny import Chain, many_rows
from tests.training import make_seeded, told

pytestmark = pytest.mark.shares_plans

BATCH = many_rows(512)
OPTIONS = {"compiler": "eager", "verbose": False, "time_limit": 4.0}
Step = Callable[[nn.Module], object]


class Encoder(Chain):
    """Layers without a loss."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


# --- forms of a step ---------------------------------------------------------------------------


def cached_gradients(encoder: nn.Module, loss_of: Callable[[list[Tensor]], Tensor]) -> None:
    """All chunks without gradients, the loss of the results, then each chunk again with them."""
    chunks = [BATCH] * 6
    encoder.zero_grad(set_to_none=True)
    with torch.no_grad():
        results = [encoder(chunk).requires_grad_() for chunk in chunks]
    loss_of(results).backward()
    for chunk, result in zip(chunks, results, strict=True):
        encoder(chunk).backward(result.grad)


def cached_copies(encoder: nn.Module) -> None:
    """The same with a loss of one copy of all results, as GradCache has it."""
    chunks = [BATCH] * 6
    encoder.zero_grad(set_to_none=True)
    with torch.no_grad():
        results = torch.cat([encoder(chunk) for chunk in chunks])
    results = results.detach().requires_grad_()
    results.tanh().square().mean().backward()
    for chunk, gradient in zip(chunks, results.grad.chunk(6), strict=True):
        encoder(chunk).backward(gradient)


def one_by_one(results: list[Tensor]) -> Tensor:
    """A loss that takes little beside its gradients."""
    return sum(result.square().mean() for result in results)


def all_at_once(results: list[Tensor]) -> Tensor:
    """One that takes several times as much."""
    return torch.cat(results).tanh().square().mean()


def perturbed(encoder: nn.Module, batches: int = 1) -> None:
    """Sharpness-aware minimisation: more backwards, from weights that were moved uphill.

    Of several batches in turn, most find gradients of the first ones.
    """
    encoder.zero_grad(set_to_none=True)
    for _ in range(batches):
        encoder(BATCH).square().mean().backward()
    with torch.no_grad():
        moved = {parameter: 1e-2 * parameter.grad for parameter in encoder.parameters()}
        for parameter, distance in moved.items():
            parameter.add_(distance)
    encoder.zero_grad(set_to_none=True)
    for _ in range(batches):
        encoder(BATCH).square().mean().backward()
    with torch.no_grad():
        for parameter, distance in moved.items():
            parameter.sub_(distance)


# --- the same, in functions around the one that calls the model ---------------------------------


ROWS = many_rows(128)
chain_of = functools.partial(Chain, 10)


def take_gradients(chain: nn.Module) -> None:
    """What each pass does; nothing of it is in eager mode, where predictions leave a margin."""
    chain(ROWS).backward()


@torch.no_grad()
def move_uphill(chain: nn.Module) -> list[Tensor]:
    """How far: as many bytes as the parameters."""
    norm = torch.stack([parameter.grad.norm() for parameter in chain.parameters()]).norm()
    moved = [parameter.grad * (0.05 / norm) for parameter in chain.parameters()]
    torch._foreach_add_(list(chain.parameters()), moved)
    return moved


@torch.no_grad()
def move_back(chain: nn.Module, moved: list[Tensor]) -> None:
    """As if there had been no first pass."""
    torch._foreach_sub_(list(chain.parameters()), moved)


@contextlib.contextmanager
def uphill(chain: nn.Module) -> Iterator[None]:
    """Holds the distances in a variable of a generator that waits."""
    moved = move_uphill(chain)
    yield
    move_back(chain, moved)


def perturbed_by_functions(chain: nn.Module, *, set_to_none: bool = True) -> None:
    """The distances are a variable of a function that calls the one that calls the model."""
    take_gradients(chain)
    moved = move_uphill(chain)
    chain.zero_grad(set_to_none=set_to_none)
    take_gradients(chain)
    move_back(chain, moved)


def perturbed_beside_gradients(chain: nn.Module) -> None:
    """The second pass finds gradients, of zeros, for which it has a plan of its own."""
    perturbed_by_functions(chain, set_to_none=False)


def perturbed_in_a_block(chain: nn.Module) -> None:
    """No frame has a variable for them."""
    take_gradients(chain)
    with uphill(chain):
        chain.zero_grad(set_to_none=True)
        take_gradients(chain)


def perturbed_by_attributes(chain: nn.Module) -> None:
    """They are attributes of the parameters."""
    take_gradients(chain)
    for parameter, distance in zip(chain.parameters(), move_uphill(chain), strict=True):
        parameter.moved = distance
    chain.zero_grad(set_to_none=True)
    take_gradients(chain)
    move_back(chain, [parameter.moved for parameter in chain.parameters()])
    for parameter in chain.parameters():
        del parameter.moved


def beside_a_reference(encoder: nn.Module, reference: nn.Module) -> None:
    """Targets of a model that nobody has told of."""
    encoder.zero_grad(set_to_none=True)
    with torch.no_grad():
        target = reference(BATCH)
    F.mse_loss(encoder(BATCH), target).backward()


def encoder_of(layers: int = 10) -> nn.Module:
    """The same each time."""
    return make_seeded(functools.partial(Encoder, layers))


def whole_peak(encoder: nn.Module, take: Step, *others: nn.Module, batch: Tensor = BATCH) -> int:
    """Measured bytes of a step, with what is there before it."""
    encoder.zero_grad(set_to_none=True)
    held = resident_nbytes(nn.ModuleList([encoder, *others]), batch)
    return held + measure_peak(lambda: take(encoder), device="cpu")


def optimised(budget: int) -> nn.Module:
    """An encoder under a budget."""
    return autoremat.optimize(encoder_of(), budget, **OPTIONS)


def frozen() -> nn.Module:
    """A reference."""
    return encoder_of().requires_grad_(False)


def in_eval_mode() -> nn.Module:
    """One that somebody might train."""
    return encoder_of().eval()


@pytest.mark.parametrize(
    ("take", "make_reference", "share"),
    [
        (functools.partial(cached_gradients, loss_of=one_by_one), None, 0.8),
        (perturbed, None, 0.8),
        (functools.partial(perturbed, batches=8), None, 0.7),
        (beside_a_reference, frozen, 0.8),
        (beside_a_reference, in_eval_mode, 0.8),
    ],
)
def test_what_the_step_s_own_code_holds_is_planned_for(
    take: Callable[..., object], make_reference: Callable[[], nn.Module] | None, share: float
):
    """Found in the first step, which says so; the budget is kept from the second on."""
    others = () if make_reference is None else (make_reference(),)

    def step(encoder: nn.Module) -> None:
        take(encoder, *others)

    plain = encoder_of()
    step(plain)
    budget = int(share * whole_peak(plain, step, *others))
    encoder = optimised(budget)
    first = told(lambda: step(encoder))
    assert first
    assert all(over.is_planned_anew for over in first)
    for _ in range(2):
        assert not told(lambda: step(encoder))
    peaks: list[int] = []
    assert not told(lambda: peaks.append(whole_peak(encoder, step, *others)))
    assert max(peaks) <= budget
    for mine, theirs in zip(encoder.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-6)


@pytest.mark.parametrize(
    "take",
    [
        perturbed_by_functions,
        perturbed_beside_gradients,
        perturbed_in_a_block,
        perturbed_by_attributes,
    ],
)
@pytest.mark.parametrize("how", ["optimize", "backend"])
def test_what_functions_around_a_training_step_s_passes_hold_is_planned_for(how: str, take: Step):
    """Told of once an optimizer has shown which steps are one; the budget is kept from then on."""

    def trained_by(chain: nn.Module) -> tuple[nn.Module, Step]:
        optimizer = torch.optim.SGD(chain.parameters(), lr=1e-3)

        def step(called: nn.Module) -> None:
            take(called)
            optimizer.step()
            optimizer.zero_grad()

        return chain, step

    plain, step = trained_by(make_seeded(chain_of))
    step(plain)
    budget = int(0.7 * whole_peak(plain, step, batch=ROWS))
    planned, step_planned = trained_by(make_seeded(chain_of))
    if how == "optimize":
        autoremat.optimize(planned, budget, **OPTIONS)
    else:
        planned.compile(backend="autoremat", options={"budget": budget, **OPTIONS})
    assert told(lambda: (step_planned(planned), step_planned(planned)))
    peaks: list[int] = []
    for _ in range(2):
        assert not told(lambda: peaks.append(whole_peak(planned, step_planned, batch=ROWS)))
    assert max(peaks) <= budget
    for _ in range(2):
        step(plain)
    for mine, theirs in zip(planned.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


@pytest.mark.parametrize("start", [5, pytest.param(20, marks=pytest.mark.thorough)])
def test_steps_that_begin_to_hold_something_late_are_told_of_and_planned_for(start: int):
    """By the second of them, whatever the number of steps before them without."""
    plain = make_seeded(chain_of)
    perturbed_by_functions(plain)
    budget = int(0.7 * whole_peak(plain, perturbed_by_functions, batch=ROWS))
    chain = autoremat.optimize(make_seeded(chain_of), budget, **OPTIONS)
    optimizer = torch.optim.SGD(chain.parameters(), lr=1e-3)

    def step(take: Step) -> None:
        take(chain)
        optimizer.step()
        optimizer.zero_grad()

    assert not told(lambda: [step(take_gradients) for _ in range(start)])
    assert told(lambda: [step(perturbed_by_functions) for _ in range(2)])
    held = lambda: step(perturbed_by_functions)  # noqa: E731
    peaks: list[int] = []
    assert not told(lambda: peaks.append(whole_peak(chain, lambda _: held(), batch=ROWS)))
    assert peaks[0] <= budget


@pytest.mark.parametrize("through", ["optimize", "backend"])
@pytest.mark.parametrize(
    "take", [functools.partial(cached_gradients, loss_of=all_at_once), cached_copies]
)
def test_a_loss_that_takes_more_than_the_budget_by_itself_is_told(take: Step, through: str):
    """No planned graph waits while its backward runs, so no plan can change it."""
    plain = encoder_of()
    take(plain)
    budget = int(0.8 * whole_peak(plain, take))
    if through == "optimize":
        encoder = optimised(budget)
    else:
        encoder = encoder_of()
        encoder.compile(backend="autoremat", options={"budget": budget, **OPTIONS})
    warned = told(lambda: take(encoder)) + told(lambda: take(encoder))
    assert warned
    assert all(over.alone == "eager" for over in warned)
    assert "a loss of results" in str(warned[0])
    highest = whole_peak(encoder, take)
    assert budget < highest <= max(over.predicted_nbytes for over in warned)


def test_a_backward_of_anything_else_is_not_the_models():
    """Also after a call without gradients, and with leaves that are no parameters."""
    encoder = optimised(resident_nbytes(encoder_of(), BATCH) + (1 << 20))
    with torch.no_grad():
        encoder(BATCH)
    weights = torch.ones(1 << 20, requires_grad=True)
    assert not told(lambda: (weights * 2).tanh().square().sum().backward())


def test_data_and_models_in_training_are_not_what_a_step_holds():
    """They were there before the first step, and this step does not show whether it needs them."""
    data = [many_rows(512) for _ in range(20)]
    twin = encoder_of()

    def step(encoder: nn.Module) -> None:
        encoder.zero_grad(set_to_none=True)
        encoder(data[0].clone()).square().mean().backward()

    step(twin)
    budget = int(0.8 * whole_peak(twin, step))
    encoder = optimised(budget)
    for _ in range(3):
        told(lambda: step(encoder))
    assert not told(lambda: step(encoder))
    assert autoremat.report(encoder).predicted_peak_nbytes <= budget


# --- what code can name ------------------------------------------------------------------------


class Trainer:
    """Holds what it needs as attributes."""

    def __init__(self) -> None:
        self.reference = nn.ModuleDict({"teacher": nn.Linear(2, 2)}).eval()
        self.state: dict[str, Any] = {}


def test_modules_in_eval_mode_and_frozen_ones_are_found_at_once():
    """As attributes and in containers; not the frozen parts of those that are trained."""
    reach = Reach()
    trainer, frozen = Trainer(), [nn.Linear(3, 3).requires_grad_(False)]
    adapted = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3))
    found = {id(tensor) for tensor in reach.tensors()}
    wanted = [*trainer.reference.parameters(), *frozen[0].parameters()]
    assert {id(tensor) for tensor in wanted} <= found
    assert not {id(tensor) for tensor in adapted.parameters()} & found


def test_single_tensors_are_found_with_their_gradients_once_they_are_new():
    """In variables, containers, attributes, and where functions that are named hold them."""
    data = torch.ones(3)
    reach, trainer = Reach(), Trainer()
    reach.note_data()
    trainer.state["cached"] = [cached := torch.ones(2, requires_grad=True)]
    cached.sum().backward()
    inner = torch.ones(5)

    def takes() -> Tensor:
        return inner

    found = {id(tensor) for tensor in reach.tensors()}
    assert {id(cached), id(cached.grad), id(inner)} <= found
    assert id(data) not in found
    assert takes() is inner


def test_what_a_graph_differentiates_is_held_as_long_as_a_variable_has_its_loss():
    """The attack's last perturbation, which another has replaced; parameters count elsewhere."""
    reach, layer, data = Reach(), nn.Linear(3, 3), torch.ones(3, requires_grad=True)
    reach.note_data()
    attacked = torch.zeros(3, requires_grad=True)
    loss = layer(data + attacked).sum()
    (gradient,) = torch.autograd.grad(loss, attacked)
    before, attacked = id(attacked), attacked.detach() + gradient
    found = {id(tensor) for tensor in reach.tensors()}
    assert before in found
    assert not {id(data), *map(id, layer.parameters())} & found
    del loss
    assert before not in {id(tensor) for tensor in reach.tensors()}


def test_a_view_that_autograd_says_nothing_of_is_found_and_hides_nothing():
    """Made without gradients, of what then was changed with them."""
    reach = Reach()
    reach.note_data()
    state, other = torch.zeros(2, 3), torch.ones(5)
    with torch.no_grad():
        row = state[0]
    state += torch.ones(2, 3, requires_grad=True)
    with pytest.raises(RuntimeError):
        row.is_leaf  # noqa: B018
    found = {id(tensor) for tensor in reach.tensors()}
    assert {id(row), id(state), id(other)} <= found


def test_data_of_functions_around_the_one_that_calls_first_is_data():
    """One takes the loss, another begins its backward; the data are the script's."""
    data, reach = [torch.ones(3) for _ in range(5)], Reach()

    def take_loss() -> None:
        reach.note_data()

    take_loss()
    cached = torch.ones(2)
    found = {id(tensor) for tensor in reach.tensors()}
    assert id(cached) in found
    assert not {id(tensor) for tensor in data} & found


def test_of_functions_around_only_what_has_come_in_the_training_step_is_found():
    """What was there as it began may be of an earlier one, or of none."""
    reach = Reach()
    reach.note_data()
    earlier = torch.ones(2)

    def found() -> set[int]:
        return {id(tensor) for tensor in reach.tensors()}

    cached = torch.ones(3)
    assert not {id(earlier), id(cached)} & found()  # no optimizer says which steps are one
    reach.begin_step(1)
    reach.begin_step(1)
    later = [torch.ones(4)]
    assert id(later[0]) in found()
    assert not {id(earlier), id(cached)} & found()
    reach.begin_step(2)
    assert id(later[0]) not in found()


def test_what_was_missed_in_a_training_step_is_seen_in_the_next():
    """Not every step is looked into as it begins."""
    reach = Reach()
    reach.note_data()
    steps = itertools.count(1)
    while reach.is_sure:
        reach.begin_step(next(steps))

    def found() -> set[int]:
        return {id(tensor) for tensor in reach.tensors()}

    missed = torch.ones(2)
    assert id(missed) not in found()
    assert not reach.is_sure
    reach.begin_step(next(steps))
    seen = torch.ones(3)
    assert reach.is_sure
    assert id(seen) in found()


def test_what_is_found_does_not_end_at_a_vocabulary():
    """Numbers and words are nothing to look into."""
    words, numbers = {str(n): n for n in range(20_000)}, list(range(20_000))
    reach = Reach()
    reach.note_data()
    cached = [torch.ones(2)]
    assert len(words) == len(numbers)
    assert any(tensor is cached[0] for tensor in reach.tensors())


def test_what_was_data_is_none_any_more_once_it_has_gone():
    """Another tensor may come to lie where it was."""
    data = torch.ones(1000)
    reach = Reach()
    reach.tensors()
    del data
    later = torch.zeros(1000)
    assert any(tensor is later for tensor in reach.tensors())
