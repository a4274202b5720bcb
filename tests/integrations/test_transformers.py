"""`transformers.Trainer` under a budget: its loggers, its checkpoints, a resumed run."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat.planning import pipeline

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from autoremat.integrations import followed  # noqa: E402
from autoremat.integrations.followed import PAGE, PLAN, REPORT  # noqa: E402
from autoremat.integrations.transformers import attach  # noqa: E402
from tests.integrations.metered import Meter, metered, weights  # noqa: E402
from tests.integrations.tiny_llama import VOCABULARY, llama  # noqa: E402
from tests.training import make_seeded  # noqa: E402

pytestmark = pytest.mark.shares_plans

ROWS, LENGTH, STEPS = 8, 32, 4
BUDGET = "2MB"
FOR_SEVEN = 1_000_000  # bytes: of eight rows, the smallest plan takes 1.05 MB
WRITTEN_WITHIN_S = 60.0
QUICK = {"compiler": "eager", "verbose": False, "time_limit": 4.0}


def texts() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (STEPS * ROWS, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer_in(folder: Path, meter: Meter | None = None, **arguments: Any) -> Any:
    given = {"logging_steps": 1, "save_steps": 2, "disable_tqdm": True, "report_to": []}
    given |= {"per_device_train_batch_size": ROWS, "num_train_epochs": 1, "use_cpu": True}
    args = transformers.TrainingArguments(
        output_dir=str(folder), dataloader_pin_memory=False, **given | arguments
    )
    made = transformers.Trainer if meter is None else metered(transformers.Trainer, meter)
    return made(model=make_seeded(llama), args=args, train_dataset=texts())


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


class Listening(transformers.TrainerCallback):
    """A logger that is called after ours."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        self.names |= logs.keys()


@pytest.mark.thorough
def test_a_run_is_planned_logged_and_kept_beside_its_checkpoints(tmp_path: Path) -> None:
    """With the optimizer's state from the first step on, and weights of the run without a plan."""
    plain = trainer_in(tmp_path / "plain", save_strategy="no")
    plain.train()
    trainer, before, after = trainer_in(tmp_path), Listening(), Listening()
    trainer.add_callback(before)
    attach(trainer, BUDGET, **QUICK)
    trainer.add_callback(after)
    with warnings.catch_warnings():
        warnings.simplefilter("error", autoremat.OverBudgetWarning)
        trainer.train()
    torch.testing.assert_close(weights(trainer.model), weights(plain.model), rtol=0, atol=1e-4)
    report = autoremat.report(trainer.model)
    assert report.optimizer == "AdamW"
    peaks = logged(trainer, "autoremat/measured_peak_bytes")
    assert 0 < len(peaks) < STEPS, "all but those that compile"
    predicted = logged(trainer, "autoremat/predicted_peak_bytes")
    assert max(peaks) <= predicted[-1] <= 2_000_000
    assert peaks[-1] > 0.9 * predicted[-1]
    assert all(ms > 0 for ms in logged(trainer, "autoremat/measured_step_ms"))
    assert before.names == after.names
    assert "autoremat/budget_bytes" in before.names
    folder = tmp_path / "checkpoint-2"
    assert autoremat.Report.from_json((folder / REPORT).read_text()).budget_nbytes == 2_000_000
    assert "autoremat report" in (folder / PAGE).read_text()
    assert json.loads((folder / PLAN).read_text())["compiler"] == "eager"


@pytest.mark.thorough
@pytest.mark.parametrize("rows", [ROWS, ROWS // 2])
def test_a_resumed_run_plans_nothing_that_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Another batch is planned, and a line says so. The budget holds, and so do the weights."""
    even = {"lr_scheduler_type": "constant", "logging_strategy": "no"}
    plain = trainer_in(tmp_path / "plain", save_strategy="no", **even)
    plain.train()
    trainer = trainer_in(tmp_path, max_steps=2, **even)
    attach(trainer, BUDGET, **QUICK)
    trainer.train()
    torch._dynamo.reset()
    searched = []
    search = pipeline.search
    monkeypatch.setattr(pipeline, "search", lambda *a, **k: searched.append(a) or search(*a, **k))
    meter = Meter()
    resumed = trainer_in(tmp_path, meter, per_device_train_batch_size=rows, max_steps=4, **even)
    attach(resumed, BUDGET, **QUICK)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert len(meter.peaks) == 2
    assert max(meter.peaks) <= 2_000_000
    if rows == ROWS:
        torch.testing.assert_close(weights(resumed.model), weights(plain.model), rtol=0, atol=1e-5)
    assert bool(searched) == (rows != ROWS)
    assert any("was set aside" in str(one.message) for one in told) == (rows != ROWS)


@pytest.mark.thorough
@pytest.mark.parametrize("is_named", [False, True])
def test_a_checkpoint_elsewhere_is_taken_or_asked_for(tmp_path: Path, is_named: bool) -> None:
    """Nobody is told of a path that `train` is given: a line says what to do."""
    trainer = trainer_in(tmp_path / "one", max_steps=2)
    attach(trainer, BUDGET, **QUICK)
    trainer.train()
    torch._dynamo.reset()
    folder = str(tmp_path / "one" / "checkpoint-2")
    named = {"resume_from_checkpoint": folder} if is_named else {}
    resumed = trainer_in(tmp_path / "two", max_steps=3, save_strategy="no", **named)
    attach(resumed, BUDGET, **QUICK)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        resumed.train(resume_from_checkpoint=folder)
    lines = [str(one.message) for one in told if "autoremat: " in str(one.message)]
    assert len(lines) == (not is_named)
    assert is_named or "resumed at step 2, and checkpoint-2 is not in" in lines[0]


@pytest.mark.thorough
def test_what_cannot_be_written_or_read_is_told(tmp_path: Path) -> None:
    """The run goes on."""
    trainer = trainer_in(tmp_path, max_steps=2)
    attach(trainer, BUDGET, **QUICK)
    (tmp_path / "checkpoint-2" / PLAN).mkdir(parents=True)
    with pytest.warns(UserWarning, match="plan and report are not in"):
        trainer.train()
    (tmp_path / "checkpoint-2" / PLAN).rmdir()
    (tmp_path / "checkpoint-2" / PLAN).write_text("{")
    resumed = trainer_in(tmp_path, max_steps=3)
    attach(resumed, BUDGET, **QUICK)
    with pytest.warns(UserWarning, match="planned anew"):
        resumed.train(resume_from_checkpoint=True)


class Uploads(transformers.TrainerCallback):
    """Moves each checkpoint away as soon as it is there, and leaves a note in its place."""

    def __init__(self, to: Path, *, leaves_note: bool) -> None:
        self.to, self.leaves_note = to, leaves_note
        to.mkdir()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        folder.rename(self.to / folder.name)
        if self.leaves_note:
            folder.write_text("moved")


class Refusing(transformers.TrainerCallback):
    """A logger that has no place for what is new to it."""

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if any(name.startswith("autoremat/") for name in logs):
            raise OSError(30, "Read-only file system")


@pytest.mark.parametrize(
    ("comes_first", "leaves_note"),
    [
        (True, True),
        pytest.param(True, False, marks=pytest.mark.thorough),
        pytest.param(False, True, marks=pytest.mark.thorough),
    ],
)
def test_callbacks_that_move_checkpoints_or_refuse_figures_end_no_run(
    tmp_path: Path, comes_first: bool, leaves_note: bool
) -> None:
    """Before ours or after: files go along with the checkpoint, or a line says that they do not."""
    trainer = trainer_in(tmp_path / "out", max_steps=3, save_steps=1)
    others = (Refusing(), Uploads(tmp_path / "moved", leaves_note=leaves_note))
    if comes_first:
        for one in others:
            trainer.add_callback(one)
    attach(trainer, BUDGET, **QUICK)
    if not comes_first:
        for one in others:
            trainer.add_callback(one)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.train()
    assert trainer.state.global_step == 3
    lines = [str(one.message) for one in told if "autoremat: " in str(one.message)]
    assert sum("figures cannot be logged: OSError: [Errno 30]" in line for line in lines) == 1
    assert sum("plan and report are not in" in line for line in lines) == comes_first
    assert len(lines) == 1 + comes_first
    moved = [tmp_path / "moved" / f"checkpoint-{step}" for step in (1, 2, 3)]
    assert all((folder / PLAN).exists() != comes_first for folder in moved)
    assert not [path for path in (tmp_path / "out").glob("checkpoint-*") if path.is_dir()]


@pytest.mark.thorough
def test_a_model_that_is_optimised_already_is_logged(tmp_path: Path) -> None:
    """Without a budget there has to be one."""
    trainer = trainer_in(tmp_path, max_steps=1, save_strategy="no")
    autoremat.optimize(trainer.model, BUDGET, **QUICK)
    attach(trainer)
    trainer.train()
    assert logged(trainer, "autoremat/budget_bytes") == [2_000_000]
    other = trainer_in(tmp_path, max_steps=1, save_strategy="no")
    attach(other)
    with pytest.raises(ValueError, match="Give a budget"):
        other.train()


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_model_that_is_optimised_twice_keeps_what_was_asked_for_last(
    tmp_path: Path, is_wrapped: bool
) -> None:
    """Then by `attach`, which says that it is not heeded; around it, what trainers wrap it into."""
    plain = trainer_in(tmp_path / "plain", save_strategy="no")
    plain.train()
    trainer = trainer_in(tmp_path, save_strategy="no")
    for budget in ("1.5MB", BUDGET):
        autoremat.optimize(trainer.model, budget, **QUICK)
    if is_wrapped:
        trainer.model_wrapped = nn.DataParallel(nn.DataParallel(trainer.model))
    attach(trainer, "3MB", **QUICK)
    with pytest.warns(UserWarning, match="the model was optimised before") as told:
        trainer.train()
    assert sum("optimised before" in str(one.message) for one in told) == 1
    torch.testing.assert_close(weights(trainer.model), weights(plain.model))
    report = autoremat.report(trainer.model)
    assert not report.fallbacks
    assert logged(trainer, "autoremat/budget_bytes") == [2_000_000] * STEPS
    peaks = logged(trainer, "autoremat/measured_peak_bytes")
    assert peaks
    assert max(peaks) <= report.budget_nbytes < report.baseline_peak_nbytes


@pytest.mark.thorough
def test_torch_compile_is_the_only_switch(tmp_path: Path) -> None:
    """The model is compiled by its plan, and by nothing else; the budget holds, and the weights."""
    none = {"save_strategy": "no", "logging_strategy": "no"}
    unplanned, meter = Meter(), Meter()
    plain = trainer_in(tmp_path / "plain", unplanned, **none)
    plain.train()
    trainer = trainer_in(tmp_path, meter, torch_compile=True, **none)
    with pytest.warns(UserWarning, match=r"was to compile the model \(torch_compile=True\)"):
        attach(trainer, BUDGET, **QUICK)
    trainer.train()
    assert trainer.model_wrapped is trainer.model
    report = autoremat.report(trainer.model)
    assert not report.fallbacks
    assert len(meter.peaks) == STEPS - 1
    assert max(meter.peaks) <= report.budget_nbytes < max(unplanned.peaks)
    torch.testing.assert_close(weights(trainer.model), weights(plain.model), rtol=0, atol=1e-5)


@pytest.mark.parametrize("by_launcher", [False, True])
def test_a_trainer_that_was_to_compile_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_launcher: bool
) -> None:
    """Nor does one whose accelerator is made anew, as for each trial of a search."""
    if by_launcher:  # as `accelerate launch` has it
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "AOT_EAGER")
    own = {} if by_launcher else {"torch_compile": True, "torch_compile_mode": "max-autotune"}
    trainer = trainer_in(tmp_path, **own)
    asked = "dynamo_backend=AOT_EAGER" if by_launcher else "torch_compile=True"
    with pytest.warns(UserWarning, match=asked):
        attach(trainer, BUDGET, **QUICK)
    for _ in range(2):
        assert trainer.accelerator.state.dynamo_plugin.backend == "NO"
        trainer.args = dataclasses.replace(trainer.args)
        trainer.create_accelerator_and_postprocess()


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_a_trainer_that_decides_itself_is_refused(tmp_path: Path, name: str) -> None:
    """Before anything runs, with the argument's name."""
    trainer = trainer_in(tmp_path, max_steps=1)
    setattr(trainer.args, name, True)
    with pytest.raises(ValueError, match=f"{name}=True"):
        attach(trainer, BUDGET)


def test_a_trainer_that_is_attached_to_already_is_refused(tmp_path: Path) -> None:
    """Its model keeps the first plan."""
    trainer = trainer_in(tmp_path, max_steps=1)
    attach(trainer, BUDGET)
    with pytest.raises(ValueError, match="has a budget already"):
        attach(trainer, "1MB")


@pytest.mark.thorough
def test_trials_of_a_search_have_files_of_their_own(tmp_path: Path) -> None:
    """Each in its checkpoints, and a new model is planned for each trial."""
    pytest.importorskip("optuna")
    trainer = trainer_in(tmp_path, max_steps=1, save_steps=1, eval_strategy="no")
    trainer.model_init = functools.partial(make_seeded, llama)
    trainer.eval_dataset = texts()[:ROWS]
    attach(trainer, BUDGET, **QUICK)
    trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-3)},
        n_trials=2,
        backend="optuna",
        compute_objective=lambda _: 0.0,
    )
    for run in ("run-0", "run-1"):
        assert (tmp_path / run / "checkpoint-1" / PLAN).exists()
    assert not (tmp_path / "checkpoint-1").exists()


@pytest.mark.thorough
def test_tensorboard_has_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As read from the file that the trainer's own logger has written."""
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "log"))
    trainer = trainer_in(tmp_path, max_steps=2, save_strategy="no", report_to=["tensorboard"])
    attach(trainer, BUDGET, **QUICK)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that library's own
        trainer.train()
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        (file,) = (tmp_path / "log").rglob("events.*")
        found = EventAccumulator(str(file.parent)).Reload()
    budgets = found.Scalars("train/autoremat/budget_bytes")
    assert [(one.step, one.value) for one in budgets] == [(1, 2e6), (2, 2e6)]
    assert found.Scalars("train/autoremat/measured_peak_bytes")[-1].value <= 2e6


@pytest.mark.thorough
def test_wandb_has_the_figures_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the run's summary, and in the file that waits to be sent."""
    wandb = pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    trainer = trainer_in(tmp_path, max_steps=2, save_strategy="no", report_to=["wandb"])
    attach(trainer, BUDGET, **QUICK)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that library's own
        trainer.train()
        found = dict(wandb.run.summary)
        wandb.finish()
        wandb.teardown()  # its own process writes the file, some time after it was asked to
    assert found["train/autoremat/budget_bytes"] == 2_000_000
    assert found["train/autoremat/measured_peak_bytes"] <= 2_000_000
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    until = time.monotonic() + WRITTEN_WITHIN_S
    while b"train/autoremat/measured_peak_bytes" not in file.read_bytes():
        assert time.monotonic() < until
        time.sleep(0.2)


def test_a_batch_above_the_budget_is_made_smaller(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With `auto_find_batch_size`: the run goes on with the next one, which has a plan."""
    trainer = trainer_in(tmp_path, save_strategy="no", max_steps=2, auto_find_batch_size=True)
    attach(trainer, FOR_SEVEN, **QUICK | {"time_limit": 0.5})
    with warnings.catch_warnings():
        warnings.simplefilter("error", autoremat.OverBudgetWarning)
        trainer.train()
    assert trainer.state.global_step == 2
    refused = ROWS - trainer.state.train_batch_size  # it is taken less by one each time
    assert refused
    peaks = logged(trainer, "autoremat/measured_peak_bytes")
    assert peaks
    assert max(peaks) <= logged(trainer, "autoremat/predicted_peak_bytes")[-1] <= FOR_SEVEN
    lines = [record.message for record in caplog.records if record.name == "autoremat"]
    assert len(lines) == refused
    assert "accelerate goes on with a smaller batch. Budget 1.0" in lines[0]


def test_another_version_of_transformers_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the trainer is attached to."""
    monkeypatch.setattr(followed, "TESTED", {"transformers": ("3.0", "3.5")})
    with pytest.warns(UserWarning, match=r"transformers .* was not tested .* 3\.0 to 3\.5"):
        attach(trainer_in(tmp_path), BUDGET, **QUICK)
