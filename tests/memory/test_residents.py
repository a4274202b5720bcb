"""What is resident, by parts: in training, offline, behind the backend; whose the optimizer is."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat
import autoremat.backend
from autoremat.memory.fake_twin import Faker
from autoremat.memory.held_tensors import held_tensors
from autoremat.memory.meter import resident_parts
from autoremat.memory.optimizer_memory import optimizer_footprint
from autoremat.memory.optimizers import layers_of
from autoremat.memory.residents import GivenToGraphs
from autoremat.memory.storage_sizes import rounded_nbytes
from autoremat.reporting import ResidentParts
from tests.tiny import WIDTH, Residual, rows
from tests.training import UNBOUNDED, optimized, step

CONSTANT = torch.eye(WIDTH)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")

# Dynamo looks at `.grad` of what it resumes with after a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Normed(nn.Module):
    """Two layers of one weight, a buffer for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))) + self.shift).square().mean()


class Broken(Normed):
    """A graph break in the middle: the second graph has a parameter that the first has not."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))) + self.shift)
        torch._dynamo.graph_break()
        return self.third(x).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def weights(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


# --- the parts ---------------------------------------------------------------------------------


def test_each_storage_counts_once_in_the_first_part_that_holds_it():
    """A tied weight, a batch that holds a parameter, state that exists: the total is their sum."""
    model = Normed()
    optimizer = adamw(model)
    model(rows()).backward()
    optimizer.step()
    batch = (rows(), model.first.weight, model.shift)
    parts = resident_parts(model, batch, optimizer, CPU)
    weight = model.first.weight.nbytes
    steps = sum(state["step"].nbytes for state in optimizer.state.values())
    assert parts == ResidentParts(
        parameters_nbytes=weight,
        gradients_nbytes=weight,
        optimizer_nbytes=2 * weight + steps,
        buffers_nbytes=model.shift.nbytes,
        batch_nbytes=rows().nbytes,
    )
    assert parts.nbytes == autoremat.resident_nbytes(model, batch, optimizer)


def reported(model: nn.Module) -> autoremat.Report:
    step(model, (rows(),))
    return autoremat.report(model)


def test_training_and_offline_plans_report_the_same_parts():
    """Adam's state counts before it exists; without the optimizer the report says that it lacks."""
    model = Normed()
    offline = autoremat.plan(
        model, rows(), budget=UNBOUNDED, optimizer=adamw(model), compiler="eager", verbose=False
    )
    trained = optimized(Normed, UNBOUNDED)
    assert "made without an optimizer" in reported(trained).summary()
    optimizer = adamw(trained)
    autoremat.optimize(trained, UNBOUNDED, optimizer=optimizer, compiler="eager", verbose=False)
    trained.zero_grad(set_to_none=True)
    real = reported(trained)
    assert real.resident == offline.resident
    assert real.resident.optimizer_nbytes >= 2 * weights(trained)
    for report in (real, offline):
        assert report.optimizer == "AdamW"
        assert "without an optimizer" not in report.summary() + report.to_html()
        assert "optimizer state" in report.summary()
        assert "optimizer state (AdamW)" in report.to_html()


def test_a_step_of_several_graphs_has_its_resident_bytes_once():
    """What earlier graphs hold where the step peaks is a part of its own."""
    model = optimized(Broken, UNBOUNDED)
    report = reported(model)
    assert len(report.graphs) == 2
    without = ResidentParts(
        parameters_nbytes=weights(model),
        buffers_nbytes=model.shift.nbytes,
        batch_nbytes=rows().nbytes,
    )
    assert report.resident_nbytes == without.nbytes + report.resident.others_nbytes
    assert report.resident.parameters_nbytes == without.parameters_nbytes
    assert report.peak_graph is not None
    assert report.peak_graph.timeline is not None
    assert report.peak_graph.timeline.resident_nbytes == report.resident_nbytes


class HoldsTensor(Normed):
    """With a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.table)


def test_a_table_that_is_no_buffer_counts_as_one():
    """A plain attribute stays as buffers do: predicted and measured bytes both have it."""
    model = optimized(HoldsTensor, UNBOUNDED)
    report = reported(model)
    assert report.resident.buffers_nbytes == model.table.nbytes + model.shift.nbytes
    assert report.resident.others_nbytes == 0
    result = autoremat.verify(model, rows())
    assert result.measured_peak_nbytes == result.predicted_peak_nbytes
    assert resident_parts(HoldsTensor(), rows(), None, CPU) == report.resident


def test_what_a_step_has_left_on_a_module_with_its_graph_is_no_table():
    """It is the step's own, and goes when the next step replaces it."""
    model = HoldsTensor()
    model.last = model(rows())
    assert resident_parts(model, rows(), None, CPU) == resident_parts(
        HoldsTensor(), rows(), None, CPU
    )


class ReadsConstant(Residual):
    """Beside its layers it reads a tensor of the module that it is written in."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ CONSTANT)


def test_a_tensor_that_is_neither_of_the_model_nor_of_the_batch_is_held_by_others():
    """A global: the graph reads it, so it is there."""
    report = reported(optimized(ReadsConstant, UNBOUNDED))
    assert report.resident.others_nbytes == CONSTANT.nbytes


# --- behind the backend ------------------------------------------------------------------------


def behind_backend(model: nn.Module) -> ResidentParts:
    torch._dynamo.reset()
    options = {"budget": UNBOUNDED, "compiler": "eager", "verbose": False}
    compiled = torch.compile(model, backend=autoremat.backend.autoremat, options=options)
    compiled(rows()).backward()
    session = autoremat.backend._sessions[id(options)]
    return session.report().resident


def test_the_backend_tells_parameters_from_buffers_and_batch():
    """With no model to ask, what Dynamo hands over is enough."""
    model = Normed()
    assert behind_backend(model) == resident_parts(Normed(), rows(), None, CPU)


def test_the_backend_counts_the_parameters_of_all_graphs():
    """Those of the first graph stay while the second one runs."""
    parts = behind_backend(Broken())
    assert parts.parameters_nbytes == weights(Broken())
    assert parts.batch_nbytes == rows().nbytes


def test_what_graphs_were_given_is_not_held():
    """A model that is gone counts no more."""
    given, model, x = GivenToGraphs(), Normed(), rows()
    torch._dynamo.mark_static_address(model.first.weight)
    graph = torch.fx.symbolic_trace(nn.Identity())
    given.note(graph, [*model.parameters(), x], is_first=True)
    assert given.resident(CPU).nbytes == weights(model) + x.nbytes
    del model
    gc.collect()
    assert given.resident(CPU).nbytes == x.nbytes


# --- the optimizer -----------------------------------------------------------------------------


class Wrapped(torch.optim.Optimizer):
    """As accelerate wraps: an optimizer whose groups and state are those of the one inside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.may_step = False

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.may_step:
            self.optimizer.step(closure)


class Around:
    """As DeepSpeed and Lightning wrap: no optimizer itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer


WRAPPERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "wrapped": Wrapped,
    "around": Around,
    "twice": lambda optimizer: Wrapped(Wrapped(optimizer)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapped_optimizer_counts_as_the_one_inside(wrap: Callable[..., Any]):
    """State that is to come, and state that exists."""
    model = Normed()
    bare = adamw(model)
    assert optimizer_footprint(wrap(bare)) == optimizer_footprint(bare)
    assert optimizer_footprint(bare).state_nbytes >= 2 * weights(model)
    model(rows()).backward()
    bare.step()
    wrapped = resident_parts(model, (), wrap(bare), CPU)
    assert wrapped == resident_parts(model, (), bare, CPU)
    assert wrapped.optimizer_nbytes >= 2 * weights(model)


def test_an_optimizer_that_accelerate_has_prepared_counts():
    """Its state is in the plan before it exists."""
    accelerate = pytest.importorskip("accelerate")
    model = Normed()
    optimizer = accelerate.Accelerator(cpu=True).prepare_optimizer(adamw(model))
    asked: dict[str, Any] = {"budget": UNBOUNDED, "compiler": "eager", "verbose": False}
    report = autoremat.plan(model, rows(), optimizer=optimizer, **asked)
    assert report.resident.optimizer_nbytes >= 2 * weights(model)
    assert report.optimizer == "AdamW"


def test_an_optimizer_that_wraps_itself_ends():
    """A cycle of wrappers is walked once."""
    wrapped = Wrapped(adamw(Normed()))
    inner = wrapped.optimizer
    inner.optimizer = wrapped  # type: ignore[attr-defined]
    assert layers_of(wrapped) == [wrapped, inner]


class Idle(torch.optim.SGD):
    """Whose step leaves the parameters alone, as a wrapper that we do not know."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure


class Apart(torch.optim.SGD):
    """Whose state is not in `state`."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        self.moments = [torch.zeros_like(p) for p in params]
        with torch.no_grad():
            for p in params:
                p.data.sub_(p.grad)


def test_a_step_that_changes_no_parameter_is_not_taken_for_one_without_state():
    """The figures are cautious then; plain SGD changes them, and needs no state."""
    model = Normed()
    idle = optimizer_footprint(Idle(model.parameters(), lr=0.1))
    assert idle.state_nbytes == 2 * weights(model)
    plain = optimizer_footprint(torch.optim.SGD(model.parameters(), lr=0.1))
    assert plain.state_nbytes == 0


def test_state_outside_of_the_optimizers_dict_counts():
    """What lives on after the step stays, wherever it is kept."""
    model = Normed()
    assert optimizer_footprint(Apart(model.parameters())).state_nbytes == weights(model)


@pytest.mark.parametrize("wrap", [lambda o: o, *WRAPPERS.values()], ids=["bare", *WRAPPERS])
def test_the_optimizer_of_another_model_is_refused(wrap: Callable[..., Any]):
    """Such as of the model before it was copied; in training and offline."""
    before = Residual()
    model, optimizer = copy.deepcopy(before), wrap(adamw(before))
    words = r"None of the optimizer's \d+ parameters is among the model's \d+.*Make the optimizer"
    with pytest.raises(ValueError, match=words):
        autoremat.optimize(model, UNBOUNDED, optimizer=optimizer)
    with pytest.raises(ValueError, match=words):
        autoremat.plan(model, rows(), budget=UNBOUNDED, optimizer=optimizer)
    assert model._compiled_call_impl is None


def test_what_is_no_optimizer_is_refused():
    """The message says what is expected."""
    model = Residual()
    for given in (model, [adamw(model), model]):
        with pytest.raises(TypeError, match=r"torch.optim.Optimizer.*not Residual"):
            autoremat.optimize(model, UNBOUNDED, optimizer=given)  # type: ignore[arg-type]


def test_copies_in_higher_precision_are_the_models():
    """Mixed precision by hand: the optimizer steps float32 copies of a half-precision model."""
    model = Residual().bfloat16()
    copies = [p.detach().float().requires_grad_() for p in model.parameters()]
    autoremat.optimize(model, UNBOUNDED, optimizer=torch.optim.AdamW(copies), verbose=False)
    parts = resident_parts(model, (), torch.optim.AdamW(copies), CPU)
    assert parts.others_nbytes == sum(p.nbytes for p in copies)


def test_what_else_an_optimizer_steps_is_told_by_what_it_is():
    """The parameters of a second model, as large as those of the first, are none of the first's."""
    model, other = Residual(), Residual()
    both = torch.optim.SGD([*model.parameters(), *other.parameters()])
    faker = Faker(CUDA)
    given = faker.model(model), faker.values((rows(),)), model, both, CUDA
    sizes = [rounded_nbytes(p.nbytes, CUDA) for p in both.param_groups[0]["params"]]
    assert sorted(held_tensors(*given).before) == sorted(sizes)


@pytest.mark.parametrize("offline", [False, True])
def test_an_optimizer_of_two_models_counts_for_each(offline: bool):
    """The step holds the other one's parameters, and both states."""
    model, other = optimized(Normed, UNBOUNDED), Residual()
    both = torch.optim.AdamW([*model.parameters(), *other.parameters()])
    asked: dict[str, Any] = {"optimizer": both, "compiler": "eager", "verbose": False}
    if offline:
        report = autoremat.plan(model, rows(), budget=UNBOUNDED, **asked)
    else:
        report = reported(autoremat.optimize(model, UNBOUNDED, **asked))
    assert report.resident.others_nbytes == weights(other)
    assert report.resident.optimizer_nbytes >= 2 * (weights(model) + weights(other))
