"""`plan(..., offload=)`: what a GPU that is not here would send to the memory of its host."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat.cost.device_specs import LINKS, SPECS, find_link, find_spec
from autoremat.elsewhere.present import can_generate_for_gpus
from autoremat.inductor.hook import Generated, generate
from autoremat.reporting import Report, ValueAction
from tests.commands.command_line import run
from tests.inductor.races import races

ROW_NBYTES = 64 * 4
MODEL = """
import torch
from torch import nn

def make():
    layers = [part for _ in range(6) for part in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(4096, 64), lambda output: output.mean()
"""
QUICK: dict[str, Any] = {"compiler": "eager", "time_limit": 1.0, "verbose": False}


class Sines(nn.Module):
    """Eight layers; each saves what the matrix product made."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        """The mean of the last results."""
        for layer in self.layers:
            x = torch.sin(layer(x))
        return x.mean()


def planned(budget: str, rows: int = 40_000, **asked: Any) -> Report:
    """For an A100, and nothing may be made again."""
    with torch.device("meta"):
        model, batch = Sines(), torch.empty(rows, 64)
    given = {"device": "A100", "save": ["aten.addmm", "aten.sin"]} | QUICK | asked
    return autoremat.plan(model, batch, budget=budget, **given)


@pytest.fixture(scope="module")
def report() -> Report:
    """A plan within a budget that recompute cannot keep."""
    return planned("100MB", offload="1GB", link="pcie4")


def test_a_report_says_what_leaves_and_when_it_is_back(report: Report) -> None:
    """Sizes and times of each value, and what of both memories that takes."""
    waiting = report.graphs[0].waiting
    assert waiting is not None
    assert report.predicted_peak_nbytes <= 100_000_000 < waiting.alone_peak_nbytes
    assert not waiting.alone_fits
    assert len(waiting.trips) * 40_000 * ROW_NBYTES == waiting.nbytes > 0
    speed = 0.8 * LINKS["pcie4"].gbps * 1e3
    for trip in waiting.trips:
        assert trip.sent_us < trip.gone_us <= trip.returns_us < trip.back_us
        assert trip.gone_us - trip.sent_us == pytest.approx(10 + trip.nbytes / speed, abs=0.01)
        assert trip.read_by in {step.name for step in report.graphs[0].timeline.steps}  # type: ignore[union-attr]
    text = report.summary()
    assert "PCIe 4.0 x16 by its data sheet, 25.2 GB/s each way" in text
    assert "recompute alone needs" in text
    assert Report.from_json(report.to_json()) == report
    assert "What waits elsewhere" in report.to_html()


def test_the_host_gives_powers_of_two(report: Report) -> None:
    """Of 10.2 MB it takes 16.8, and never more than it has."""
    waiting = report.graphs[0].waiting
    assert waiting is not None
    assert waiting.host_peak_nbytes % (1 << 24) == 0
    assert 0 < waiting.host_peak_nbytes <= waiting.host_nbytes == 10**9
    assert waiting.in_flight_nbytes >= 40_000 * ROW_NBYTES


def test_a_report_without_copies_says_what_they_would_save() -> None:
    """Where a curve is asked for, of a plan that recomputes: in the summary and on the page."""

    def told(budget: str, curve: int) -> str:
        with torch.device("meta"):
            model, batch = Sines(4096), torch.empty(4096, 4096)
        found = autoremat.plan(model, batch, budget=budget, device="A100", curve=curve, **QUICK)
        assert ("What waits elsewhere" in found.to_html()) == ("Offloaded" in found.summary())
        return found.summary()

    said = r"Offloaded +nothing; with offload= .* that wait over PCIe 4\.0 .* would save \d+ %"
    assert re.search(said, told("1.3GB", 2))
    assert "Offloaded" not in told("1.3GB", 0)
    assert "Offloaded" not in told("10GB", 2)


def test_values_that_leave_are_not_said_to_be_read_by_nobody(report: Report) -> None:
    """Those that wait are told as such."""
    waiting = report.graphs[0].waiting
    assert waiting is not None
    away = {v.name: v.reason for v in report.values if v.action is ValueAction.AWAY}
    assert set(away) == {trip.value for trip in waiting.trips}
    assert all("waits elsewhere, to free 10.2 MB" in reason for reason in away.values())


def test_a_faster_link_costs_no_more_time() -> None:
    """By its name, or by its bytes per second; without one it is the device's own."""
    times = {
        link: planned("100MB", offload="1GB", link=link).predicted_time_us
        for link in ("pcie3", None, 400e9)
    }
    assert times["pcie3"] >= times[None] >= times[400e9]
    assert find_spec("A100").link == "pcie4"


def test_a_step_that_fits_sends_nothing_away() -> None:
    """And says what recompute alone takes."""
    waiting = planned("10GB", offload="1GB").graphs[0].waiting
    assert waiting is not None
    assert not waiting.trips
    assert waiting.text(1.0).startswith("nothing, though values may wait over PCIe 4.0")


def test_a_refusal_says_what_cannot_leave() -> None:
    """One operation and the gradients are there whatever leaves."""
    with pytest.raises(
        autoremat.InfeasibleBudget, match=r"That is with offload: .* reads and makes"
    ):
        planned("20MB", offload="10GB")


def test_a_refusal_says_that_the_host_is_full() -> None:
    """What could leave, and what the host has."""
    with pytest.raises(
        autoremat.InfeasibleBudget, match=r"could, and the host holds .* of 20\.0 MB"
    ):
        planned("40MB", offload="20MB")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"offload": "24"}, "24' is no number with a unit"),
        ({"offload": "-1GB"}, "is no number with a unit"),
        ({"offload": 0}, "is not above zero bytes"),
        ({"offload": "50%"}, "a share of the host's memory"),
        ({"offload": True}, "not True"),
        ({"offload": "disk:."}, "is a folder, for models on the CPU"),
        ({"offload": "1GB", "device": "cpu"}, "On the CPU there is no other memory"),
        ({"offload": "1GB", "link": "pcie9"}, "known: pcie3, pcie4, pcie5, nvlink-c2c"),
        ({"offload": "1GB", "link": 0}, "more than 0 bytes per second"),
        ({"offload": "1GB", "link": "nan"}, "more than 0 bytes per second"),
        ({"offload": "1GB", "link": []}, "link is a name"),
        ({"link": "pcie4"}, "give offload=, too"),
        ({"offload": "1GB", "policy": "sqrt"}, "leave one of the two out"),
        ({"offload": "1GB", "save_to": "plan.json"}, "save_to=: leave one of the two out"),
        ({"offload": "1GB", "budget": "90% reserved"}, "leave one of the two out"),
    ],
)
def test_what_cannot_be_planned_is_refused_at_once(asked: dict[str, Any], says: str) -> None:
    """With what is accepted instead."""
    with pytest.raises(ValueError, match=says):
        planned(**({"budget": "1GB"} | asked))


def test_auto_is_what_this_machine_has_free_less_a_reserve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the report says whose memory that is."""
    monkeypatch.setattr("autoremat.ask.hosts.free_nbytes", lambda _: 10**9)
    told = planned("1GB", offload="auto").assumed
    assert any("872.4 MB of page-locked memory" in one and "at most 90%" in one for one in told)


@pytest.mark.thorough
@pytest.mark.skipif(not can_generate_for_gpus(), reason="needs triton, and forks")
def test_generated_code_copies_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is that of code which asks for the copies; a walk over it finds no race."""
    sources: list[str] = []

    def kept(*args: Any, **given: Any) -> Generated:
        found = generate(*args, **given)
        sources.append(found.source)
        return found

    monkeypatch.setattr("autoremat.inductor.reading.generate", kept)
    report = planned("100MB", offload="1GB", compiler="inductor")
    waiting = report.graphs[0].waiting
    assert report.predicted_peak_nbytes <= 100_000_000
    assert waiting is not None
    assert waiting.trips
    assert any("the code that Inductor generates" in fact.text for fact in report.facts)
    copying = [source for source in sources if "torch.ops.autoremat." in source]
    assert sum(source.count("offload.default(") for source in copying) >= len(waiting.trips)
    assert not [race for source in copying for race in races(source)]


@pytest.mark.thorough
def test_a_plan_on_the_command_line(tmp_path: Path) -> None:
    """The same words; a size without a unit is bytes there."""
    (tmp_path / "model.py").write_text(MODEL)
    target = f"{tmp_path / 'model.py'}:make"
    quick = ("--compiler", "eager", "--time-limit", "1", "--curve", "0", "--device", "A100")
    found = run("plan", target, "--budget", "6MB", *quick, "--offload", 10**9, "--link", "pcie5")
    assert found.exit_code == 0, found.output
    assert "Offloaded" in found.stdout
    refused = run("plan", target, "--budget", "6MB", *quick, "--offload", "1GB", "--link", "isdn")
    assert refused.exit_code == 1
    assert "nvlink-c2c" in refused.output


def test_every_device_has_a_link_that_is_known() -> None:
    """And links are found by the names that people write."""
    assert {spec.link for spec in SPECS} <= LINKS.keys()
    assert find_link("PCIe 5") is LINKS["pcie5"]
    assert find_link("NVLink-C2C").gbps == 450
    assert LINKS["pcie4"].gbps == pytest.approx(31.5, abs=0.01)
