"""The backend of `torch.compile`: one session for each model, for as long as it is needed."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat.backend import _sessions
from autoremat.session.session import Session
from tests.tiny import Chain, rows


def options() -> dict[str, object]:
    """Of one model."""
    return {"budget": "1GB", "compiler": "eager", "verbose": False, "time_limit": 0.5}


def train() -> None:
    """A model that is compiled, trained for a step and dropped."""
    model = torch.compile(Chain(), backend=autoremat.backend.autoremat, options=options())
    model(rows()).backward()


def new_sessions(before: WeakSet[Session]) -> list[Session]:
    """Those that live and are not of another test, whose own may go meanwhile."""
    gc.collect()
    return [session for session in _sessions.values() if session not in before]


def test_a_dropped_model_leaves_no_session():
    """Dynamo lets go of a dropped model's graphs when it next looks at its class."""
    before = WeakSet(_sessions.values())
    for _ in range(3):
        train()
        assert len(new_sessions(before)) <= 1
    torch._dynamo.reset()
    assert new_sessions(before) == []


def test_graphs_of_one_model_share_a_session():
    """Also where nobody keeps the mapping of its options, as its identity may not be another's."""
    before = WeakSet(_sessions.values())
    model = torch.compile(Chain(), backend=autoremat.backend.autoremat, options=options())
    model(rows()).backward()
    (session,) = new_sessions(before)
    model(rows()[:3]).backward()
    assert new_sessions(before) == [session]


def test_a_mapping_that_was_changed_is_another():
    """A loop over budgets may write each of them into the same mapping."""
    shared = options()
    for budget_nbytes in (10**9, 10**8):
        shared["budget"] = budget_nbytes
        model = torch.compile(Chain(), backend=autoremat.backend.autoremat, options=shared)
        loss = model(rows())
        assert _sessions[id(shared)].options.budget.nbytes() == budget_nbytes
        loss.backward()
        torch._dynamo.reset()


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"plan": "absent.json"}, FileNotFoundError, "No such file .* 'absent.json'"),
        ({"plan": "."}, OSError, "'.'"),
        ({"polcy": "sqrt"}, ValueError, "'polcy' is no option .* Did you mean 'policy'"),
        ({"time_limit": "soon"}, ValueError, "time_limit is a number of seconds"),
    ],
)
def test_an_option_at_fault_is_refused_in_words(
    asked: dict[str, object], error: type[Exception], words: str
):
    """As `optimize` does, and not as a compiler that has failed."""
    model = torch.compile(Chain(), backend="autoremat", options={**options(), **asked})
    with pytest.raises(error, match=words) as caught:
        model(rows())
    if isinstance(caught.value, OSError):
        assert Path(caught.value.filename) == Path(str(asked["plan"]))
        assert caught.value.errno


def test_a_report_of_what_was_compiled_and_not_planned_says_why():
    """Not that nobody has compiled it."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model.compile(backend="autoremat", options={"budget": "1GB"})
    with pytest.raises(ValueError, match=r"is compiled, but no planned graph .*nn\.Sequential"):
        autoremat.report(model)


class Twice(nn.Module):
    """A model as part of another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


@pytest.mark.parametrize("wrap", [lambda model: model, Twice])
def test_a_model_that_was_optimised_before_says_that_it_stays_so(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    """Its own budget counts, as itself and within a model that the backend compiles; told once."""
    torch._dynamo.reset()
    inner = autoremat.optimize(Chain(), **options() | {"budget": "1MB"})
    for backend in ("aot_eager", autoremat.backend.autoremat):
        is_ours = backend != "aot_eager"
        given = {"options": options()} if is_ours else {}
        model = torch.compile(wrap(inner), backend=backend, **given)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2):
                model(rows()).backward()
        lines = [str(one.message) for one in told if one.filename == __file__]
        assert len(lines) == is_ours
        assert not is_ours or "Chain was optimised before, and stays as it was asked" in lines[0]
    assert autoremat.report(inner).budget_nbytes == 1_000_000
