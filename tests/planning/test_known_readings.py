"""Generated code is read once for each way to split a graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from autoremat_solver.policies import recompute_all
from torch import Tensor

from autoremat.ask.options import Setting
from autoremat.inductor import reading
from autoremat.inductor.reading import Reading
from autoremat.planning.choice import written_out
from autoremat.planning.known_readings import read_once
from autoremat.problem.lower import as_written
from autoremat.problem.subject import Subject
from tests.joint_graphs import leaf, subject_of

EAGER = Setting(compiler="eager")


def chain(x: Tensor) -> Tensor:
    """Six operations whose results the backward needs."""
    for _ in range(3):
        x = torch.tanh(x.exp())
    return x.sum()


@pytest.fixture(name="read")
def _read() -> Iterator[mock.Mock]:
    """Stands for reading: another peak for each."""
    found = (Reading(number, number, None) for number in range(1, 100))
    with mock.patch.object(reading, "read_code", side_effect=lambda *_: next(found)) as read:
        yield read


def split(subject: Subject, *, saves: bool) -> Any:
    """The graph with all saved, or all made again."""
    problem = subject.lowered.problem
    return written_out(subject, as_written(problem) if saves else recompute_all(problem))


def test_the_same_split_is_read_once_whoever_writes_it_out(read):
    """Another search has modules of its own, of the same operations."""
    subject, again = (subject_of(chain, leaf(1000), EAGER) for _ in range(2))
    first = read_once(subject, *split(subject, saves=False))
    assert read_once(again, *split(again, saves=False)) == first
    assert read.call_count == 1


def test_another_split_or_another_size_is_read_apart(read):
    """Each takes something else."""
    subject, larger = subject_of(chain, leaf(1001), EAGER), subject_of(chain, leaf(1002), EAGER)
    found = [
        read_once(subject, *split(subject, saves=False)),
        read_once(subject, *split(subject, saves=True)),
        read_once(larger, *split(larger, saves=True)),
    ]
    assert len(set(found)) == 3
    assert read.call_count == 3
