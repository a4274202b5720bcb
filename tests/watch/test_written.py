"""A moving average of the weights counts, whoever keeps it and however; a model in training not."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import autoremat
from autoremat.memory.meter import measure_peak, resident_nbytes, state_of
from autoremat.watch.written import Written
from tests.tiny import Chain, many_rows
from tests.training import make_seeded
from tests.watch.test_reach import OPTIONS, told

BATCH = many_rows(256)
LAYERS = 12


def chain() -> nn.Module:
    """The same each time."""
    return make_seeded(lambda: Chain(LAYERS))


# --- averages, as training code keeps them --------------------------------------------------------


class Torchs:
    """Torch's own, which is in training mode and of parameters that need gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.average = AveragedModel(model)

    def update(self, model: nn.Module) -> None:
        """After the optimizer's step."""
        self.average.update_parameters(model)


class InModule:
    """A copy that nobody has frozen."""

    def __init__(self, model: nn.Module) -> None:
        self.average = copy.deepcopy(model)

    def update(self, model: nn.Module) -> None:
        """After the optimizer's step."""
        with torch.no_grad():
            for mine, theirs in zip(self.average.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)


class InList:
    """Single tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.shadows = [parameter.detach().clone() for parameter in model.parameters()]

    def update(self, model: nn.Module) -> None:
        """After the optimizer's step."""
        torch._foreach_lerp_(self.shadows, [p.detach() for p in model.parameters()], 0.1)


class ByName(InList):
    """In a dict, each written by itself."""

    def __init__(self, model: nn.Module) -> None:
        self.shadows = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        """After the optimizer's step."""
        for name, parameter in model.named_parameters():
            self.shadows[name].mul_(0.9).add_(parameter.detach(), alpha=0.1)


def nbytes_of(model: nn.Module) -> int:
    """Of its parameters."""
    return sum(parameter.nbytes for parameter in model.parameters())


def trainer_of(model: nn.Module, average: object) -> Callable[[], None]:
    """A step that keeps an average, as a method or a closure of a training loop has it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step() -> None:
        optimizer.zero_grad()
        model(BATCH).backward()
        optimizer.step()
        average.update(model)

    step.optimizer = optimizer
    return step


def peak_of(model: nn.Module, average: object, step: Callable[[], None]) -> int:
    """Measured bytes of a step with what is there before it, the average included."""
    model.zero_grad(set_to_none=True)
    held = resident_nbytes(model, BATCH) + sum(t.nbytes for t in state_of([step.optimizer]))
    return held + nbytes_of(model) + measure_peak(step, device="cpu")


@pytest.mark.parametrize("keep", [Torchs, InModule, InList, ByName])
def test_an_average_of_before_the_first_step_is_planned_for(keep: Callable[[nn.Module], object]):
    """As much as the parameters, and nobody has told of it; once it was written to, it counts."""
    plain = chain()
    average = keep(plain)
    step = trainer_of(plain, average)
    step()
    budget = int(0.7 * peak_of(plain, average, step))
    model = chain()
    average = keep(model)
    autoremat.optimize(model, budget, **OPTIONS)
    step = trainer_of(model, average)
    for _ in range(3):
        told(step)
    peaks: list[int] = []
    assert not told(lambda: peaks.append(peak_of(model, average, step)))
    assert max(peaks) <= budget


def test_a_model_that_an_optimizer_steps_beside_is_not_the_step_s():
    """Its weights are written to as an average's are, but by an optimizer of its own."""
    twin, model = chain(), chain()
    optimizer = torch.optim.AdamW(twin.parameters())
    reports: list[autoremat.Report] = []
    autoremat.optimize(model, "1GB", **OPTIONS)
    for _ in range(4):
        twin(BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
        model(BATCH).backward()
        reports.append(autoremat.report(model))
        model.zero_grad()
    assert reports[-1].predicted_peak_nbytes == reports[0].predicted_peak_nbytes


# --- what is written to ---------------------------------------------------------------------------


def test_what_was_written_to_since_it_was_seen_is_found():
    """By whatever alias; what was only read is not."""
    read, written, late = torch.ones(2), torch.ones(2), torch.ones(2)
    tensors = [read, written, late]
    known = Written()
    known.note(tensors[:2])
    written.detach()[:1].add_(1)
    late.add_(1)  # before it is seen for the first time
    assert [id(t) for t in known.among(tensors)] == [id(written)]
    late.add_(1)
    assert [id(t) for t in known.among(tensors)] == [id(written), id(late)]


def test_what_is_trained_is_not_found():
    """By an optimizer, whose state is written to as well; or by hand, where it has a gradient."""
    stepped, by_hand = (torch.ones(2, requires_grad=True) for _ in range(2))
    autoremat.optimize(chain(), "1GB", **OPTIONS)  # steps are watched from here on
    optimizer = torch.optim.SGD([stepped], lr=0.1, momentum=0.9)
    known = Written()
    (stepped.sum() + by_hand.sum()).backward()
    optimizer.step()
    (momentum,) = (state["momentum_buffer"] for state in optimizer.state.values())
    tensors = [stepped, by_hand, momentum]
    known.note(tensors)
    optimizer.step()
    with torch.no_grad():
        by_hand -= 0.1 * by_hand.grad
    optimizer.zero_grad()
    assert not known.among(tensors)
    by_hand.grad = None  # nothing shows any more that it is trained
    assert known.among(tensors) == [by_hand]


def test_an_average_is_a_module_of_which_all_is_written_to_and_nothing_is_trained():
    """Not a twin that is trained by hand, a part of which is frozen and merged into."""
    twin, average, both = chain(), chain(), chain()
    twin.layers[0].requires_grad_(False)
    known = Written()
    assert not known.averages([twin, average])
    twin(BATCH).backward()
    with torch.no_grad():
        twin.layers[0].weight.add_(1)
        for parameter in average.parameters():
            parameter.add_(1)
    assert known.averages([twin, average]) == [average]
    both.average, both.twin, both.torchs = average, twin, AveragedModel(average)
    assert known.averages([both]) == [average, both.torchs]


def test_nothing_is_kept_alive():
    """A tensor that is gone is forgotten."""
    known = Written()
    gone = torch.ones(2)
    reference = weakref.ref(gone)
    known.note([gone])
    del gone
    assert reference() is None
    assert not known._versions
