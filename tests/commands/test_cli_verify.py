"""`autoremat verify`, as a user meets it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from autoremat.commands import verify as verify_command
from autoremat.targets.arguments import TargetArguments
from autoremat.targets.target import load_target
from autoremat.verification.whole_step import Verification
from tests.commands import command_line
from tests.commands.test_cli_solve import process

ROOT = Path(__file__).parents[2]
CHAIN = """
import torch
from torch import nn

class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.pow(2).sum()

def make():
    print("making")
    torch.manual_seed(0)
    return Chain(), torch.randn(256, 16)
"""
FIGURES = (
    "loss",
    "loss_error",
    "gradient_error",
    "buffer_error",
    "tolerance",
    "budget",
    "predicted_peak",
    "measured_peak",
)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    """Writes a file and returns its function `make` as a target."""

    def file(text: str = CHAIN) -> str:
        (tmp_path / "model.py").write_text(text, encoding="utf-8")
        return f"{tmp_path / 'model.py'}:make"

    return file


Write = Callable[..., str]


def arguments(target: str, budget: str, *options: str) -> list[str]:
    return ["verify", target, "--budget", budget, "--compiler", "eager", *options]


def run(target: str, budget: str, *options: str) -> Result:
    return command_line.run(*arguments(target, budget, *options))


def found(target: str, budget: str, *, exit_code: int = 0) -> dict[str, Any]:
    """The one JSON object on stdout."""
    result = run(target, budget, "--json")
    assert result.exit_code == exit_code, (result.stderr, result.exception)
    document = json.loads(result.stdout)
    assert isinstance(document, dict)
    return document


def refused(target: str, budget: str = "1GB", *options: str) -> str:
    return command_line.refused(*arguments(target, budget, *options))


def test_a_step_within_the_budget_is_ok(write: Write) -> None:
    """One object with errors and peaks; what the target prints does not mix with it."""
    document = found(write(), "1GB")
    assert document["schema"] == "autoremat.verification/1"
    assert document["status"] == "ok"
    assert document["failures"] == document["warnings"] == []
    assert document["budget"] == 10**9
    assert document["gradient_error"] <= document["tolerance"] == 1e-4
    assert 0 < document["measured_peak"] <= document["budget"]
    assert document["predicted_peak"] == document["measured_peak"]
    assert document["reference"] == "eager"
    assert document["compiler"] == "eager"
    assert all(isinstance(document[name], int | float) for name in FIGURES)


def test_a_tight_budget_is_kept(write: Write) -> None:
    """The smallest peak that an infeasible budget names is verified, and below the plain one."""
    target = write()
    plain = found(target, "1GB")["measured_peak"]
    smallest = found(target, "1kB", exit_code=2)["smallest_peak"]
    document = found(target, str(smallest))
    assert document["status"] == "ok"
    assert document["measured_peak"] <= document["budget"] == smallest < plain


@pytest.mark.thorough
def test_the_dropout_policy_is_an_option(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches `optimize`; a malformed one is a usage error that names the accepted forms."""
    given: list[object] = []
    original = verify_command.optimize

    def recording(*args: Any, **keywords: Any) -> Any:
        given.append(keywords["dropout"])
        return original(*args, **keywords)

    monkeypatch.setattr(verify_command, "optimize", recording)
    assert run(write(), "1GB", "--dropout", "save_masks").exit_code == 0
    assert given == ["save_masks"]
    refused = run(write(), "1GB", "--dropout", "sometimes")
    assert refused.exit_code != 0
    assert "replay" in refused.output


def test_an_infeasible_budget_exits_with_2(write: Write) -> None:
    """The message names the smallest peak, as text and in JSON."""
    target = write()
    result = run(target, "1kB")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "autoremat: Budget 1.0 kB is below what is resident under every plan" in result.stderr
    document = found(target, "1kB", exit_code=2)
    assert document["status"] == "infeasible"
    assert document["budget"] == 1000 < document["floor"] <= document["smallest_peak"]
    assert f"{document['smallest_peak']} bytes" in document["message"]


@pytest.mark.thorough
def test_the_table_shows_errors_peaks_and_the_verdict(write: Write) -> None:
    """In words, under the target's name."""
    result = run(write(), "1GB")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    for part in ("Chain", "Loss error", "Gradient error", "Buffer error", "Peak predicted"):
        assert part in text
    assert "Peak measured" in text
    assert "Budget 1.0 GB 1000000000 bytes" in text
    assert "Verdict ok" in text
    said, *progress = result.stderr.splitlines()
    assert said == "making"
    assert [line.split()[1] for line in progress][:2] == ["capture", "cost"]


RIGHT = Verification(1e-7, 1e-7, "", 0.0, "eager", 10**8, 10**8, 10**9, 1e-4)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"gradient_error": 0.5, "worst_gradient": "w[0]"}, "The gradient of w[0] differs from"),
        ({"gradient_error": float("nan"), "worst_gradient": "w"}, "The gradient of w differs"),
        ({"buffer_error": float("nan")}, "A buffer differs from eager's by nan"),
        ({"loss_error": float("inf")}, "The loss differs from eager's by inf"),
        ({"loss_error": 0.01}, "The loss differs from eager's by 0.01"),
        ({"measured_peak_nbytes": 2 * 10**9}, "The measured peak 2.0 GB is above the budget 1.0"),
    ],
)
def test_each_figure_can_fail(wrong: dict[str, Any], reason: str) -> None:
    """By itself, NaN included, and alone: the others are right."""
    asked = verify_command._Asked(TargetArguments("x.py:make"), "1GB", "eager", None, 30.0)
    document = verify_command._document(asked, replace(RIGHT, **wrong), 5.0, planned=True)
    assert document["status"] == "failed"
    (failure,) = document["failures"]
    assert reason in failure
    right = verify_command._document(asked, RIGHT, 5.0, planned=True)
    assert (right["status"], right["failures"]) == ("ok", [])


def test_the_first_value_that_differs_is_a_failure_of_its_own() -> None:
    """In words among the failures, and by name and line under keys of their own."""
    asked = verify_command._Asked(TargetArguments("x.py:make"), "1GB", "eager", None, 30.0)
    wrong = replace(
        RIGHT,
        gradient_error=0.5,
        worst_gradient="w",
        first_difference="tanh_2",
        first_difference_source="model.py:88",
        explanation="The first value that differs is tanh_2 (tanh, model.py:88).",
    )
    document = verify_command._document(asked, wrong, 5.0, planned=True)
    assert document["failures"][1:] == [wrong.explanation]
    assert document["first_difference"] == "tanh_2"
    assert document["first_difference_source"] == "model.py:88"
    right = verify_command._document(asked, RIGHT, 5.0, planned=True)
    assert right["first_difference"] is right["first_difference_source"] is None


@pytest.mark.thorough
def test_a_failed_verification_exits_with_3(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table says why; JSON has null where a figure is not finite."""
    real, wrong = verify_command.verify, {"gradient_error": float("nan"), "worst_gradient": "w[0]"}
    monkeypatch.setattr(verify_command, "verify", lambda *a, **k: replace(real(*a, **k), **wrong))
    document = found(write(), "1GB", exit_code=3)
    assert document["status"] == "failed"
    assert document["gradient_error"] is None
    result = run(write(), "1GB")
    assert result.exit_code == 3
    assert "NOT ok" in result.stdout
    assert "worst in w[0]" in result.stdout


@pytest.mark.thorough
def test_wrong_gradients_are_found(write: Write) -> None:
    """Not only by the figures: a step that really differs from call to call."""
    drifting = CHAIN.replace("def forward(self, x):", "def forward(self, x):\n        x = x * n()")
    text = "import itertools\ncount = itertools.count(1)\ndef n():\n    return next(count)\n"
    document = found(write(text + drifting), "1GB", exit_code=3)
    assert any("The gradient of layers." in failure for failure in document["failures"])


@pytest.mark.thorough
def test_the_loss_may_be_a_function_beside_the_model(write: Write) -> None:
    """Its value is the one that is compared."""
    text = CHAIN.replace("return x.pow(2).sum()", "return x")
    text = text.replace("torch.randn(256, 16)", "torch.randn(256, 16), lambda y: y.mean() + 7")
    document = found(write(text), "1GB")
    assert document["status"] == "ok"
    assert document["loss"] == pytest.approx(7, abs=1)


@pytest.mark.thorough
def test_the_loss_may_be_the_models_own(write: Write) -> None:
    """Inputs by keyword, and an output with `.loss`."""
    text = CHAIN.replace("return x.pow(2).sum()", "return Output(x.mean())")
    text = text.replace("torch.randn(256, 16)", "{'x': torch.randn(256, 16)}")
    text = "from typing import NamedTuple, Any\nclass Output(NamedTuple):\n    loss: Any\n" + text
    assert found(write(text), "1GB")["status"] == "ok"


def test_input_that_cannot_be_used_is_refused(write: Write, tmp_path: Path) -> None:
    """Target, budget, options: exit code 1, one message, nothing on stdout."""
    assert "does not exist" in refused(str(tmp_path / "no.py:make"))
    assert "names no function" in refused("model.py")
    target = write()
    assert 'Accepted: a size such as "40GB"' in refused(target, "12XB")
    assert "no number with a unit" in refused(target, "1__0")
    assert "finite" in refused(target, "1GB", "--time-limit", "inf")
    assert "--time-limit" in refused(target, "1GB", "--time-limit", "-1")
    assert "--compiler" in refused(target, "1GB", "--compiler", "gcc")
    result = command_line.run("verify", target)
    assert result.exit_code == 1
    assert "--budget" in result.stderr


def test_a_target_without_a_loss_is_refused(write: Write) -> None:
    """What the model returned, and what to return from the function."""
    text = CHAIN.replace("return x.pow(2).sum()", "return x")
    assert "The model returned a tensor of shape (256, 16)" in refused(write(text))


def test_a_step_that_fails_by_itself_is_the_targets(write: Write) -> None:
    """Its own error in one line, without Dynamo's."""
    wrong = CHAIN.replace("torch.randn(256, 16)", "torch.randn(256, 17)")
    message = refused(write(wrong))
    assert "fails in eager mode too: RuntimeError: mat1 and mat2" in message
    wrong = CHAIN.replace("torch.randn(256, 16)", "torch.randn(256, 16), lambda y: y.nothing")
    assert "AttributeError: 'Tensor' object has no attribute 'nothing'" in refused(write(wrong))


def test_a_failure_of_ours_keeps_its_traceback(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not blamed on a target whose step runs."""

    def defect(*_: object, **__: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(verify_command, "verify", defect)
    assert isinstance(run(write(), "1GB").exception, KeyError)


def test_a_model_that_cannot_be_planned_says_why(write: Write) -> None:
    """Without a parameter to train there is no backward."""
    frozen = CHAIN.replace("return Chain(),", "return Chain().requires_grad_(False),")
    message = refused(write(frozen))
    assert "model.py:make cannot be planned: AR201: No parameter" in message


@pytest.mark.thorough
def test_a_model_that_nothing_is_planned_for_fails(write: Write) -> None:
    """A forward that Dynamo does not compile keeps no budget: the warning says why."""
    text = CHAIN.replace("    def forward", "    @torch.compiler.disable\n    def forward")
    document = found(write(text), "1GB", exit_code=3)
    assert "Nothing was planned" in " ".join(document["failures"])
    assert document["measured_peak"] is document["predicted_peak"] is None
    (warning,) = document["warnings"]
    assert warning.startswith("AR105: ")
    result = run(write(text), "1GB")
    assert result.exit_code == 3
    assert "autoremat: AR105: The model runs in eager mode" in result.stderr
    assert "Peak" not in result.stdout


def test_the_example_is_a_target() -> None:
    """The command of the help and of the README names a function that loads."""
    help_text = command_line.run("verify", "--help").stdout
    for text in (help_text, (ROOT / "README.md").read_text(encoding="utf-8")):
        (target,) = set(re.findall(r"verify (examples/[\w./]+:\w+) --budget", text))
        file, _, function = target.partition(":")
        model = load_target(f"{ROOT / file}:{function}").model
        assert sum(p.numel() for p in model.parameters()) > 10**6


def test_the_command_line_itself_needs_no_torch() -> None:
    """Help and usage are answered where torch cannot be imported."""
    done = process("", "verify", "--help")
    assert done.returncode == 0, done.stderr
    assert "Exit codes" in done.stdout


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch, write: Write) -> None:
    """With the sentence, and no traceback."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify_command, "load", interrupted)
    result = run(write(), "1GB")
    assert result.exit_code == 130
    assert result.stderr == "Interrupted: nothing was written.\n"
