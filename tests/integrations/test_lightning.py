"""A whole `LightningModule` under a budget: loss, loggers, checkpoints, a resumed run."""

from __future__ import annotations

import csv
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat.memory.meter import measuring_peak, resident_nbytes
from autoremat.planning import pipeline

lightning = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.tuner import Tuner  # noqa: E402

from autoremat.integrations import followed  # noqa: E402
from autoremat.integrations.followed import PAGE, PLAN, REPORT  # noqa: E402
from autoremat.integrations.lightning import Autoremat  # noqa: E402

# Dynamo looks at `.grad` of what it resumes with after a graph break.
pytestmark = [
    pytest.mark.shares_plans,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

ROWS, WIDTH, BATCHES = 256, 32, 4
BUDGET_NBYTES = 500_000
QUICK = {"compiler": "eager", "verbose": False, "time_limit": 4.0}


def network() -> nn.Module:
    """Eight layers, the same each time."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8))
    return nn.Sequential(*layers)


class Module(lightning.LightningModule):
    """Layers, and the loss in `training_step`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (x,) = batch
        loss = (self.net(x) - x).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        assert not self.training
        self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader() -> Any:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(BATCHES * ROWS, WIDTH, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=ROWS)


def trainer_in(folder: Path, *callbacks: Any, epochs: int = 2) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(
        default_root_dir=folder,
        max_epochs=epochs,
        accelerator="cpu",
        log_every_n_steps=1,
        logger=CSVLogger(folder, name="log", version=0),
        callbacks=list(callbacks),
        **quiet,
    )


def fitted(module: Any, trainer: Any, *, over_budget: Any = "error", **given: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter(over_budget, autoremat.OverBudgetWarning)
        warnings.filterwarnings("ignore", message=".*does not have many workers|.*exists and is")
        warnings.filterwarnings("ignore", category=FutureWarning)
        trainer.fit(module, loader(), loader(), **given)
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def logged(folder: Path, name: str) -> list[float]:
    with (folder / "log" / "version_0" / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def test_a_whole_module_is_planned_with_its_loss(tmp_path: Path) -> None:
    """Weights are those of the run without a plan; figures are in the trainer's own log."""
    plain = fitted(Module(), trainer_in(tmp_path / "plain"))
    callback, module = Autoremat(BUDGET_NBYTES, **QUICK), Module()
    trainer = trainer_in(tmp_path, callback)
    torch.testing.assert_close(fitted(module, trainer), plain, rtol=0, atol=1e-4)
    assert not {"training_step", "log"} & vars(module).keys()
    assert logged(tmp_path, "loss")
    report = callback.report()
    assert report.optimizer == "AdamW"
    assert not report.fallbacks
    peaks = logged(tmp_path, "autoremat/measured_peak_bytes")
    assert len(peaks) > BATCHES, "all but those that compile"
    assert max(peaks) <= BUDGET_NBYTES < report.baseline_peak_nbytes
    assert logged(tmp_path, "autoremat/budget_bytes")[0] == BUDGET_NBYTES
    folder = Path(trainer.checkpoint_callback.dirpath)
    assert all((folder / name).exists() for name in (PLAN, REPORT, PAGE))


class Busy(lightning.Callback):
    """Looks at other rows beside each step, above the budget, and writes a checkpoint after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.look(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.look(pl_module)
        trainer.save_checkpoint(self.folder / "saved" / "last.ckpt")

    def look(self, module: Any) -> None:
        with torch.no_grad():
            module.net(torch.ones(8 * ROWS, WIDTH))


class Refusing(CSVLogger):
    """A log that has no place for what is new to it."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if any(name.startswith("autoremat/") for name in metrics):
            raise OSError(30, "Read-only file system")
        super().log_metrics(metrics, step)


@pytest.mark.parametrize("comes_first", [True, False])
def test_callbacks_in_any_order_and_folders_that_refuse_end_no_run(
    tmp_path: Path, comes_first: bool
) -> None:
    """Weights are those of the run without a plan; what is not written is told of, once."""
    plain = fitted(Module(), trainer_in(tmp_path / "plain", Busy(tmp_path)))
    (tmp_path / "saved" / REPORT).mkdir()  # where a file would go
    ours, other = Autoremat(BUDGET_NBYTES, **QUICK), Busy(tmp_path)
    trainer = lightning.Trainer(
        default_root_dir=tmp_path,
        max_epochs=2,
        accelerator="cpu",
        log_every_n_steps=1,
        logger=[Refusing(tmp_path), CSVLogger(tmp_path, name="log", version=0)],
        callbacks=[other, ours] if comes_first else [ours, other],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        weights = fitted(module, trainer)
    torch.testing.assert_close(weights, plain, rtol=0, atol=1e-4)
    lines = [str(one.message) for one in told if "autoremat: " in str(one.message)]
    assert sum("figures cannot be logged: OSError: [Errno 30]" in line for line in lines) == 1
    assert sum(f"plan and report are not in {tmp_path / 'saved'}" in line for line in lines) == 1
    assert len(lines) == 2
    assert logged(tmp_path, "loss")
    assert logged(tmp_path, "autoremat/budget_bytes") == [BUDGET_NBYTES] * 2 * BATCHES
    assert not ours.report().fallbacks


def test_plan_and_report_lie_beside_each_checkpoint(tmp_path: Path) -> None:
    """Of each callback that saves, with weights only or all, and saved by hand; not far away."""
    saving = [
        ModelCheckpoint(tmp_path / "all", save_top_k=-1, every_n_train_steps=2),
        ModelCheckpoint(tmp_path / "weights", save_weights_only=True),
    ]
    trainer = trainer_in(tmp_path, Autoremat(BUDGET_NBYTES, **QUICK), *saving, epochs=1)
    fitted(Module(), trainer)
    trainer.save_checkpoint(tmp_path / "by hand" / "own.ckpt")
    trainer.save_checkpoint("memory://far/own.ckpt")
    folders = [path for path in tmp_path.iterdir() if path.is_dir()]
    saved = {path.name for path in folders if list(path.glob("*.ckpt"))}
    assert saved == {"all", "weights", "by hand"}
    for name in (PLAN, REPORT, PAGE):
        assert {path.parent.name for path in tmp_path.rglob(name)} == saved
    assert not Path("memory:").exists()


@pytest.mark.parametrize("is_elsewhere", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_resumed_run_plans_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_elsewhere: bool
) -> None:
    """The plan lies beside the checkpoint, and in one that was saved by hand and moved away."""
    first = trainer_in(tmp_path, Autoremat(BUDGET_NBYTES, **QUICK), epochs=1)
    fitted(Module(), first)
    checkpoint = first.checkpoint_callback.best_model_path
    if is_elsewhere:
        checkpoint = str(tmp_path / "elsewhere" / "own.ckpt")
        first.save_checkpoint(checkpoint)
        shutil.move(checkpoint, checkpoint := str(tmp_path / "own.ckpt"))
    torch._dynamo.reset()
    searched = []
    search = pipeline.search
    monkeypatch.setattr(pipeline, "search", lambda *a, **k: searched.append(a) or search(*a, **k))
    again = trainer_in(tmp_path, Autoremat(BUDGET_NBYTES, **QUICK))
    fitted(Module(), again, ckpt_path=checkpoint)
    assert again.global_step == 2 * BATCHES
    assert not searched


@pytest.mark.parametrize("is_asked_twice", [False, True])
def test_a_network_that_is_optimised_already_is_planned_within_the_whole(
    tmp_path: Path, is_asked_twice: bool
) -> None:
    """The callback's budget holds; weights are those of a run without either."""
    plain = fitted(Module(), trainer_in(tmp_path / "plain"))
    module, ours = Module(), Autoremat(BUDGET_NBYTES, **QUICK)
    for _ in range(1 + is_asked_twice):
        autoremat.optimize(module.net, 2 * BUDGET_NBYTES, **QUICK)
    weights = fitted(module, trainer_in(tmp_path, ours))
    report = ours.report()
    torch.testing.assert_close(weights, plain)
    assert not report.fallbacks
    assert report.graphs
    assert report.budget_nbytes == BUDGET_NBYTES
    assert max(logged(tmp_path, "autoremat/measured_peak_bytes")) <= BUDGET_NBYTES


def test_another_version_of_lightning_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the callback is made."""
    monkeypatch.setattr(followed, "TESTED", {"lightning": ("1.8", "1.9")})
    with pytest.warns(UserWarning, match=r"lightning .* was not tested .* 1\.8 to 1\.9"):
        Autoremat(BUDGET_NBYTES)


class Metered(Module):
    """Measures its steps; its network has a budget of its own, or none."""

    def __init__(self, budget_nbytes: int | None = None) -> None:
        super().__init__()
        self.budget_nbytes, self.peaks = budget_nbytes, list[list[int]]()
        self.ask()

    def ask(self) -> None:
        """For the budget."""
        if self.budget_nbytes is not None:
            autoremat.optimize(self.net, self.budget_nbytes, **QUICK)

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        self.batch = batch

    def optimizer_step(self, epoch: int, number: int, optimizer: Any, closure: Any = None) -> None:
        held = resident_nbytes(self.net, self.batch, optimizer.optimizer)
        with measuring_peak("cpu", until_compile=True) as found:
            super().optimizer_step(epoch, number, optimizer, closure)
        self.peaks.append([held + one for one in found])


class Late(Metered):
    """Makes its network where Lightning has large ones made, and asks for the budget there."""

    def ask(self) -> None:
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:  # it is called for each stage
            self.net = network()
            super().ask()


@pytest.mark.parametrize("kind", [Metered, Late])
def test_a_network_optimised_by_itself_keeps_its_budget(
    tmp_path: Path, kind: type[Metered]
) -> None:
    """Each step from the second on, but for those that compile; weights are the plain run's."""
    plain, module = Metered(), kind(BUDGET_NBYTES)
    weights = fitted(plain, trainer_in(tmp_path / "plain"))
    # Its loss is outside: of that, and of the optimizer, the first step does not know.
    ours = fitted(module, trainer_in(tmp_path), over_budget="ignore")
    torch.testing.assert_close(ours, weights)
    compiling = [number for number, found in enumerate(module.peaks) if not found]
    assert compiling == [0, 1]  # in the second, the optimizer's state is there
    assert all(one <= BUDGET_NBYTES for found in module.peaks for one in found)
    assert all(one > BUDGET_NBYTES for found in plain.peaks[1:] for one in found)
    assert not autoremat.report(module.net).fallbacks


def test_a_module_that_goes_backward_itself_is_refused(tmp_path: Path) -> None:
    """Nothing of it is a step that can be planned."""
    module = Module()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match=r"self\.net"):
        fitted(module, trainer_in(tmp_path, Autoremat(BUDGET_NBYTES)))


class Within(Module):
    """Its network has a budget, and the batch is to be found."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2
        autoremat.optimize(self.net, BUDGET_NBYTES, **QUICK)

    def train_dataloader(self) -> Any:
        data = torch.utils.data.TensorDataset(torch.randn(8192, WIDTH))
        return torch.utils.data.DataLoader(data, batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return loader()


def test_lightning_finds_the_largest_batch_within_the_budget(tmp_path: Path) -> None:
    """A refusal is what it takes for memory that has run out."""
    module, trainer = Within(), trainer_in(tmp_path, epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = Tuner(trainer).scale_batch_size(module, init_val=128, steps_per_trial=2)
        assert found is not None
        assert found == module.batch_size < 8192
        trainer.fit(module)
    assert autoremat.report(module.net).predicted_peak_nbytes <= BUDGET_NBYTES
