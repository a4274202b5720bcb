"""Copies of images and weights that Inductor makes for convolutions, and what they add up to."""

from __future__ import annotations

from collections import defaultdict
from unittest import mock

import pytest
import torch
from autoremat_solver import Plan, Solution
from torch import Tensor, nn

import autoremat
from autoremat import _torch
from autoremat.ask.options import Setting
from autoremat.cost.calls import Call, TensorSpec
from autoremat.inductor.laid_out import as_laid_out, laid_out_nbytes
from autoremat.memory.meter import resident_nbytes
from autoremat.planning.choice import Choice
from autoremat.planning.reader import Reader
from autoremat.planning.sizes import sizes_of, subject_at
from tests.joint_graphs import subject_of

INDUCTOR = Setting(compiler="inductor")
IMAGE_NBYTES = 4 * 2 * 3 * 32 * 32
WEIGHT_NBYTES = 4 * 8 * 3 * 3 * 3


class Convolutions(nn.Module):
    """Three by three, and one by one: that lies in both ways at once."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x).relu()).square().sum()


def image() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def copied(model: nn.Module, given: Tensor, setting: Setting = INDUCTOR) -> list[int]:
    """Bytes of the copies in a problem."""
    problem = subject_of(model, given, setting).lowered.problem
    names = [name for name in problem.outputs if name.endswith("with channels last")]
    return sorted(problem.value_by_name[name].nbytes for name in names)


def test_what_does_not_lie_with_channels_last_is_copied_once():
    """The image and the weight of three by three."""
    assert copied(Convolutions(), image()) == [WEIGHT_NBYTES, IMAGE_NBYTES]


def test_what_lies_with_channels_last_is_not_copied():
    """As users of convolutions are told to keep it."""
    model = Convolutions().to(memory_format=torch.channels_last)
    assert copied(model, image().to(memory_format=torch.channels_last)) == []
    assert copied(model, image()) == [IMAGE_NBYTES]


def test_what_others_have_made_is_not_copied():
    """They make it with channels last."""

    class Scaled(Convolutions):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 2.0)

    assert copied(Scaled(), image()) == [WEIGHT_NBYTES]


def test_what_the_backward_does_not_read_ends_with_the_convolution():
    """Nobody asks for the gradients of a frozen one: its copies are its workspace."""
    model = Convolutions()
    model.wide.requires_grad_(False)
    assert copied(model, image()) == []
    problems = [
        subject_of(net, image(), INDUCTOR).lowered.problem for net in (model, Convolutions())
    ]
    workspaces = [{op.name: op.workspace_nbytes for op in problem.ops} for problem in problems]
    more = {name: n - workspaces[1].get(name, n) for name, n in workspaces[0].items()}
    assert more.pop("convolution") == WEIGHT_NBYTES + IMAGE_NBYTES


def test_volumes_are_read_as_they_are():
    """Inductor lays out images."""
    volume = torch.randn(1, 2, 8, 8, 8)
    assert copied(nn.Sequential(nn.Conv3d(2, 3, 3), nn.Tanh()), volume) == []


def test_a_copy_grows_with_the_batch():
    """That of the image; the weight's stays."""
    given = image()
    torch._dynamo.mark_dynamic(given, 0)
    subject = subject_of(Convolutions(), given, INDUCTOR)
    (symbol, size), *_ = sizes_of(subject).items()
    values = subject_at(subject, {symbol: 3 * size}).lowered.problem.values
    assert laid_out_nbytes(subject.lowered.problem.values) == WEIGHT_NBYTES + IMAGE_NBYTES
    assert laid_out_nbytes(values) == WEIGHT_NBYTES + 3 * IMAGE_NBYTES


def test_nothing_is_copied_op_by_op_or_where_the_user_forbids_it():
    """Torch's own convolution reads what there is."""
    assert copied(Convolutions(), image(), Setting(compiler="eager")) == []
    with torch._inductor.config.patch(layout_optimization=False):
        assert copied(Convolutions(), image()) == []


def test_without_convolutions_there_is_nothing_to_lay_out():
    """A linear layer."""
    subject = subject_of(nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4), INDUCTOR)
    assert not _torch.prefers_channels_last(subject.joint.forward)


class Normed(nn.Module):
    """Convolutions, each with a norm over groups."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for _ in range(layers):
            self.layers.extend([nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU()])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.mark.inductor
def test_what_norms_over_groups_take_is_read_about_as_it_is_modelled():
    """Where some of it is recomputed."""
    given = torch.randn(4, 8, 64, 64, generator=torch.Generator().manual_seed(1))
    model = Normed()
    resident = resident_nbytes(model, given)
    unplanned = autoremat.plan(model, given, budget=1 << 40, verbose=False).predicted_peak_nbytes
    budget = resident + (unplanned - resident) * 9 // 10
    found = autoremat.plan(model, given, budget=budget, verbose=False)
    timeline = found.graphs[0].timeline
    assert timeline is not None
    read, modelled = found.predicted_peak_nbytes - resident, timeline.peak_nbytes - resident
    assert modelled == pytest.approx(read, rel=0.01)


@pytest.mark.thorough
@pytest.mark.inductor
def test_plans_of_convolutions_are_read_in_both_forms_and_the_leanest_is_found():
    """Loops made where a plan has them, or where they are first read: either may take less."""
    given = torch.randn(4, 8, 32, 32, generator=torch.Generator().manual_seed(1))
    read: defaultdict[Plan, dict[bool, Choice]] = defaultdict(dict)
    written = Reader.written

    def noted(self: Reader, solution: Solution, *, in_order: bool) -> Choice:
        read[solution.plan][in_order] = written(self, solution, in_order=in_order)
        return read[solution.plan][in_order]

    with mock.patch.object(Reader, "written", noted):
        found = autoremat.plan(Normed(3), given, budget="min", verbose=False, time_limit=1.0)
    both = [ways for ways in read.values() if len(ways) == 2]
    assert any(ways[False].needed_nbytes != ways[True].needed_nbytes for ways in both)
    # Which of the two is faster depends on the plans that a second finds, and on the machine.
    assert any(ways[False].code_us != ways[True].code_us for ways in both)
    taken = min(way.needed_nbytes for ways in read.values() for way in ways.values())
    assert found.predicted_peak_nbytes == taken


def test_convolutions_are_measured_as_they_are_called():
    """With the channels last; other operators as the graph has them."""
    spec = TensorSpec((2, 3, 8, 8), (192, 64, 8, 1), torch.float32, torch.device("cpu"))
    weight = TensorSpec((4, 3, 3, 3), (27, 9, 3, 1), torch.float32, torch.device("cpu"))
    aten = torch.ops.aten
    call = Call(aten.convolution.default, (spec, weight, None, [1, 1]), {}, (spec,), (1536,))
    laid_out = as_laid_out(call)
    assert [s.stride for s in laid_out.inputs] == [(192, 1, 24, 3), (27, 1, 9, 3)]
    assert laid_out.outputs[0].stride == (192, 1, 24, 3)
    assert laid_out.args[2:] == call.args[2:]
    relu = Call(aten.relu.default, (spec,), {}, (spec,), (1536,))
    assert as_laid_out(relu) == relu


class Patches(nn.Module):
    """A large image, of which little is made."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 2, 8, stride=8)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x).tanh().square().sum()


@pytest.mark.inductor
def test_the_copy_is_read_in_the_generated_code():
    """The peak is next to nothing but the copy of the image."""
    given = torch.randn(4, 3, 128, 128, generator=torch.Generator().manual_seed(1))
    model = Patches()
    found = autoremat.plan(model, given, budget=1 << 40, policy="save-all", verbose=False)
    timeline = found.graphs[0].timeline
    assert timeline is not None
    resident = resident_nbytes(model, given)
    read, modelled = found.predicted_peak_nbytes - resident, timeline.peak_nbytes - resident
    assert read > given.nbytes
    assert modelled == pytest.approx(read, rel=0.1)
