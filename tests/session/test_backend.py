"""The backend of `torch.compile`: one session for each model, for as long as it is needed."""

from __future__ import annotations

import gc

import torch

import autoremat
from autoremat.backend import _sessions
from tests.tiny import Chain, rows


def options() -> dict[str, object]:
    """Of one model."""
    return {"budget": "1GB", "compiler": "eager", "verbose": False, "time_limit": 0.5}


def train() -> None:
    """A model that is compiled, trained for a step and dropped."""
    model = torch.compile(Chain(), backend=autoremat.backend.autoremat, options=options())
    model(rows()).backward()


def test_a_dropped_model_leaves_no_session():
    """Dynamo lets go of a dropped model's graphs when it next looks at its class."""
    before = len(_sessions)
    for _ in range(3):
        train()
        gc.collect()
        assert len(_sessions) <= before + 1
    torch._dynamo.reset()
    gc.collect()
    assert len(_sessions) == before


def test_graphs_of_one_model_share_a_session():
    """Also where nobody keeps the mapping of its options, as its identity may not be another's."""
    model = torch.compile(Chain(), backend=autoremat.backend.autoremat, options=options())
    model(rows()).backward()
    gc.collect()
    (session,) = _sessions.values()
    model(rows()[:3]).backward()
    assert list(_sessions.values()) == [session]
