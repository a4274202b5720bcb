"""A whole `LightningModule` under a budget, its loss included.

    trainer = lightning.Trainer(callbacks=[autoremat.integrations.lightning.Autoremat("40GB")])
    trainer.fit(module)

Enters: a trainer's run. Leaves: its training steps, planned as a whole: what `training_step` calls
and the loss that it computes are one step, and `forward` alone is left as it is. Figures are in the
trainer's own loggers, plan and report beside each checkpoint that is a local file.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from torch import nn

from autoremat.integrations.followed import PLAN, Followed, tell_if_untested

_LOGS = ("log", "log_dict")  # methods of a module


class Autoremat(lightning.Callback):
    """Plans the module's training steps."""

    def __init__(self, budget: str | int, **options: Any) -> None:
        """Before the trainer is made; arguments as for `optimize`."""
        tell_if_untested("lightning")
        self._followed = Followed(budget, options)
        self._step: _TrainingStep | None = None
        self._resumed_plan = ""

    def state_dict(self) -> dict[str, Any]:
        """The plan goes into each checkpoint as well, wherever that is saved."""
        text = self._followed.plan_text() if self._step is not None else ""
        return {"plan": text} if text else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of the checkpoint that the run is resumed from."""
        self._resumed_plan = str(state_dict.get("plan", ""))

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """The optimizers are there: their state counts from the first step on.

        Raises:
            ValueError: if the module goes backward itself, so that no step can be planned.
        """
        if not pl_module.automatic_optimization:
            raise ValueError(
                "The module has automatic_optimization=False, so its training_step goes backward "
                "itself: optimize the network inside of it, self.net, instead."
            )
        self._step = _TrainingStep(pl_module)
        pl_module.training_step = self._step.called
        for name in _LOGS:  # nothing to compile: it speaks to the trainer
            setattr(pl_module, name, torch.compiler.disable(getattr(pl_module, name)))
        with tempfile.TemporaryDirectory() as room:
            folder, name = self._resumed_from(trainer.ckpt_path, Path(room))
            self._followed.begin(self._step, trainer.optimizers, folder, name)
        if not isinstance(trainer.save_checkpoint, _Saving):  # else it is a second run
            trainer.save_checkpoint = _Saving(  # type: ignore[method-assign]
                trainer.save_checkpoint, functools.partial(self._saved, trainer)
            )

    def _resumed_from(self, given: str | Path | None, room: Path) -> tuple[Path | None, str]:
        """A folder with the plan of the checkpoint, and where that is for the user."""
        if given is None:
            return None, ""
        plan, self._resumed_plan = self._resumed_plan, ""
        if not plan:
            return Path(given).parent, ""
        # A checkpoint may have been made anywhere: what is no text is told of where it is read.
        (room / PLAN).write_bytes(plan.encode(errors="surrogatepass"))
        return room, f"The plan in {given}"

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Steps are measured that are logged."""
        self._followed.step_begins(is_measured=_is_logged(trainer, trainer.global_step + 1))

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Figures go to all loggers."""
        figures = self._followed.step_ends()
        if _is_logged(trainer, trainer.global_step):
            for logger in trainer.loggers:
                log = functools.partial(logger.log_metrics, figures, step=trainer.global_step)
                self._followed.log(log)

    def _saved(self, trainer: lightning.Trainer, path: str | Path) -> None:
        """A checkpoint is there, whoever has asked for it; files go beside it once a step ran."""
        is_local = "://" not in str(path)
        if is_local and trainer.is_global_zero and trainer.global_step:
            self._followed.store(Path(path).parent)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """The module is as it was."""
        self._restore(pl_module)

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: Any, exception: BaseException
    ) -> None:
        """The same where the run was cut short."""
        self._restore(pl_module)

    def report(self) -> Any:
        """The report of the run's steps, as `autoremat.report` gives it.

        Raises:
            ValueError: if no step has run.
        """
        from autoremat.api import report

        if self._step is None:
            raise ValueError("Nothing is planned yet: that happens at the first training step.")
        return report(self._step)

    def _restore(self, pl_module: Any) -> None:
        self._followed.leave()
        for name in ("training_step", *_LOGS):
            vars(pl_module).pop(name, None)


def _is_logged(trainer: lightning.Trainer, step: int) -> bool:
    return bool(trainer.loggers) and step % max(1, getattr(trainer, "log_every_n_steps", 1)) == 0


class _Saving:
    """A trainer's `save_checkpoint`: no hook of a callback is told where a checkpoint lies."""

    def __init__(self, save: Callable[..., None], tell: Callable[[str | Path], None]) -> None:
        self._save, self._tell = save, tell

    def __call__(self, filepath: str | Path, *args: Any, **kwargs: Any) -> None:
        self._save(filepath, *args, **kwargs)
        self._tell(filepath)


class _TrainingStep(nn.Module):
    """A module whose call is the training step of another one."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self._own = type(module).training_step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._own(self.module, *args, **kwargs)

    def called(self, *args: Any, **kwargs: Any) -> Any:
        """In the mode that the module is in, which changes without this one."""
        self.training = self.module.training
        return self(*args, **kwargs)
