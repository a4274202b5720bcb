"""`transformers.Trainer` under a budget, TRL's trainers among them.

    trainer = Trainer(model=model, args=args, ...)
    autoremat.integrations.transformers.attach(trainer, "40GB")
    trainer.train()

Enters: a trainer. Leaves: its runs, planned from the first step on with the state of the optimizer
that it makes; figures in its own log (`log_history`, TensorBoard, W&B, whatever reports there);
plan and report in each checkpoint, so that a resumed run plans nothing that is as it was.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

from accelerate.utils import DynamoBackend
from transformers import Trainer, TrainerCallback

from autoremat.integrations.followed import PLAN, Followed, tell, tell_if_untested


def attach(trainer: Trainer, budget: str | int | None = None, **options: Any) -> AutorematCallback:
    """Train under a budget.

    A trainer that was to compile the model, by `TrainingArguments(torch_compile=True)`, compiles
    nothing itself any more: the model is compiled by its plan, and a line says so.

    Args:
        trainer: of one model; call this before `train`.
        budget: as for `optimize`. None for a model that is optimised already: then only figures
            and files are added.
        options: as for `optimize`.

    Raises:
        ValueError: if the trainer checkpoints the model's layers: a plan decides what is
            recomputed; and if it is attached to already.
    """
    tell_if_untested("transformers")
    _require_left_to_us(trainer.args)
    if any(isinstance(one, AutorematCallback) for one in trainer.callback_handler.callbacks):
        raise ValueError(
            "The trainer has a budget already, whose plan its model keeps: make a new trainer and "
            "a new model for another one."
        )
    _compile_in_place_of(trainer)
    callback = AutorematCallback(trainer, budget, options)
    trainer.add_callback(callback)
    return callback


# The last one is the first's name until transformers 5.
_DECIDED_BY_A_PLAN = ("activation_checkpointing", "gradient_checkpointing")


def _require_left_to_us(args: Any) -> None:
    for name in _DECIDED_BY_A_PLAN:
        if getattr(args, name, False) is True:
            raise ValueError(
                f"TrainingArguments has {name}=True, and a plan decides that: leave it at False."
            )


def _compile_in_place_of(trainer: Trainer) -> None:
    """Have the trainer compile nothing, and say so if it was to.

    It asks its accelerator to, whose plugin has what the arguments or `accelerate launch` said.
    """
    args = trainer.args
    plugin: Any = getattr(trainer.accelerator.state, "dynamo_plugin", None)
    by_launcher = plugin is not None and plugin.backend != DynamoBackend.NO
    if not args.torch_compile and not by_launcher:
        return
    asked = "torch_compile=True" if args.torch_compile else f"dynamo_backend={plugin.backend.value}"
    # Of the arguments too: an accelerator that is made anew, for the next trial, is made by them.
    args.torch_compile, args.torch_compile_backend, args.torch_compile_mode = False, "no", None
    if plugin is not None:
        plugin.backend = DynamoBackend.NO
    tell(
        f"the trainer was to compile the model ({asked}). Its plan decides how it is compiled, by "
        "compiler=, so the trainer compiles nothing: torch_compile of its arguments is False from "
        "now on, and a backend and a mode that were asked for are not heeded."
    )


def _checkpoint_of(args: Any, state: Any) -> Path:
    """The checkpoint that was written last; trials of a search have folders of their own."""
    name, folder = f"checkpoint-{state.global_step}", Path(args.output_dir)
    if state.is_hyper_param_search:
        found = folder.rglob(name)
        return max(found, key=lambda path: path.stat().st_mtime_ns, default=folder / name)
    return folder / name


def _resumed_from(args: Any, state: Any) -> Path | None:
    """The checkpoint that a run begins with; of a path that `train` was given, nobody is told."""
    given, own = args.resume_from_checkpoint, f"checkpoint-{state.global_step}"
    named = [Path(given)] if isinstance(given, str) else []
    folder = next(filter(os.path.isdir, (*named, Path(args.output_dir) / own)), None)
    if folder is None:
        tell(
            f"the run is resumed at step {state.global_step}, and {own} is not in "
            f"{args.output_dir}, so it is planned anew. Where {PLAN} is beside that checkpoint, "
            "known_plan=PATH takes it, or TrainingArguments(resume_from_checkpoint=FOLDER)."
        )
    return folder


class AutorematCallback(TrainerCallback):
    """What `attach` adds to a trainer."""

    def __init__(self, trainer: Trainer, budget: str | int | None, options: dict[str, Any]) -> None:
        """Before the trainer trains; `attach` says what the arguments are."""
        self._trainer = weakref.ref(trainer)
        self._followed = Followed(budget, options)
        self._figures: dict[str, float] = {}
        self._is_logging = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The optimizer is there: its state counts from the first step on."""
        optimizer = given.get("optimizer")
        is_resumed = bool(state.global_step) and self._followed.takes_plans
        folder = _resumed_from(args, state) if is_resumed else None
        self._followed.begin(given["model"], [optimizer] if optimizer else [], folder)

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Steps are measured that are logged."""
        every = max(1, int(state.logging_steps or 1))
        is_first = args.logging_first_step and not state.global_step
        is_logged = is_first or (state.global_step + 1) % every == 0
        self._followed.step_begins(is_measured=is_logged and args.logging_strategy == "steps")

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """What is known of the step waits until the trainer logs."""
        self._figures |= self._followed.step_ends()

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The trainer logs: so do we, in an entry of our own, whatever comes before or after us."""
        trainer, figures = self._trainer(), self._figures
        if self._is_logging or not figures or trainer is None:
            return
        self._figures, self._is_logging = {}, True
        try:
            self._followed.log(lambda: trainer.log(dict(figures)))
        finally:
            self._is_logging = False

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """A checkpoint is there."""
        if state.is_world_process_zero:
            self._followed.store(_checkpoint_of(args, state))

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Nothing is measured any more."""
        self._followed.leave()
