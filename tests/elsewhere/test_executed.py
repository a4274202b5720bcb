"""Steps that Inductor wrote for a GPU, executed here: their memory, and their gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autoremat.elsewhere.present import can_generate_for_gpus
from tests.elsewhere.executed.cases import MLP, batch
from tests.elsewhere.executed.memory import in_order_of_making
from tests.elsewhere.executed.plans import Step
from tests.elsewhere.executed.work import Work, executed

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not can_generate_for_gpus(), reason="needs triton, and forks"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
]


def test_the_step_of_a_gpu_takes_what_was_read_and_gives_the_same_gradients(tmp_path: Path):
    """Each event of the allocator is the one that was read; the plan changes no bit."""
    torch.manual_seed(0)
    step = Step(MLP(), batch(), "H100")
    programs = list(step.programs())
    spec = step.subject.elsewhere
    assert spec is not None
    ran, kernels = executed(Work(programs, step.eager.values, spec), tmp_path / "work")
    assert kernels
    unplanned = ran[0]
    for program, found in zip(programs, ran, strict=True):
        assert found.peak_nbytes == program.peak_nbytes, program.name
        assert in_order_of_making(found.events) == in_order_of_making(program.events), program.name
        assert unplanned.gradients.keys() == found.gradients.keys()
        for name, gradient in unplanned.gradients.items():
            assert torch.equal(gradient, found.gradients[name]), f"{name} of {program.name}"
    assert torch.allclose(unplanned.outputs[0], step.eager.loss)
    for name, eager in zip(programs[0].inputs, step.eager.gradients, strict=True):
        if eager is not None:
            error = (unplanned.gradients[name] - eager).abs().max()
            assert error <= 1e-6 * eager.abs().max(), name
