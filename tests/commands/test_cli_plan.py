"""`autoremat plan`, `pareto`, `profile`, `doctor`, and targets from configurations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autoremat import offline
from autoremat.commands import doctor
from autoremat.commands.doctor import Trouble
from autoremat.comparison.variants import Task, chosen_variants
from autoremat.comparison.worker import measure
from autoremat.reporting import Report
from autoremat.targets.arguments import TargetArguments
from autoremat.targets.hf import load_hf
from autoremat.targets.target import TargetError
from tests.commands.command_line import refused, run

QUICK = ["--compiler", "eager", "--time-limit", "2"]
MODEL = """
import torch
from torch import nn

class WithLoss(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()

def make():
    print("the model speaks")
    torch.manual_seed(0)
    layers = [part for _ in range(6) for part in (nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64))]
    return WithLoss(*layers).train(), torch.randn(512, 64)

def beside():
    return (*make(), lambda output: 2 * output)

def broken():
    return WithLoss(nn.Linear(3, 3)).train(), torch.randn(4, 5)

def asleep():
    return WithLoss(nn.Linear(3, 3)).eval(), torch.randn(4, 3)
"""
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    return f"{tmp_path / 'model.py'}:make"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA))
    return tmp_path / "llama.json"


# --- plan --------------------------------------------------------------------------------------


def test_a_plan_on_the_terminal_and_as_files(target: str, tmp_path: Path) -> None:
    """The verdict on stdout, what the user's code prints on stderr, the files as asked for."""
    report, page = tmp_path / "report.json", tmp_path / "plan.html"
    result = run("plan", target, "--budget", "1.5MB", *QUICK, "--out", report, "--html", page)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Peak ")
    assert "the model speaks" in result.stderr
    read = Report.from_json(report.read_text())
    assert 0 < read.predicted_peak_nbytes <= 1_500_000
    assert len(read.curve) > 3
    assert "<html" in page.read_text()
    again = run("plan", target, "--budget", "1.5MB", *QUICK, "--curve", "0", "--out", report)
    assert again.exit_code == 0  # our own file is replaced


@pytest.mark.thorough
def test_one_object_for_programs(target: str) -> None:
    result = run("plan", target, "--budget", 1_500_000, *QUICK, "--curve", 0, "--json")
    found = json.loads(result.stdout)
    assert found["budget_nbytes"] == 1_500_000
    assert found["predicted_peak_nbytes"] <= 1_500_000
    assert found["values"]
    assert found["seconds"] > 0


@pytest.mark.thorough
def test_throughput_as_a_goal(target: str, tmp_path: Path) -> None:
    """Text, one object for programs, page and report say the same; an unknown goal is refused."""
    page, out = tmp_path / "page.html", tmp_path / "report.json"
    asked = ["plan", target, "--budget", "2MB", *QUICK, "--curve", "0", "--goal"]
    told = run(*asked, "throughput", "--html", page, "--out", out)
    found = Report.from_json(out.read_text()).throughput
    assert found is not None
    assert found.samples == 512
    assert found.text() in told.stdout
    assert found.adaptive_text()[1:] in page.read_text()
    document = json.loads(run(*asked, "throughput", "--json").stdout)["throughput"]
    assert document["here"]["budget_nbytes"] == 2_000_000
    assert document["enough_nbytes"] == found.enough_nbytes
    assert "throughput" in refused(*asked, "speed")


@pytest.mark.thorough
def test_a_loss_beside_the_model_is_said_to_be_in_no_plan(target: str, tmp_path: Path) -> None:
    """The model alone is planned: on stderr, in the JSON and in the report."""
    out = tmp_path / "report.json"
    arguments = ("--budget", "1.5MB", *QUICK, "--curve", 0, "--json", "--out", out)
    result = run("plan", target.replace(":make", ":beside"), *arguments)
    assert result.exit_code == 0, result.output
    (warning,) = json.loads(result.stdout)["warnings"]
    assert "not in this plan" in warning
    assert warning in result.stderr
    facts = {fact.name: fact.text for fact in Report.from_json(out.read_text()).facts}
    assert "beside the model" in facts["Loss"]


def test_a_range_of_sizes_is_planned_for_the_largest(llama: Path) -> None:
    """Of a configuration, without `--batch` and `--seq`; the report says how far it is proven."""
    ranges = ("--sizes", "batch=1:4,sequence=8:32")
    result = run("plan", f"hf:{llama}", "--budget", "1GB", *QUICK, "--curve", 0, *ranges)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "batch up to 4, sequence up to 32: proven" in text
    assert "Formula" in text


def test_no_plan_fits(target: str) -> None:
    """Exit code 2, and a budget that is accepted."""
    result = run("plan", target, "--budget", "300kB", *QUICK, "--json")
    assert result.exit_code == 2
    smallest = json.loads(result.stdout)["smallest_peak"]
    assert run("plan", target, "--budget", smallest, *QUICK).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "40 gigs"], "Accepted"),
        (["--budget", "1GB", "--device", "H1000"], "neither"),
        (["--budget", "1GB", "--optimizer", "Adamm"], "Did you mean Adam"),
        (["--budget", "1GB", "--sizes", "batch=32"], "write batch=1:32"),
        (["--budget", "1GB", "--shards", "0"], "shards is a whole number of at least 1"),
        (["--budget", "1GB", "--lora", "0", "--lora-rank", "0"], "lora_rank is a whole number"),
        (["--budget", "1GB", "--lora", "q_proj"], 'Near it: "0"'),
        (["--budget", "1GB", "--precision", "int4"], "bfloat16"),
        (["--budget", "1GB", "--time-limit", "inf"], "finite"),
        (["--budget", "1GB", "--curve", "1"], "two ends"),
        (["--budget", "1GB", "--out", "/no/such/folder/report.json"], "no directory"),
    ],
)
def test_arguments_that_cannot_be_used(target: str, arguments: list[str], message: str) -> None:
    result = run("plan", target, "--compiler", "eager", *arguments)
    assert result.exit_code == 1
    assert message in result.stderr


@pytest.mark.parametrize(
    ("function", "message"),
    [("broken", "fails in eager mode too"), ("asleep", "eval mode"), ("nothing", "no function")],
)
def test_targets_that_cannot_be_used(target: str, function: str, message: str) -> None:
    result = run("plan", target.replace(":make", f":{function}"), "--budget", "1GB", *QUICK)
    assert result.exit_code == 1
    assert message in result.stderr


def test_a_file_of_somebody_elses_is_not_replaced(target: str, tmp_path: Path) -> None:
    out = tmp_path / "thesis.json"
    out.write_text("years of work")
    result = run("plan", target, "--budget", "1GB", *QUICK, "--out", out)
    assert result.exit_code == 1
    assert "--force" in result.stderr
    assert out.read_text() == "years of work"


def test_ctrl_c(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Report:
        raise KeyboardInterrupt

    monkeypatch.setattr(offline, "plan", interrupted)
    result = run("plan", target, "--budget", "1GB")
    assert result.exit_code == 130
    assert "Interrupted" in result.stderr


@pytest.mark.thorough
def test_forty_columns_a_pipe_and_no_colour(target: str) -> None:
    """Nothing is cut, and no escape codes reach a pipe."""
    environment = {**os.environ, "COLUMNS": "40", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "autoremat", "plan", target, "--budget", "1.5MB", *QUICK]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "\x1b" not in ended.stdout + ended.stderr
    assert "budget 1.5 MB" in ended.stdout


@pytest.mark.parametrize("command", ["profile", "pareto"])
def test_tables_of_a_narrow_terminal(
    target: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns are left out, what they were about is not, and no figure is cut."""
    monkeypatch.setenv("COLUMNS", "40")
    brief = [*QUICK, "--points", 3] if command == "pareto" else []
    result = run(command, target, *brief)
    assert result.exit_code == 0, result.output
    table = [line for line in result.stdout.splitlines() if "make" not in line]
    assert max(map(len, table)) <= 40
    assert "…" not in result.stdout
    wanted = ("addmm", "saved") if command == "profile" else ("peak", "extra", "+0.0%")
    assert all(word in result.stdout for word in wanted)


def test_sizes_that_a_function_decides_are_refused(target: str) -> None:
    """Nothing that the user wrote is silently ignored."""
    for command in ("plan", "verify"):
        result = run(command, target, "--budget", "1GB", "--batch", 4, "--dtype", "bfloat16")
        assert result.exit_code == 1
        assert "--batch and --dtype" in result.stderr
        assert "hf: targets" in " ".join(result.stderr.split())


@pytest.mark.thorough
def test_the_profiler_says_nothing_of_its_own(target: str) -> None:
    """Torch's reports each session on stderr."""
    command = [sys.executable, "-m", "autoremat", "plan", target, "--budget", "1.5MB", *QUICK]
    environment = {**os.environ, "XDG_CACHE_HOME": str(Path(target).parent)}  # nothing is known
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "profiler" not in ended.stderr


# --- configurations ----------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_configuration_plans_without_weights(llama: Path) -> None:
    result = run(
        *("plan", f"hf:{llama}", "--batch", 2, "--seq", 64, "--device", "H100", "--budget", "1GB"),
        *("--dtype", "bfloat16", "--optimizer", "adamw", "--time-limit", 2, "--json"),
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["device"] == "NVIDIA H100 80GB"
    assert {value["dtype"] for value in found["values"]} >= {"bfloat16"}


@pytest.mark.thorough
def test_a_configuration_can_be_verified(llama: Path) -> None:
    """With random weights: the step really runs."""
    result = run(
        *("verify", f"hf:{llama}", "--batch", 2, "--seq", 32, "--budget", "100MB"),
        *("--compiler", "eager", "--time-limit", 2, "--json"),
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["gradient_error"] <= 1e-4


@pytest.mark.thorough
def test_sizes_travel_to_other_processes_with_the_target(llama: Path) -> None:
    """`compare` measures each variant in one."""
    asked = TargetArguments(f"hf:{llama}", batch=3, seq=17, dtype="bfloat16")
    assert TargetArguments.from_text(asked.to_text()) == asked
    plain = TargetArguments("my model.py:make")
    assert TargetArguments.from_text(plain.to_text()) == plain
    task = Task(asked.to_text(), chosen_variants([], [], "eager")[0], None, 1.0, 1)
    row, _ = measure(task)
    assert row["status"] == "ok"
    assert row["batch"] == 3


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIGURATIONS = {
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64},
    "bert": SMALL | {"intermediate_size": 64, "vocab_size": 64},
    "t5": {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    | {"decoder_start_token_id": 0},
    "resnet": {"hidden_sizes": [8, 8], "depths": [1, 1], "embedding_size": 8},
    "vit": SMALL | {"intermediate_size": 64, "image_size": 32, "patch_size": 16},
    "whisper": {
        **{"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64},
        **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 64},
        **{"max_source_positions": 32, "num_mel_bins": 16, "vocab_size": 512, "pad_token_id": 0},
        **{"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    },
}


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_batches_are_made_up_for_every_kind_of_model(kind: str, tmp_path: Path) -> None:
    """The step runs and has a loss."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, **CONFIGURATIONS[kind]}))
    made = load_hf(TargetArguments(f"hf:{path}", batch=2, seq=16), without_weights=False)
    made.loss(made.model(**made.keywords)).backward()
    empty = load_hf(TargetArguments(f"hf:{path}", batch=2, seq=16), without_weights=True)
    assert empty.on_meta
    assert all(tensor.device.type == "meta" for tensor in empty.keywords.values())


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("whisper", "WhisperForConditionalGeneration"),
        ("t5", "T5ForConditionalGeneration"),
        ("bert", "BertForMaskedLM"),
        ("gpt2", "GPT2LMHeadModel"),
    ],
)
def test_the_class_of_a_configuration_that_names_none(kind: str, name: str, tmp_path: Path) -> None:
    """The whole model: of an encoder and a decoder, not the decoder alone."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, **CONFIGURATIONS[kind]}))
    made = load_hf(TargetArguments(f"hf:{path}", batch=2, seq=16), without_weights=True)
    assert type(made.model).__name__ == name


def test_a_decoder_has_positions_too(tmp_path: Path) -> None:
    """Whisper's batch is sound; its labels are what has to fit."""
    path = tmp_path / "config.json"
    settings = CONFIGURATIONS["whisper"] | {"max_target_positions": 8}
    path.write_text(json.dumps({"model_type": "whisper", **settings}))
    with pytest.raises(TargetError, match=r"8 positions .*max_target_positions"):
        load_hf(TargetArguments(f"hf:{path}", seq=16), without_weights=True)


@pytest.mark.thorough
def test_a_warning_of_transformers_does_not_split_the_step(tmp_path: Path) -> None:
    """GPT-2's class does not name its loss, of which transformers warns within the forward."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", **CONFIGURATIONS["gpt2"]}))
    arguments = ("--seq", 16, "--device", "H100", "--points", 3)
    result = run("pareto", f"hf:{path}", *arguments, *QUICK)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llamma"}, "model_type 'llamma'"),
        ({"architectures": ["LlamaForPoetry"]}, "no architecture 'LlamaForPoetry'"),
        ({"architectures": ["LlamaModel"]}, "takes no labels"),
        ({"num_attention_heads": 5}, "makes no configuration"),
        ({"vocab_size": -1}, "cannot be built"),
        ({"max_position_embeddings": 8}, "8 positions"),
    ],
)
def test_configurations_that_cannot_be_used(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **change}))
    with pytest.raises(TargetError, match=message):
        load_hf(TargetArguments(f"hf:{path}", seq=16), without_weights=True)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model_type": 3}', '{"model_type": "gpt2"'])
def test_files_that_are_no_configuration(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(TargetError, match=r"config\.json"):
        load_hf(TargetArguments(f"hf:{path}"), without_weights=True)


@pytest.mark.parametrize(("path", "reason"), [("", "names no file"), (".", "names no file")])
def test_places_of_no_configuration(path: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=reason):
        load_hf(TargetArguments(f"hf:{path}"), without_weights=True)
    with pytest.raises(TargetError, match="cannot be read: Is a directory"):
        load_hf(TargetArguments(f"hf:{tmp_path}"), without_weights=True)


# --- pareto and profile ------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_curve_of_a_target(target: str) -> None:
    """More memory is never slower; the chosen ends are the smallest peak and the fastest step."""
    result = run("pareto", target, *QUICK, "--points", 6, "--json")
    assert result.exit_code == 0, result.output
    points = json.loads(result.stdout)["points"]
    peaks, times = [p["peak_nbytes"] for p in points], [p["time_us"] for p in points]
    assert len(points) >= 4
    assert peaks == sorted(peaks)
    assert times == sorted(times, reverse=True)
    table = run("pareto", target, *QUICK, "--points", 4)
    assert "█" in table.stdout


def test_where_time_and_memory_go(target: str) -> None:
    """By operator and by module, the same sums."""
    found = json.loads(run("profile", target, "--json").stdout)
    for table in (found["by_operator"], found["by_module"]):
        total = sum(part["forward_us"] + part["backward_us"] for part in table)
        assert total == pytest.approx(found["time_us"], rel=1e-4)  # steps are kept to a nanosecond
    operators = {part["name"]: part for part in found["by_operator"]}
    assert operators["addmm"]["runs"] == 6
    assert operators["tanh"]["saved_nbytes"] > 0
    assert {part["name"] for part in found["by_module"]} >= {"0", "1"}
    assert "addmm" in run("profile", target).stdout


# --- doctor ------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_doctor_finds_this_machine_sound() -> None:
    """Every check passes where the tests pass; without a C++ compiler, that one says so."""
    result = run("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert all(check["ok"] for name, check in checks.items() if name != "compiler"), checks
    assert "HiGHS" in checks["solver"]["text"]
    assert "as in eager mode" in checks["a planned step"]["text"]


def test_the_doctor_goes_on_after_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def troubled() -> str:
        raise Trouble("Install it.")

    def broken() -> str:
        raise ZeroDivisionError("by zero")

    checks = {"one": troubled, "two": broken, "three": lambda: "fine"}
    monkeypatch.setattr(doctor, "CHECKS", checks)
    result = run("doctor")
    assert result.exit_code == 1
    assert [line.split()[0] for line in result.stdout.splitlines() if line.strip()] == [
        "no",
        "no",
        "ok",
    ]
    assert "Install it." in result.stdout
    assert "ZeroDivisionError: by zero" in result.stdout


def test_shell_completion_is_offered() -> None:
    assert "--install-completion" in run("--help").stdout
