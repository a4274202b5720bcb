"""What code in eager mode takes while graphs wait for their backward is found, and planned for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from autoremat import _torch
from autoremat.memory.meter import measure_peak
from autoremat.memory.storage_sizes import storage_identities
from autoremat.watch import between, ledger
from autoremat.watch.between import Between
from tests.training import told
from tests.watch.test_reach import BATCH, encoder_of, frozen, optimised, whole_peak

CPU = torch.device("cpu")
ROW_NBYTES = 1024  # of 256 numbers


@pytest.fixture(autouse=True)
def no_mode_stays() -> Iterator[None]:
    """What looks on is off once the step is over."""
    yield
    assert not _torch.dispatch_modes()


class Run:
    """What waits for its backward."""


def rows(count: int) -> Tensor:
    """So many kibibytes."""
    return torch.ones(count, ROW_NBYTES // 4)


def watched(code: Callable[[], object], live_nbytes: int = 0) -> int:
    """The peak of some code between two events."""
    found, run = Between(), Run()
    assert between.may_begin()
    found.begin(live_nbytes, CPU, run)
    code()
    between.close()
    return found.taken()


# --- what is seen ------------------------------------------------------------------------------


def test_what_takes_the_place_of_something_given_counts():
    """What tells storages apart is where they are, and that may be where another one was."""
    given = [rows(1) for _ in range(64)]
    places = storage_identities(given)
    made: list[Tensor] = []

    def code() -> None:
        torch.cat(given)
        given.clear()
        made.extend(torch.ones(1, ROW_NBYTES // 4) for _ in range(256))

    peak_nbytes = watched(code)
    assert not places.isdisjoint(storage_identities(made))  # else this shows nothing
    assert peak_nbytes >= 256 * ROW_NBYTES


LOSSES = (
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.huber_loss,
    F.l1_loss,
    F.mse_loss,
    F.smooth_l1_loss,
    F.soft_margin_loss,
)


@pytest.mark.parametrize("loss_of", LOSSES, ids=lambda loss_of: loss_of.__name__)
def test_what_a_loss_takes_for_itself_counts(loss_of: Callable[[Tensor, Tensor], Tensor]):
    """No result of its operators shows it, and memory does."""
    scores, targets = rows(64).requires_grad_(), rows(64)
    kept: list[Tensor] = []

    def code() -> None:
        kept.append(loss_of(scores, targets))

    assert watched(code) == pytest.approx(measure_peak(code, device="cpu"), abs=ROW_NBYTES)


def test_a_logarithm_of_a_sum_counts_what_it_takes_for_itself():
    """As large as what it is given, as losses that are written out take it."""
    scores = rows(64)
    peak_nbytes = measure_peak(lambda: scores.logsumexp(1), device="cpu")
    assert watched(lambda: scores.logsumexp(1)) == pytest.approx(peak_nbytes, abs=ROW_NBYTES)


def test_the_most_that_was_live_counts():
    """Not what is left, nor the sum."""
    given = rows(8)

    def code() -> None:
        for _ in range(3):
            (given * 2 + given).sum()

    assert 2 * given.nbytes <= watched(code) < 2 * given.nbytes + ROW_NBYTES
    assert 3 * given.nbytes <= watched(code, live_nbytes=given.nbytes)


def test_of_several_times_the_highest_counts_and_is_taken_once():
    """A step has one between each two graphs."""
    found, run = Between(), Run()
    for count in (1, 4, 2):
        found.begin(0, CPU, run)
        rows(count)
        between.close()
    rows(16)  # nobody looks
    assert found.taken() == 4 * ROW_NBYTES
    assert found.taken() == 0


def test_what_somebody_still_holds_counts_until_it_is_let_go_or_another_step_begins():
    """Whatever holds it: here a list that no variable of a function names."""
    found, run, kept = Between(), Run(), list[Tensor]()
    for count in (2, 3):
        found.begin(0, CPU, run)
        kept.append(rows(count))
        rows(8)
        between.close()
    kept.append(rows(16))  # nobody looks
    assert sum(found.held().values()) == 5 * ROW_NBYTES
    del kept[0]
    assert sum(found.held().values()) == 3 * ROW_NBYTES
    found.step_begins()
    assert not found.held()


def test_compiled_code_runs_as_it_would_without():
    """Also one that is compiled only then, and an operator of higher order."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    function = torch.compile(lambda x: (x * 2).sin(), backend=backend)
    given, results = rows(2), list[Tensor]()

    def code() -> None:
        results.append(function(given))
        results.append(torch.cond(given.sum() > 0, torch.sin, torch.cos, (given,)))

    assert watched(code) >= 2 * given.nbytes
    assert len(graphs) == 1
    assert torch.equal(results[0], (given * 2).sin())
    assert torch.equal(results[1], given.sin())


def test_what_is_not_real_counts_as_nothing():
    """Fake tensors, as those that sizes are tried with."""

    def code() -> None:
        with _torch.FakeTensorMode():
            rows(64) * 2

    assert watched(code) == 0


def test_nothing_is_seen_once_the_run_is_gone():
    """Its results were dropped: no backward comes."""
    found, run = Between(), Run()
    found.begin(0, CPU, run)
    rows(1)
    del run
    assert not _torch.dispatch_modes()
    rows(4)
    between.close()
    assert found.taken() == 0


# --- modes of the user's -----------------------------------------------------------------------


def test_nothing_is_seen_inside_of_a_mode_of_the_users():
    """They end theirs while ours would be on: it is theirs that would stay."""
    with FlopCounterMode(display=False):
        assert not between.may_begin()
    assert between.may_begin()


def test_a_mode_that_is_on_when_the_next_event_comes_ends_first():
    """Ours no longer counts then, and goes with the event after."""
    found, run = Between(), Run()
    found.begin(0, CPU, run)
    with FlopCounterMode(display=False) as theirs:
        rows(2)
        between.close()
        rows(4)
        assert _torch.dispatch_modes()[-1] is theirs.mode
        assert not between.may_begin()
    assert found.taken() == 2 * ROW_NBYTES
    between.close()
    assert between.may_begin()


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda x: torch.autograd.grad(x.sin(), x, torch.eye(4), is_grads_batched=True),
        lambda x: torch.func.jacrev(torch.sin)(x.detach()),
        lambda x: torch.func.grad(lambda y: y.sin().sum())(x.detach()),
    ],
    ids=["batched", "jacobian", "of a function"],
)
def test_a_backward_may_be_given_what_has_no_storage(differentiate: Callable[[Tensor], object]):
    """As functorch's wrappers are: the event comes all the same."""
    ledger._watch()
    found, run = Between(), Run()
    found.begin(0, CPU, run)
    differentiate(torch.ones(4, requires_grad=True))
    between.close()
    assert between.may_begin()


# --- steps -------------------------------------------------------------------------------------


def wide(result: Tensor) -> Tensor:
    """A moment of much memory, as logits take more than what they are of."""
    return torch.cat([result] * 8, 1).softmax(-1)[:, : result.shape[1]].clone()


def after_the_model(encoder: nn.Module, reference: nn.Module) -> None:
    """A reference that runs while the model waits for its backward."""
    encoder.zero_grad(set_to_none=True)
    result = encoder(BATCH)
    with torch.no_grad():
        target = wide(reference(BATCH))
    F.mse_loss(result, target).backward()


def after_its_own_reference(encoder: nn.Module, _reference: nn.Module) -> None:
    """The model is the reference, too, as where adapters are switched off for it."""
    encoder.zero_grad(set_to_none=True)
    result = encoder(BATCH)
    with torch.no_grad():
        target = encoder(BATCH)
        target = wide(target)
    F.mse_loss(result, target).backward()


def beside_what_is_saved(encoder: nn.Module, _reference: nn.Module) -> None:
    """Code in eager mode has saved something before the moment comes."""
    encoder.zero_grad(set_to_none=True)
    inner = encoder(BATCH)
    result = encoder(torch.cat([inner] * 4, 1).exp()[:, : inner.shape[1]])
    with torch.no_grad():
        target = wide(result)
    F.mse_loss(result, target).backward()


def losses_one_by_one(encoder: nn.Module, _reference: nn.Module) -> None:
    """What waits for the later ones is behind no variable as the first goes backward."""
    encoder.zero_grad(set_to_none=True)
    for loss in [wide(encoder(BATCH)).square().mean() for _ in range(3)]:
        loss.backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("share", [0.9, 0.8])
@pytest.mark.parametrize(
    "form",
    [
        after_the_model,
        after_its_own_reference,
        beside_what_is_saved,
        losses_one_by_one,
    ],
)
def test_what_runs_before_the_backward_is_planned_for(
    form: Callable[[nn.Module, nn.Module], None], share: float
):
    """What it needs for a moment may be the step's peak: found in the first, kept from then on."""
    reference = frozen()

    def step(encoder: nn.Module) -> None:
        form(encoder, reference)

    plain = encoder_of()
    step(plain)
    budget = int(share * whole_peak(plain, step, reference))
    encoder = optimised(budget)
    assert all(over.is_planned_anew for over in told(lambda: step(encoder)))
    for _ in range(2):
        assert not told(lambda: step(encoder))
    assert 0.85 * budget <= whole_peak(encoder, step, reference) <= budget
    for mine, theirs in zip(encoder.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def after_its_own_large_reference(encoder: nn.Module, _reference: nn.Module) -> None:
    """What runs without gradients is a graph of its own."""
    encoder.zero_grad(set_to_none=True)
    result = encoder(BATCH)
    with torch.no_grad():
        target = encoder(torch.cat([BATCH] * 3))[: len(BATCH)]
    F.mse_loss(result, target).backward()


@pytest.mark.parametrize("form", [after_the_model, after_its_own_large_reference])
def test_a_backend_looks_on_as_well(form: Callable[[nn.Module, nn.Module], None]):
    """What its graphs are parts of returns before there is anything to see."""
    reference = frozen()

    def step(encoder: nn.Module) -> None:
        form(encoder, reference)

    plain = encoder_of()
    step(plain)
    budget = int(0.85 * whole_peak(plain, step, reference))
    options = {"budget": budget, "compiler": "eager", "verbose": False}
    encoder = torch.compile(encoder_of(), backend="autoremat", options=options, dynamic=False)
    assert told(lambda: step(encoder)) + told(lambda: step(encoder))
    told(lambda: step(encoder))
    assert not told(lambda: step(encoder))
    assert 0.85 * budget <= whole_peak(encoder, step, reference) <= budget


def test_a_moment_is_told_of_with_what_a_head_has_saved_before_it():
    """That is on the way to no graph as the model is its own reference, for a larger batch."""

    def step(encoder: nn.Module) -> None:
        encoder.zero_grad(set_to_none=True)
        result = wide(encoder(BATCH))
        with torch.no_grad():
            target = encoder(torch.cat([BATCH] * 24))[: len(BATCH)]
        F.mse_loss(result, target).backward()

    plain = encoder_of()
    step(plain)
    encoder = optimised(int(0.8 * whole_peak(plain, step)))
    told(lambda: step(encoder))
    (above,) = told(lambda: step(encoder))  # no plan makes that moment less
    assert above.predicted_nbytes == pytest.approx(whole_peak(encoder, step), rel=0.02)


def test_a_step_that_is_given_up_looks_on_until_the_next_call():
    """An error between forward and backward, and somebody holds what was made."""
    encoder = optimised(1 << 30)
    held = encoder(BATCH)
    assert len(_torch.dispatch_modes()) == 1
    encoder(BATCH).sum().backward()
    assert not _torch.dispatch_modes()
    del held


def test_a_step_whose_results_are_dropped_looks_on_at_nothing():
    """As one that only warms up."""
    encoder = optimised(1 << 30)
    encoder(BATCH)
    assert not _torch.dispatch_modes()
