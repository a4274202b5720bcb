"""A device is tried: on a CPU, with a tiny GPT, as far as there is no allocator that reserves."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from autoremat.commands import doctor_gpu
from autoremat.cost.card import read_card
from autoremat.trial import run as trial_run
from autoremat.trial.gpt import Sizes, made, sizes_for
from autoremat.trial.model import Row, Trial
from autoremat.trial.run import try_device, with_peaks
from autoremat.trial.table import trial_table
from tests.commands.command_line import refused, run
from tests.cost.test_card import CARD

CPU = torch.device("cpu")
TINY = Sizes(layers=3, width=32, heads=2, vocabulary=64, tokens=64, batch=8)
FOUND = Trial(
    rows=(
        Row("unlimited", peak_nbytes=10**9, predicted_peak_nbytes=11 * 10**8, step_us=1e4),
        Row("75%", budget_nbytes=8 * 10**8, peak_nbytes=9 * 10**8, predicted_peak_nbytes=8 * 10**8),
        Row("25%", status="infeasible", message="Nothing fits."),
    ),
    **{"layers": 12, "width": 768, "tokens": 1024, "batch": 4, "compiler": "inductor"},
    **{"versions": {"torch": "2.13.0"}, "allocator": "", "free_nbytes": 10**10, "seconds": 100.0},
)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a GPU on which that was found."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor_gpu, "found_on", lambda device, compiler: (CARD, FOUND))


@pytest.mark.thorough
def test_budgets_are_tried_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predicted and measured figures of each budget agree, and nothing is above one."""
    monkeypatch.setattr(trial_run, "SHARES", (60,))
    found = try_device(CPU, sizes=TINY, compiler="eager", time_limit=2.0, verbose=False)
    whole, less = found.rows
    assert (whole.status, less.status) == ("ok", "ok"), found.rows
    assert whole.budget_nbytes is None
    for row in (whole, less):
        assert row.predicted_peak_nbytes == pytest.approx(row.peak_nbytes, rel=0.02)
        assert None not in (row.step_us, row.predicted_us, row.first_step_s)
        assert (row.reserved_nbytes, row.beside_nbytes) == (None, None)  # CUDA's
    assert less.peak_nbytes <= less.budget_nbytes < whole.peak_nbytes
    assert not less.is_over
    json.dumps(asdict(found), allow_nan=False)


def test_on_cuda_torchs_own_figures_stand_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read once the steps have run, as from an allocator that had 100 bytes of others' before."""
    asked: list[str] = []

    def said(name: str, value: int | None = None) -> None:
        monkeypatch.setattr(torch.cuda, name, lambda *_: asked.append(name) or value)

    model, tokens = made(TINY, CPU)
    resident = trial_run.resident_nbytes(model, tokens)
    said("empty_cache")
    said("reset_peak_memory_stats")
    said("memory_allocated", resident + 100)
    said("max_memory_allocated", resident + 5100)
    said("max_memory_reserved", 2 << 20)
    cuda = torch.device("cuda")
    row = with_peaks(Row("75%"), model, tokens, lambda: asked.append("step") or tokens, cuda)
    assert (row.resident_nbytes, row.beside_nbytes) == (resident, 100)
    assert row.peak_nbytes == resident + 5100
    assert row.reserved_nbytes == 2 << 20
    assert asked.index("reset_peak_memory_stats") < asked.index("step")
    assert asked[-2:] == ["max_memory_allocated", "max_memory_reserved"]


def test_a_budget_that_fails_costs_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that are shares of what is not known then say so."""

    def out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(trial_run, "plan", out_of_memory)
    found = try_device(CPU, sizes=TINY, verbose=False)
    statuses = [row.status for row in found.rows]
    assert statuses == ["out of memory", *["failed"] * 4]
    assert "did not run" in found.rows[1].message
    assert not found.is_sound


@pytest.mark.parametrize(("free_gb", "batch"), [(4, 1), (8, 5), (24, 16), (80, 16)])
def test_the_batch_is_what_there_is_room_for(free_gb: int, batch: int) -> None:
    assert sizes_for(free_gb * 10**9) == replace(Sizes(), batch=batch)


def test_too_little_room_is_told_of() -> None:
    with pytest.raises(ValueError, match=r"has 1\.0 GB free, and the trial needs 3\.0 GB"):
        sizes_for(10**9)


def test_the_model_is_the_same_each_time() -> None:
    """And the user's random numbers go on as they were."""
    before = torch.get_rng_state()
    losses = [model(tokens) for model, tokens in (made(TINY, CPU), made(TINY, CPU))]
    assert torch.equal(*losses)
    assert torch.equal(before, torch.get_rng_state())


def test_the_table_says_what_is_above_its_budget() -> None:
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(trial_table(CARD, FOUND))
    text = console.export_text()
    assert "NVIDIA Imagined 12GB: copies 450 GB/s, large products 80 TFLOP/s in bfloat16" in text
    assert "+10.0 %" in text
    assert "75%: its measured peak is above the budget." in text
    assert "25%: infeasible: Nothing fits." in text


@pytest.mark.usefixtures("on_a_gpu")
def test_the_file_is_one_to_plan_with(tmp_path: Path) -> None:
    """What the command writes is read as a device; a broken budget is its exit code."""
    out = tmp_path / "card.json"
    result = run("doctor", "--gpu", "--out", out)
    assert result.exit_code == 3
    assert f"--device {out}" in result.stdout
    assert read_card(out) == CARD
    assert json.loads(out.read_text())["trial"]["rows"][2]["message"] == "Nothing fits."
    again = json.loads(run("doctor", "--gpu", "--out", out, "--json").stdout)
    assert again["card"]["name"] == CARD.name
    assert again["trial"]["batch"] == 4


@pytest.mark.usefixtures("on_a_gpu")
def test_a_file_of_someone_else_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "notes.json"
    out.write_text("{}")
    assert "--force" in refused("doctor", "--gpu", "--out", out)
    assert out.read_text() == "{}"
    assert run("doctor", "--gpu", "--out", out, "--force").exit_code == 3


@pytest.mark.parametrize(
    ("built", "fact"),
    [(None, "is built without CUDA. Install a build"), ("13.0", "built for CUDA 13.0, and finds")],
)
def test_without_a_gpu_it_says_why(
    monkeypatch: pytest.MonkeyPatch, built: str | None, fact: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    told = refused("doctor", "--gpu")
    assert fact in told
    assert "--device H100" in told


def test_a_file_goes_with_the_gpu() -> None:
    assert "goes with --gpu" in refused("doctor", "--out", "card.json")
