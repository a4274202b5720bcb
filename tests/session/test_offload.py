"""`offload="disk:PATH"`: values wait in files, within the budget, with the same gradients."""

from __future__ import annotations

import errno
import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from autoremat_solver import Link
from autoremat_solver.plan import Plan, Status, Step, StepKind
from torch import Tensor, nn

import autoremat
from autoremat.ask.budget import Budget
from autoremat.ask.options import Options, Setting
from autoremat.cost import host_link
from autoremat.errors import OffloadError, PlanMismatch
from autoremat.explain.graph_report import _crossing
from autoremat.host import threads
from autoremat.host.disk import (
    Disk,
    _file_system,
    files_of,
    forget_files,
    in_leading_digits,
    like,
)
from autoremat.host.memory import HostMemory
from autoremat.host.operators import OFFLOAD, OFFLOADED, RELOAD, RELOADED, _under_way
from autoremat.memory.meter import measure_peak, resident_nbytes
from autoremat.planning import offloaded
from autoremat.planning.choice import as_proven, given
from autoremat.planning.figures import Figures
from autoremat.planning.nesting import Around, Beside
from autoremat.planning.offloaded import bounded, is_worthless
from autoremat.planning.unsearched import choose_fixed
from autoremat.planning.ways import crossing_nbytes
from autoremat.problem.lower import as_written
from autoremat.problem.shell import closed, in_texts
from autoremat.reporting import Report, SpanKind, ValueAction
from autoremat.session.replans import Replans
from tests.joint_graphs import subject_of
from tests.reporting.report_samples import layered_step
from tests.training import make_seeded, measured, optimized, step

SAVED = ("aten.addmm", "aten.tanh", "aten.sin")  # all that is worth making again
CPU = torch.device("cpu")
BUDGET_NBYTES = 1_500_000  # 2.6 MB without a plan


class Sine(nn.Module):
    """Saves what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        """The sine."""
        return torch.sin(x)


def layers(count: int) -> nn.Sequential:
    """Each makes three values that the backward reads."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), Sine(), nn.Tanh()) for _ in range(count))
    )


class Deep(nn.Module):
    """Eight layers whose results the backward reads, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(8)

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the last results."""
        return self.layers(x).square().mean()


def rows() -> tuple[Tensor]:
    """A batch."""
    return (torch.ones(512, 64),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where values wait."""
    return tmp_path_factory.mktemp("host")


@pytest.fixture(scope="module")
def model(folder: Path) -> nn.Module:
    """Within a budget that nothing but copies can keep; its first step is taken."""
    given = {"offload": f"disk:{folder}", "save": SAVED, "time_limit": 1.0}
    found = optimized(Deep, BUDGET_NBYTES, **given)
    step(found, rows())
    return found


def test_what_leaves_lowers_the_peak_and_changes_no_gradient(model: nn.Module) -> None:
    """The measured peak is the planned one to the byte, gradients are those of eager mode."""
    expected, found = step(make_seeded(Deep), rows()), step(model, rows())
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert gradient is found.gradients[name] or torch.equal(gradient, found.gradients[name])
    report = autoremat.report(model)
    assert measured(model, rows()) == report.predicted_peak_nbytes <= BUDGET_NBYTES
    waiting = report.graphs[0].waiting
    assert waiting is not None
    assert waiting.nbytes > 0


def test_a_report_tells_what_leaves(model: nn.Module) -> None:
    """Bytes each way, and the values, in the text and in a stored report."""
    report = autoremat.report(model)
    waiting = report.graphs[0].waiting
    assert waiting is not None
    assert len(waiting.trips) * 512 * 64 * 4 == waiting.nbytes
    assert "Offloaded" in report.summary()
    assert str(waiting.trips[0]) in report.summary()
    assert "as measured" in report.summary()
    assert autoremat.Report.from_json(report.to_json()) == report
    assert "reload" in report.to_html()


def test_code_with_copies_that_fails_is_told_and_not_remembered(tmp_path: Path) -> None:
    """What recompute alone reaches is taken meanwhile; the next process tries again."""

    def planned() -> Report:
        return autoremat.plan(
            make_seeded(Deep),
            *rows(),
            budget=BUDGET_NBYTES,
            offload=f"disk:{tmp_path}",
            time_limit=1,
            verbose=False,
        )

    with mock.patch.object(
        offloaded, "_that_send_away", side_effect=NotImplementedError("of this")
    ):
        report = planned()
    assert report.is_within_budget
    said = (
        "nothing, though .*: plans with copies could not be compared .NotImplementedError: of this."
    )
    assert re.search(said, report.summary())
    assert "could not be compared" not in planned().summary()


def test_a_report_does_not_take_what_leaves_for_recomputed(model: nn.Module) -> None:
    """It is away, and fetched; what steps take and wait adds up to the predicted time."""
    (graph,) = autoremat.report(model).graphs
    assert graph.waiting is not None
    assert graph.timeline is not None
    left = {trip.value for trip in graph.waiting.trips}
    assert {v.name for v in graph.values if v.action is ValueAction.AWAY} == left
    fetched = [span.value for span in graph.timeline.spans if span.kind is SpanKind.FETCHED]
    assert sorted(fetched) == sorted(left)
    whole_us = sum(step.stall_us + step.time_us for step in graph.timeline.steps)
    assert whole_us == pytest.approx(graph.predicted_time_us, abs=0.1)


@pytest.mark.parametrize(
    ("trips", "is_away"),
    [(((1, 5),), True), (((5, 6),), False), (((1, 2),), False), (((1, 2), (3, 5)), True)],
    ids=["across", "in the backward", "in the forward", "twice, once across"],
)
def test_away_is_what_the_backward_fetches(
    trips: tuple[tuple[int, int], ...], is_away: bool
) -> None:
    """Not what is there as it begins, and leaves or comes back some other time.

    Args:
        trips: before which of the eight operations a value leaves, and before which it is back.
        is_away: whether it is told as away.
    """
    problem, _ = layered_step(4, 1)
    before: dict[int, list[Step]] = defaultdict(list)
    for leaves, returns in trips:
        before[leaves] += [Step(StepKind.OFFLOAD, "x0.0"), Step(StepKind.RELEASE, "x0.0")]
        before[returns].append(Step(StepKind.RELOAD, "x0.0"))
    runs = enumerate(Step(StepKind.FIRST_RUN, op.name) for op in problem.ops)
    plan = Plan(tuple(step for index, run in runs for step in (*before[index], run)))
    choice = mock.Mock(solution=mock.Mock(plan=plan))
    assert ("x0.0" in _crossing(problem, choice)) == is_away


def test_no_file_has_a_name_while_a_step_is_under_way(model: nn.Module, folder: Path) -> None:
    """So none is left behind by a crash, and processes may share the folder."""
    loss = model(*rows())
    assert list(folder.iterdir()) == []
    loss.backward()
    assert list(folder.iterdir()) == []


def test_a_link_slower_than_it_was_measured_changes_neither_gradients_nor_the_peak(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each use waits for its copy, and what leaves stays until it has left."""
    expected, peak_nbytes = step(make_seeded(Deep), rows()), measured(model, rows())
    copy, delays = threads._copy, []

    def late(pair: list[Tensor]) -> None:
        delays.append(0.01)
        time.sleep(delays[-1])
        copy(pair)

    monkeypatch.setattr(threads, "_copy", late)
    began = time.perf_counter()
    found = step(model, rows())
    took_s = time.perf_counter() - began
    for name, gradient in expected.gradients.items():
        assert gradient is found.gradients[name] or torch.equal(gradient, found.gradients[name])
    assert took_s > sum(delays) / 2 > 0  # there are two ways
    assert measured(model, rows()) == peak_nbytes


@pytest.mark.filterwarnings("ignore::autoremat.errors.OverBudgetWarning")  # by what hooks hold
def test_hooks_that_copy_what_is_saved_find_it_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the copies to the host are: what a hook gives back lies somewhere else."""
    expected, copy, late_ones = step(make_seeded(Deep), rows()), threads._copy, []
    # By such a link copies are under way as the forward ends.
    monkeypatch.setattr(host_link, "_measured", lambda disk: Link(1e2, 1e2))
    model = optimized(Deep, BUDGET_NBYTES, offload=f"disk:{folder}", save=SAVED, time_limit=1.0)
    step(model, rows())
    model.zero_grad()

    def late(pair: list[Tensor]) -> None:
        late_ones.append(pair)
        time.sleep(0.01)
        copy(pair)

    monkeypatch.setattr(threads, "_copy", late)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda packed: packed):
        loss = model(*rows())
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(expected.gradients[name], parameter.grad)
    assert late_ones
    assert not _under_way


def test_what_fails_where_nothing_fits_yet_is_no_refusal() -> None:
    """A plan with copies that was read does not fit, and reading the next one fails."""
    above = SimpleNamespace(fits=False, solution=SimpleNamespace(plan=Plan(())))

    def fails(*_: object) -> Iterator[SimpleNamespace]:
        yield above
        raise MemoryError

    quiet = {"Reader": mock.DEFAULT, "fitting_by_reading": mock.Mock(return_value=None)}
    patched = mock.patch.multiple(offloaded, _that_send_away=fails, **quiet)
    with patched, pytest.raises(MemoryError):
        offloaded._as_read(mock.Mock(), mock.Mock(), 1)


def test_a_full_disk_is_told_in_the_step_that_meets_it(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what was wanted, what is free and what to do; the next step finds room again."""
    forget_files()  # those of steps before would do

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(OffloadError, match=r"131\.1 kB are to wait .* are free .*free some"):
            step(model, rows())
    step(model, rows())


def test_a_folder_that_vanishes_is_told(model: nn.Module, folder: Path) -> None:
    """What waits already is safe: only a new file needs the folder."""
    forget_files()
    away = folder.with_name("away")
    loss = model(*rows())
    folder.rename(away)
    with suppress(OffloadError):  # the backward may send values away too
        loss.backward()
    forget_files()
    with pytest.raises(OffloadError, match=r"There is no folder .*make it"):
        model(*rows())
    with pytest.raises(OffloadError, match=r"There is no folder .*make it"):
        _ = Disk(str(folder)).free_nbytes
    away.rename(folder)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"offload": "/somewhere"}, 'offload is "disk:PATH"'),
        ({"offload": "24GB"}, "On the CPU there is no other memory"),
        ({"offload": "auto"}, "On the CPU there is no other memory"),
        ({"offload": "24"}, 'offload is "disk:PATH"'),
        ({"offload": "disk:"}, 'offload is "disk:PATH"'),
        ({"offload": 3.5}, 'offload is "disk:PATH"'),
        ({"offload": "disk:/no/such/folder"}, "There is no folder"),
        ({"offload": "disk:.", "policy": "save-all"}, "leave one of the two out"),
        ({"offload": "disk:.", "tune": 3}, "tune=3"),
        ({"offload": "disk:.", "sizes": {"batch": (1, 8)}}, "sizes="),
    ],
)
def test_what_cannot_be_offloaded_is_refused_at_once(options: dict[str, Any], says: str) -> None:
    """Before a step is run, with the reason."""
    given = {"compiler": "eager"} | options
    with pytest.raises(ValueError, match=says):
        autoremat.optimize(Deep(), "1GB", **given)


def test_a_folder_in_which_nothing_may_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the system's reason."""

    def denied(**_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("tempfile.TemporaryFile", denied)
    with pytest.raises(ValueError, match=r"Permission denied.*may write"):
        autoremat.optimize(Deep(), "1GB", compiler="eager", offload=f"disk:{tmp_path}")


def test_a_plan_that_offloads_is_stored_with_its_copies(folder: Path, tmp_path: Path) -> None:
    """And runs again where it is told where values may wait, in as many bytes."""
    path, given = tmp_path / "plan.json", {"offload": f"disk:{folder}"}
    model = optimized(Deep, BUDGET_NBYTES, save=SAVED, time_limit=1.0, **given)
    step(model, rows())
    autoremat.save_plan(model, path)
    first = autoremat.report(model).graphs[0].waiting
    del model
    again = optimized(Deep, "10MB", plan=path, **given)
    step(again, rows())
    assert measured(again, rows()) <= BUDGET_NBYTES
    second = autoremat.report(again).graphs[0].waiting
    assert first is not None
    assert second is not None
    assert second.trips == first.trips
    assert second.trips
    assert "recompute alone" not in second.text(1.0)  # nobody has looked for that
    autoremat.save_plan(again, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()
    elsewhere = optimized(Deep, "10MB", plan=path)
    with pytest.raises(PlanMismatch, match="say where, as it was made with offload="):
        step(elsewhere, rows())


def test_a_plan_that_is_known_is_tried_where_values_may_wait_only(
    folder: Path, tmp_path: Path
) -> None:
    """Else the graph is planned as if nobody had given one."""
    path, given = tmp_path / "plan.json", {"offload": f"disk:{folder}"}
    model = optimized(Deep, BUDGET_NBYTES, save=SAVED, time_limit=1.0, **given)
    step(model, rows())
    autoremat.save_plan(model, path)
    del model
    again = optimized(Deep, BUDGET_NBYTES, known_plan=path, time_limit=1.0, **given)
    step(again, rows())
    autoremat.save_plan(again, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()
    elsewhere = optimized(Deep, "10MB", known_plan=path, time_limit=1.0)
    step(elsewhere, rows())
    assert autoremat.report(elsewhere).graphs[0].waiting is None


def test_a_smaller_batch_is_planned_with_copies_too(tmp_path: Path) -> None:
    """Each size by itself: what waits in a file has a known size."""
    given = {"offload": f"disk:{tmp_path}", "save": SAVED, "time_limit": 1.0}
    found = optimized(Deep, BUDGET_NBYTES, **given)
    for count in (512, 500, 499):
        batch = (torch.ones(count, 64),)
        step(found, batch)
        assert measured(found, batch) <= BUDGET_NBYTES


def called_twice(model: nn.Module, x: Tensor) -> None:
    """A second call before the backward."""
    (model(x) + model(x)).backward()


def called_once(model: nn.Module, x: Tensor) -> None:
    """A step as most are."""
    model(x).backward()


class Broken(Deep):
    """The same in two graphs."""

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the last results."""
        x = self.layers[:4](x)
        torch._dynamo.graph_break()
        return self.layers[4:](x).square().mean()


def whole(budget_nbytes: int, make: type[nn.Module] = Deep, **given: Any) -> nn.Module:
    """A model under a budget."""
    return optimized(make, budget_nbytes, **given)


def by_blocks(budget_nbytes: int, **given: Any) -> nn.Module:
    """The same, each pair of its layers compiled alone, from the same code."""
    torch._dynamo.reset()
    model = make_seeded(Blocks)
    options = {"budget": budget_nbytes, "verbose": False, "time_limit": 4.0} | given
    for block in model.blocks:
        block.compile(backend="autoremat", options=options)
    return model


class Block(nn.Module):
    """Two layers, whose code is compiled once for all that are like it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(2)

    def forward(self, x: Tensor) -> Tensor:
        """Both, one after the other."""
        return self.layers(x)


class Blocks(nn.Module):
    """The layers of `Deep` in four blocks, and the loss in eager mode."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the last results."""
        return self.blocks(x).square().mean()


STEPS = {
    "called twice": (whole, Deep, called_twice, 2_200_000),
    "two graphs": (functools.partial(whole, make=Broken), Broken, called_once, 1_800_000),
    "blocks": (by_blocks, Blocks, called_once, 1_800_000),
}


@pytest.mark.parametrize(
    "compiler", ["eager", pytest.param("inductor", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("which", STEPS)
@pytest.mark.filterwarnings("ignore::autoremat.errors.OverBudgetWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_step_of_several_graphs_or_runs_keeps_its_budget_by_copies(
    which: str, compiler: str, tmp_path: Path
) -> None:
    """From the second on; no plan without copies could, as all that is saved is too much."""
    planned, make, run, budget_nbytes = STEPS[which]
    given = {"offload": f"disk:{tmp_path}", "save": SAVED, "compiler": compiler}
    found = planned(budget_nbytes, **given)
    plain, (x,) = make_seeded(make), rows()
    run(plain, x)
    for number in range(4):
        found.zero_grad(set_to_none=True)
        held_nbytes = resident_nbytes(found, x)
        peak_nbytes = held_nbytes + measure_peak(lambda: run(found, x), device=CPU)
        assert number == 0 or peak_nbytes <= budget_nbytes
        for one, other in zip(found.parameters(), plain.parameters(), strict=True):
            if compiler == "eager":
                assert torch.equal(one.grad, other.grad)
            torch.testing.assert_close(one.grad, other.grad)
    report = autoremat.report(found)
    waiting = [graph.waiting for graph in report.graphs]
    assert sum(one.nbytes for one in waiting if one is not None) > 0
    if which != "two graphs":  # one of them may do
        assert "together, at most" in report.summary()


@pytest.mark.filterwarnings("ignore::autoremat.errors.OverBudgetWarning")
def test_graphs_of_a_step_do_not_take_the_same_room_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first step on, for which each is planned beside those before it."""
    most: list[int] = []
    taken: list[int] = []
    less = Disk.less

    def noted(disk: Disk, nbytes: int) -> Disk:
        taken.append(nbytes)
        return less(disk, nbytes)

    def free_nbytes(folder: str) -> int:
        files = files_of(folder)
        return 1_000_000 - files.used_nbytes - files.idle_nbytes

    monkeypatch.setattr("autoremat.host.disk.free_nbytes", free_nbytes)
    monkeypatch.setattr(Disk, "less", noted)
    given = {"offload": f"disk:{tmp_path}", "save": SAVED, "time_limit": 1.0}
    found = optimized(Deep, 2_100_000, **given)
    x, y = torch.ones(512, 64), torch.ones(256, 64)
    for _ in range(2):
        found.zero_grad(set_to_none=True)
        (found(x) + found(y)).backward()
        graphs = autoremat.report(found).graphs
        most.append(sum(g.waiting.host_peak_nbytes for g in graphs if g.waiting is not None))
    assert len(graphs) == 2
    assert 0 < max(most) <= 1_000_000
    assert taken[0] == 0 < taken[1] < most[0]


def test_a_step_is_planned_anew_where_more_may_wait_than_there_is_room_for() -> None:
    """Of more runs than the plans are for: once, whether the next plans can do with it or not."""
    graphs = SimpleNamespace(
        parts={"a": None},
        graphs=["a", "a"],
        current=[],
        kept=set(),
        lasting=set(),
        held_again=set(),
        provisional=set(),
        host_nbytes=lambda around: waiting_nbytes,
        note_longest=lambda: None,
        room=SimpleNamespace(
            longest=[["a", "a"]],
            is_needed=False,
            is_outgrown=lambda *_: False,
            least_nbytes=lambda _: 0,
        ),
        peak_nbytes=lambda around: 5,
        eager_gradient_nbytes={},
    )
    setting = Setting(compiler="eager", offload=HostMemory("8GB", 8))
    steps = SimpleNamespace(
        graphs=graphs,
        options=Options(Budget.parse("1GB"), setting, verbose=False, inductor={}),
        surroundings=SimpleNamespace(now=Around(), planned=Around(), found=Around()),
        number=1,
        reruns_layers=False,
        budget_nbytes=10,
        peak_nbytes=5,
        peak_to_come_nbytes=5,
    )
    replans, waiting_nbytes = Replans(steps), 8
    assert not replans.is_due
    waiting_nbytes = 9
    assert replans.is_due
    assert not replans.is_optional
    assert replans.is_for_host
    replans.made()
    assert not replans.is_due


def test_a_stored_plan_for_which_the_host_has_no_room_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what waits, and what there is room for."""
    path, given = tmp_path / "plan.json", {"offload": f"disk:{folder}"}
    model = optimized(Deep, BUDGET_NBYTES, save=SAVED, time_limit=1.0, **given)
    step(model, rows())
    autoremat.save_plan(model, path)
    del model
    monkeypatch.setattr(Disk, "free_nbytes", 1000)
    again = optimized(Deep, "10MB", plan=path, **given)
    with pytest.raises(PlanMismatch, match=r"lets .* wait .* room for 1\.0 kB .*give it more"):
        step(again, rows())


def test_runs_of_a_step_share_what_the_host_has() -> None:
    """Values of all of them may wait there at once."""
    disk = Disk("/", 0.5)
    assert disk.shared(0.5) == Disk("/", 0.25)
    assert HostMemory("8GB", 8_000).shared(0.25).free_nbytes == 2_000


def test_what_graphs_before_send_away_is_no_room_for_those_behind(tmp_path: Path) -> None:
    """On a disk, what lies in files is missing from what is free already."""
    assert HostMemory("8GB", 8_000).less(3_000).free_nbytes == 5_000
    assert HostMemory("8GB", 8_000).less(9_000).free_nbytes == 0
    disk, taken_nbytes = Disk(str(tmp_path)), 3 << 20
    room_nbytes = disk.free_nbytes
    assert disk.less(taken_nbytes).free_nbytes == room_nbytes - taken_nbytes
    held = like(torch.empty(taken_nbytes, dtype=torch.uint8), disk.folder)
    assert disk.less(taken_nbytes).free_nbytes == disk.free_nbytes
    assert len(held) == taken_nbytes


def test_what_is_free_is_told_in_leading_digits() -> None:
    """So that it is the same tomorrow: no more than there is, and not much less."""
    for nbytes in (0, 7, 15, 16, 1000, 123_456_789):
        found = in_leading_digits(nbytes)
        assert 7 / 8 * nbytes <= found <= nbytes
    assert in_leading_digits(100_000_000) == in_leading_digits(99_000_000)


@pytest.mark.parametrize(
    ("time_us", "alone_peak_nbytes", "is_left"),
    [(98.0, 10, True), (96.0, 10, False), (98.0, 11, False)],
)
def test_copies_that_save_next_to_nothing_are_left(
    time_us: float, alone_peak_nbytes: int, is_left: bool
) -> None:
    """Less than 3 % of what recompute alone takes, here 100 us, if that is within 10 bytes."""
    copies, alone = (
        SimpleNamespace(
            plan=SimpleNamespace(offloaded={"a"}),
            timeline=SimpleNamespace(time_us=us, peak_nbytes=nbytes),
        )
        for us, nbytes in ((time_us, 10), (100.0, alone_peak_nbytes))
    )
    assert is_worthless(copies, alone, 10) == is_left


def test_a_plan_without_copies_is_proven_among_all_plans(tmp_path: Path) -> None:
    """What was proven of plans without copies is more than is known of those with them."""
    setting = Setting(compiler="eager", offload=Disk(str(tmp_path)))
    problem = subject_of(detour, torch.ones(8, requires_grad=True), setting).lowered.problem
    found = given(problem, as_written(problem), "by hand")
    alone = as_proven(replace(found, bound_us=found.timeline.time_us))
    assert alone.status is Status.OPTIMAL
    solver = SimpleNamespace(least_us=alone.bound_us / 2, floor_nbytes=0)
    found = bounded(alone, solver)
    assert (found.bound_us, found.floor_nbytes) == (alone.bound_us / 2, 0)
    assert found.status is Status.FEASIBLE
    solver = SimpleNamespace(least_us=2 * alone.bound_us, floor_nbytes=alone.floor_nbytes)
    assert bounded(alone, solver) == alone


def test_a_disk_that_is_free_again_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found while it was full is not the answer."""
    given = {"offload": f"disk:{tmp_path}", "save": SAVED, "time_limit": 1.0}
    with monkeypatch.context() as full:
        full.setattr("autoremat.host.disk.free_nbytes", lambda folder: 20_000)
        with pytest.raises(autoremat.InfeasibleBudget):
            step(optimized(Deep, BUDGET_NBYTES, **given), rows())
    found = optimized(Deep, BUDGET_NBYTES, **given)
    step(found, rows())
    assert measured(found, rows()) <= BUDGET_NBYTES


def detour(x: Tensor) -> Tensor:
    """Reads a value again in the middle of its forward, and in the backward."""
    y = x.exp()
    return (y * y.cumsum(0).sin()).sum()


def test_what_came_back_within_the_forward_crosses_to_the_backward(tmp_path: Path) -> None:
    """By what the steps count as by the simulator: it is there while other graphs run."""
    setting = Setting(compiler="eager", offload=Disk(str(tmp_path)))
    subject = subject_of(detour, torch.ones(256, 64, requires_grad=True), setting)
    problem = subject.lowered.problem
    steps = [op.name for op in problem.ops]
    assert steps[:3] == ["exp", "cumsum", "sin"]
    away = ["exp", "cumsum", "offload exp", "release exp", "sin", "reload exp", *steps[3:]]
    plan = closed(problem, away)
    assert in_texts(plan) == tuple(away)
    choice = choose_fixed(subject, plan, "by hand", 1 << 30, reads=False)
    assert "exp_reloaded" in [node.name for node in choice.backward.graph.nodes]
    figures = Figures(subject, choice, Beside())
    assert figures.crossing_nbytes == crossing_nbytes(problem, plan)


def test_a_child_process_copies_too(tmp_path: Path) -> None:
    """Threads do not follow into it."""
    OFFLOADED(OFFLOAD(torch.ones(8), str(tmp_path)), torch.ones(8))
    child = os.fork()
    if not child:
        x = torch.ones(8)
        os._exit(0 if torch.equal(OFFLOADED(OFFLOAD(x, str(tmp_path)), x), x) else 1)
    for _ in range(100):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended
    assert status == 0


def test_a_copy_that_nobody_waits_for_holds_no_memory(tmp_path: Path) -> None:
    """A forward whose backward never comes leaves nothing behind.

    Nor does a copy under way count as a change of what autograd has saved of it meanwhile.
    """
    x = torch.ones(4096)
    host = OFFLOAD(x, str(tmp_path))
    begun = _under_way[host.data_ptr()]
    begun.wait()
    assert torch.equal(host, x)
    assert host._version == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_a_copy_has_the_same_bits_sizes_and_strides(dtype: torch.dtype, tmp_path: Path) -> None:
    """There and back, also of a tensor that is laid out in another order."""
    torch.manual_seed(0)
    x = (10 * torch.randn(7, 5, 3)).to(dtype).permute(2, 0, 1)
    sent = OFFLOADED(OFFLOAD(x, str(tmp_path)), x)
    back = RELOADED(RELOAD(sent, CPU), sent)
    for copy in (sent, back, like(x, str(tmp_path))):
        assert (copy.shape, copy.stride(), copy.dtype) == (x.shape, x.stride(), dtype)
    assert torch.equal(back, x)
    assert back.data_ptr() not in (x.data_ptr(), sent.data_ptr())


@pytest.mark.filterwarnings("ignore::autoremat.errors.OverBudgetWarning")
def test_a_graph_may_be_kept_for_another_backward(model: nn.Module) -> None:
    """What waits is there as long as the graph is. That such a step takes more is told."""
    plain, gradients = make_seeded(Deep), []
    for one in (model, plain):
        one.zero_grad(set_to_none=True)
        loss = one(*rows())
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append([parameter.grad for parameter in one.parameters()])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*gradients, strict=True))


CHILD = """
import signal, sys, torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever began the tests may ignore it
from autoremat.host.operators import OFFLOAD, OFFLOADED, RELOAD, RELOADED
x = torch.full((1 << 16,), float(sys.argv[2]))
sent = OFFLOADED(OFFLOAD(x, sys.argv[1]), x)
print("sent", flush=True)
sys.stdin.readline()
assert torch.equal(RELOADED(RELOAD(sent, x.device), sent), x)
print("same", flush=True)
"""


def child(folder: Path, number: int) -> subprocess.Popen[str]:
    """A process that sends a value there, and brings it back when it is told to."""
    found = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), str(number)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert found.stdout is not None
    assert found.stdout.readline() == "sent\n"
    return found


@pytest.mark.thorough
def test_processes_share_a_folder_and_leave_nothing_behind(tmp_path: Path) -> None:
    """Two with values there; Ctrl-C ends one, and the other has its own back."""
    interrupted, other = child(tmp_path, 1), child(tmp_path, 2)
    assert list(tmp_path.iterdir()) == []
    interrupted.send_signal(signal.SIGINT)
    interrupted.communicate(timeout=30)
    assert interrupted.returncode != 0
    assert other.communicate("back\n", timeout=30)[0] == "same\n"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_memory_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kind of its file system; what the system does not say, nobody tells."""
    link = Link(1e3, 1e3)
    for kind, is_told in (("tmpfs", True), ("ext4", False), ("", False)):
        monkeypatch.setattr("autoremat.host.disk._file_system", lambda _, kind=kind: kind)
        assert ("which is memory" in Disk(str(tmp_path)).about(link)) == is_told


def test_the_kind_of_a_file_system_is_the_innermost_mount() -> None:
    """What is mounted at /proc is no disk."""
    assert _file_system("/proc/self") in ("proc", "")
