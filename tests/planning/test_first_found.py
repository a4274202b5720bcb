"""Ranks of a job that ask the same question get the same plan, whatever each would find."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed

from autoremat.ask.options import Setting
from autoremat.planning import pipeline
from autoremat.planning.choice import Choice
from autoremat.planning.unsearched import choose_without_search
from autoremat.problem.subject import Subject
from autoremat.ranks import figures
from tests.joint_graphs import leaf, subject_of

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="needs torch.distributed")

EAGER = Setting(compiler="eager")


def chain(x: Tensor) -> Tensor:
    """Six operations whose results the backward needs."""
    for _ in range(3):
        x = torch.tanh(x.exp())
    return x.sum()


@pytest.fixture(name="subject", scope="module")
def _subject() -> Subject:
    return subject_of(chain, leaf(1024), EAGER)


@pytest.fixture(name="job", autouse=True)
def _job() -> Iterator[None]:
    """A store that outlives each rank of these tests, which come one after the other."""
    store = distributed.HashStore()
    with mock.patch.object(figures, "shared_store", return_value=store):
        yield


def hasty(subject: Subject, budget_nbytes: int, *_: Any, **__: Any) -> Choice:
    """What a rank finds that has no time to search."""
    return choose_without_search(subject, budget_nbytes, reads=False)


def test_the_second_rank_takes_what_the_first_has_found(subject):
    """With what is proven of it, and without a search."""
    budget_nbytes = pipeline.choose(subject, 1 << 30, EAGER).peak_nbytes - 4096
    first = pipeline.choose(subject, budget_nbytes, EAGER)
    with mock.patch.object(pipeline, "search", side_effect=AssertionError):
        second = pipeline.choose(subject, budget_nbytes, EAGER)
    assert facts(second) == facts(first)
    assert second.fits
    assert str(second.backward.graph) == str(first.backward.graph)


def test_who_is_overtaken_while_it_searches_takes_what_was_found(subject):
    """Both began before there was anything to be found."""

    def overtaken(*args: Any, **keywords: Any) -> Choice:
        with mock.patch.object(pipeline, "search", hasty):
            others.append(pipeline.choose(subject, 1 << 30, EAGER))
        return search(*args, **keywords)

    others: list[Choice] = []
    search = pipeline.search
    assert facts(search(subject, 1 << 30, EAGER)) != facts(hasty(subject, 1 << 30))
    with mock.patch.object(pipeline, "search", overtaken):
        own = pipeline.choose(subject, 1 << 30, EAGER)
    assert facts(own) == facts(others[0])


def test_another_question_has_another_answer(subject):
    """Another budget, or another limit of time."""
    with mock.patch.object(pipeline, "search", hasty):
        pipeline.choose(subject, 1 << 30, EAGER)
    for budget_nbytes, limit_s in (((1 << 30) + 1, 30.0), (1 << 30, 31.0)):
        with mock.patch.object(pipeline, "search", wraps=pipeline.search) as search:
            setting = Setting(compiler="eager", time_limit_s=limit_s)
            pipeline.choose(subject, budget_nbytes, setting)
            search.assert_called_once()


def facts(choice: Choice) -> tuple[Any, ...]:
    """What a report says of a plan."""
    found = choice.solution
    proven = (found.status, found.bound_us, found.floor_nbytes, found.tried, found.left_out)
    return (found.plan, found.method, choice.peak_nbytes, *proven)
