"""Steps that Inductor wrote for a GPU, executed here: their memory, and their gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autoremat.elsewhere.present import can_generate_for_gpus
from tests.elsewhere.executed.cases import CASES
from tests.elsewhere.executed.memory import in_order_of_making
from tests.elsewhere.executed.outcome import outcome_of
from tests.elsewhere.executed.plans import Step
from tests.elsewhere.executed.work import Executor, Work
from tests.inductor.races import races

pytestmark = [
    pytest.mark.skipif(not can_generate_for_gpus(), reason="needs triton, and forks"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
]
_OFTEN = ("MLP", "BERT, dropout")  # each is most of a minute


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    with Executor(tmp_path_factory.mktemp("executed")) as opened:
        yield opened


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=(pytest.mark.thorough, *(() if name in _OFTEN else (pytest.mark.slow,)))
        )
        for name in CASES
    ],
)
def test_the_step_of_a_gpu_takes_what_was_read_and_gives_the_same_gradients(
    name: str, executor: Executor
):
    """Each event of the allocator is as it was read; without autocast a plan changes no bit."""
    case = CASES[name]
    outcome = outcome_of(case, executor)
    assert outcome.kernels
    unplanned = outcome.ran[0]
    for program, found in zip(outcome.programs, outcome.ran, strict=True):
        assert found.peak_nbytes == program.peak_nbytes, program.name
        assert in_order_of_making(found.events) == in_order_of_making(program.events), program.name
        assert found.operators == case.operators
        assert unplanned.gradients.keys() == found.gradients.keys()
    assert torch.allclose(unplanned.outputs[0], outcome.eager.loss, rtol=case.tolerance)
    for key, change in outcome.changes():
        assert change <= case.rounding, key
    assert max(error for _, error in outcome.errors()) <= case.tolerance
    for key in outcome.programs[0].inputs:
        assert outcome.is_left_as_in_eager(key), key


@pytest.mark.thorough
def test_values_that_wait_on_the_host_are_back_in_time(executor: Executor):
    """Copied when somebody waits, and not before: nothing that computes sees a difference.

    The events of the allocator are those that were read, and as many bytes are copied each way as
    the plan has; a walk over the code finds no race either.
    """
    torch.manual_seed(0)
    case = CASES["MLP"]
    asked = {"policy": "optimal", "budget": "min", "offload": "1GB", "link": 1e12}
    step = Step(case.model(), case.batch(), case.device, **asked)
    programs = list(step.programs())
    spec, sizes = step.subject.elsewhere, step.subject.lowered.problem.value_by_name
    assert spec is not None
    (unplanned, planned), _ = executor.run(Work(programs, step.eager.values, spec))
    program, nbytes = programs[1], sum(sizes[name].nbytes for name in step.plan.offloaded)
    assert nbytes > 0
    assert planned.copied_nbytes == {"out": nbytes, "in": nbytes}
    assert planned.peak_nbytes == program.peak_nbytes < unplanned.peak_nbytes
    assert in_order_of_making(planned.events) == in_order_of_making(program.events)
    assert races(program.forward.source) == races(program.backward.source) == []
    for name, gradient in unplanned.gradients.items():
        assert torch.equal(planned.gradients[name], gradient), name
