"""A loop of one's own with `accelerate`, under a budget.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    autoremat.integrations.accelerate.attach(accelerator, model, optimizer, "40GB")

Enters: an accelerator with a model and its optimizer, before `prepare` or after. Leaves: their
steps, planned from the first one on with the state of the optimizer; figures in the accelerator's
trackers; plan and report in what `save_state` writes, so that a run which `load_state` resumes
plans nothing that is as it was.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from torch import nn

from autoremat.integrations.followed import Followed, tell_if_untested
from autoremat.memory.optimizers import layers_of

STEPS = "autoremat_steps.json"
_MOST_STEPS = 2**53  # what trackers can still write


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    budget: str | int | None = None,
    *,
    log_every: int = 10,
    **options: Any,
) -> Following:
    """Train a model under a budget; call this before `load_state` and the first step.

    Args:
        accelerator: whose trackers get the figures.
        model: as it was before `prepare`, or as it is after.
        optimizer: of its parameters, the same.
        budget: as for `optimize`. None for a model that is optimised already: then only figures
            and files are added.
        log_every: steps of the optimizer from one entry of the trackers to the next. What is
            logged is measured, which on a CPU makes a step longer.
        options: as for `optimize`.

    Raises:
        ValueError: if the accelerator compiles the model itself, `log_every` is below 1, and as
            of `optimize`.
        TypeError: if `optimizer` is none.
    """
    tell_if_untested("accelerate")
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise ValueError(
            f"The Accelerator has dynamo_backend={accelerator.state.dynamo_plugin.backend.value}, "
            "and a plan decides how the model is compiled: leave it out."
        )
    if log_every < 1:
        raise ValueError(f"log_every is a number of steps from 1 on, not {log_every}.")
    return Following(accelerator, model, optimizer, Followed(budget, options), log_every)


class Following:
    """What `attach` returns: it goes along with the steps.

    Attributes:
        steps: of the optimizer so far; figures are logged under this number. `load_state` sets it.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        followed: Followed,
        log_every: int,
    ) -> None:
        """Optimise the model; `attach` says what the arguments are."""
        self.steps = 0
        self._accelerator, self._followed, self._log_every = accelerator, followed, log_every
        self._is_within_step = False
        followed.begin(accelerator.unwrap_model(model), [optimizer])
        followed.before_training_calls(self._call_begins)
        layers_of(optimizer)[-1].register_step_post_hook(self._step_ends)
        # The accelerator may outlive the model: of one whose batch was refused, nothing may stay.
        accelerator.register_save_state_pre_hook(_while_it_lives(self._save))
        accelerator.register_load_state_pre_hook(_while_it_lives(self._load))

    def _call_begins(self) -> None:
        if not self._is_within_step:
            self._is_within_step = True
            is_logged = (self.steps + 1) % self._log_every == 0
            self._followed.step_begins(is_measured=is_logged and bool(self._accelerator.trackers))

    def _step_ends(self, *_: object) -> None:
        self.steps += 1
        self._is_within_step = False
        figures = self._followed.step_ends()
        if self.steps % self._log_every == 0:
            self._followed.log(lambda: self._accelerator.log(figures, step=self.steps))

    def _save(self, models: Any, weights: Any, folder: str) -> None:
        if self._accelerator.is_main_process and self._followed.is_planned:
            self._followed.store(Path(folder), {STEPS: json.dumps(self.steps)})

    def _load(self, models: Any, folder: str) -> None:
        self._followed.resume(Path(folder))
        try:
            self.steps = _steps_in((Path(folder) / STEPS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            # A checkpoint from before autoremat was there, or a file that another wrote.
            return


def _steps_in(text: str) -> int:
    """The number of steps in a checkpoint's file.

    Raises:
        ValueError: if it is none.
    """
    try:
        steps = json.loads(text)
    except RecursionError as error:
        raise ValueError("a number lies within no lists") from error
    if not isinstance(steps, int) or isinstance(steps, bool) or not 0 <= steps <= _MOST_STEPS:
        raise ValueError(f"{steps!r:.40} is no number of steps")
    return steps


def _while_it_lives(method: Callable[..., None]) -> Callable[..., None]:
    """Calls a method of what is not kept alive by it."""
    held = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        found = held()
        if found is not None:
            found(*args)

    return call
