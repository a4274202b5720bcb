"""`autoremat fit`: targets whose batch has any size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands.command_line import refused, run
from tests.commands.test_cli_plan import LLAMA

QUICK = ["--compiler", "eager", "--device", "H100", "--time-limit", "2", "--points", "0"]
MOST = ["--most", "6"]
MODEL = """
import torch
from torch import nn

class WithLoss(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()

def model():
    return WithLoss(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU()).train()

def fixed():
    return model(), torch.randn(4, 32)

def sized(batch=4):
    return model(), torch.randn(batch, 32)

def width(width=8):
    return WithLoss(nn.Linear(8, 8)).train(), torch.randn(width, 8)

def mixed():
    return model(), (torch.randn(4, 32), torch.randn(3, 32))
"""


@pytest.fixture
def place(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    return str(tmp_path / "model.py")


@pytest.fixture
def llama(tmp_path: Path) -> str:
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA))
    return f"hf:{tmp_path / 'llama.json'}"


def test_a_function_with_and_without_a_batch_gets_the_same_answer(place: str, tmp_path: Path):
    """Called with each size, or its inputs' first dimension made as long."""
    answers = []
    for name in ("fixed", "sized"):
        files = [f"--{kind}={tmp_path / f'{name}.{kind}'}" for kind in ("svg", "html", "csv")]
        result = run("fit", f"{place}:{name}", "--budget", "30kB", "--json", *MOST, *QUICK, *files)
        assert result.exit_code == 0, result.stderr
        answers.append(json.loads(result.stdout))
    one, other = answers
    assert one["largest"]["size"] == other["largest"]["size"] == 6
    assert one["largest"]["plan"] == other["largest"]["plan"]
    assert (tmp_path / "sized.csv").read_text().startswith("size,way,peak_nbytes")


def test_sequences_end_at_the_positions_of_a_configuration(llama: str):
    """Without weights, in text; it has 128."""
    result = run(
        "fit", llama, "--budget", "1GB", "--over", "sequence", "--multiple-of", "128", *QUICK
    )
    assert result.exit_code == 0, result.stderr
    assert "the largest sequence is 128" in result.stdout


@pytest.mark.thorough
def test_the_batch_at_several_lengths(llama: str):
    result = run(
        *("fit", llama, "--budget", "4MB", "--over", "batch,sequence", "--seq", "32", "--json"),
        *("--multiple-of", "32", "--most", "96"),
        *QUICK,
    )
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["lengths"] == [32, 16, 8, 4]
    sizes = [found["largest"]["size"] for found in document["fits"]]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_a_budget_in_which_nothing_fits_has_exit_code_2(place: str):
    result = run("fit", f"{place}:sized", "--budget", "5kB", *QUICK)
    assert result.exit_code == 2
    assert "That is batch 1, the smallest that was asked for" in result.stderr


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fixed", ["--over", "width"], "has no parameter 'width'"),
        ("mixed", [], "have no first dimension in common"),
        ("fixed", ["--over", "batch,sequence"], "is for hf: targets"),
        ("fixed", ["--reserve", "2"], "reserve is a share"),
        ("nothing", [], "has no function 'nothing'"),
    ],
)
def test_what_cannot_be_used_is_refused(place: str, name: str, options: list[str], message: str):
    assert message in refused("fit", f"{place}:{name}", "--budget", "30kB", *QUICK, *options)
