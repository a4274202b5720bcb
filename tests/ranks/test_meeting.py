"""What a rank hears from the job's store, and what it does where nobody answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from torch import distributed

from autoremat import RankError, _torch
from autoremat.cost.agreed import agree, agreed
from autoremat.ranks import store as shared
from autoremat.ranks.figures import known_figures, settled
from autoremat.ranks.meeting import meet, place_of

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="needs torch.distributed")


@dataclass(frozen=True)
class Pair:
    """Two figures."""

    time_us: float
    peak_nbytes: int


ONE, OTHER = Pair(0.1, 1), Pair(0.2, 2)


@pytest.fixture(name="store")
def _store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The store of a job, as its first rank sees it."""
    store = distributed.HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    monkeypatch.setattr(_torch, "job_store", lambda: store, raising=False)
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    return store


@pytest.fixture(name="broken")
def _broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that fails, as that of a simulated job does."""
    store = distributed.Store()
    monkeypatch.setattr(_torch, "job_store", lambda: store, raising=False)
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(shared, "_failed", None)


def test_without_a_job_own_figures_count():
    """No store is asked for."""
    assert known_figures(["key"], Pair) == {}
    assert settled({"key": ONE}, Pair) == {"key": ONE}
    assert meet((0, 1), "", str) is None


@pytest.mark.usefixtures("store")
def test_the_first_figures_count():
    """To the last bit, and those of another kind or key are others."""
    assert settled({"key": ONE}, Pair) == {"key": ONE}
    assert settled({"key": OTHER, "new": OTHER}, Pair) == {"key": ONE, "new": OTHER}
    assert known_figures(["key", "absent"], Pair) == {"key": ONE}


@pytest.mark.usefixtures("store")
def test_the_machine_is_no_part_of_a_call():
    """Ranks on hosts of different kinds price one graph alike."""
    agree({"sin|on A|threads 1": ONE}, Pair)
    assert agreed(["sin|on B|threads 2", "cos|on A|threads 1"], Pair) == {"sin|on B|threads 2": ONE}


@pytest.mark.usefixtures("broken")
def test_a_store_that_fails_is_told_of_once():
    """From then on each rank has its own figures."""
    with pytest.warns(UserWarning, match="key-value store of this job's process group does not"):
        assert known_figures(["key"], Pair) == {}
    assert settled({"key": ONE}, Pair) == {"key": ONE}
    assert meet((0, 1), "", str) is None


def test_one_rank_concludes_for_all(store):
    """From what each has said."""
    place = said_by_others(store, "two", number=1)
    heard = meet((0, 1), "one", lambda said: json.dumps([said[0], said[1]]))
    assert heard == '["one", "two"]'
    assert json.loads(store.get(f"{place}/all")) == [[], heard]
    said_by_others(store, "four", number=2)
    assert meet((0, 1), "three", lambda said: said[0] + said[1]) == "threefour"


def test_who_does_not_come_is_named(store):
    """Once the process group's timeout is over; who comes later still hears of it."""
    with pytest.raises(RankError, match=r"^Ranks 1 and 2 did not come within 0\.2 s") as silent:
        meet((0, 1, 2), "", lambda said: "")
    assert silent.value.ranks == (1, 2)


def said_by_others(store: Any, text: str, *, number: int) -> str:
    """Rank 1 has come to a meeting with rank 0 already; returns the meeting's place."""
    place = f"autoremat/{place_of((0, 1))}/{number}"
    store.set(f"{place}/1", text)
    return place
