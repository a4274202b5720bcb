"""What a trainer's callback does in a run, whichever trainer it is.

Enters: a model, what its trainer makes for it, and when its steps begin and end. Leaves: the model
under a budget, figures for the trainer's loggers, and files beside its checkpoints. Guarantees:
what cannot be written or measured is a warning, one for each kind, never the end of a run.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoremat import _torch
from autoremat.api import optimize, report, save_plan
from autoremat.ask.plan_file import StoredGraph, StoredPlan, as_text, first_mismatch, read
from autoremat.errors import SteeringError
from autoremat.graph.devices import device_name
from autoremat.memory.meter import measuring_peak, resident_nbytes
from autoremat.optimized import OptimizedCall
from autoremat.planning.part import Planned

# Options with which no plan of a checkpoint can be taken.
_DECIDED = frozenset({"known_plan", "plan"})
PLAN, REPORT, PAGE = "autoremat_plan.json", "autoremat_report.json", "autoremat_report.html"
# The oldest and the newest version of each library that its integration was tested with.
TESTED = {
    "transformers": ("5.23", "5.24"),
    "accelerate": ("1.15", "1.15"),
    "lightning": ("2.6", "2.6"),
}


class Followed:
    """A model that a trainer trains under a budget."""

    def __init__(self, budget: str | int | None, options: dict[str, Any]) -> None:
        """Before the trainer has begun.

        Args:
            budget: as for `optimize`; None for a model that is optimised already.
            options: as for `optimize`.
        """
        self._budget, self._options = budget, options
        self._model: nn.Module | None = None
        self._optimizers: Sequence[torch.optim.Optimizer] = ()
        self._measuring = ExitStack()
        self._found: list[int] = []
        self._began: float | None = None
        self._held_nbytes = 0
        self._seen: dict[str, float] = {}
        self._has_begun = False
        self._known: tuple[str, StoredPlan] | None = None  # until it is told what became of it
        self._before_calls: Callable[[], object] | None = None
        self._told: set[str] = set()

    def begin(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        resumed_from: Path | None = None,
        name: str = "",
    ) -> None:
        """The run begins.

        Args:
            model: what is called in a step.
            optimizers: of its parameters.
            resumed_from: a checkpoint's folder; a plan in it is taken where it fits.
            name: what the user knows that plan by, if not by its path.

        Raises:
            ValueError: as of `optimize`, and if there is neither a budget nor an optimised model.
        """
        self._model, self._optimizers = model, optimizers
        if self._budget is None:
            if not self._is_optimized:
                raise ValueError("Give a budget, or optimize the model before the trainer is made.")
            return
        if self._is_optimized:
            if not self._has_begun:  # else it is a second run of the same trainer
                tell(
                    f"the model was optimised before, and stays as it was asked for then: "
                    f"budget {self._budget!r} and its options are not heeded. Leave one of the "
                    "two out."
                )
            return
        if resumed_from is None or not self.resume(resumed_from, name):
            self._optimize(self._options)

    def resume(self, folder: Path, name: str = "") -> bool:
        """Take the plan in a checkpoint's folder where it fits; whether there is one to be taken.

        After `begin`, and before the first step: what is planned already stays.
        """
        path = folder / PLAN
        is_ours = self.takes_plans and not (self._is_optimized and not self._has_begun)
        if not is_ours or self.is_planned:
            return False
        try:
            known = read(path)
            self._require_made_here(known)
            self._optimize(self._options | {"known_plan": path})
        except (FileNotFoundError, NotADirectoryError):  # a checkpoint of a run without a plan
            return False
        except (OSError, SteeringError) as error:
            tell(f"{name or path} cannot be used, so the run is planned anew: {error}")
            return False
        self._known = name or str(path), known
        return True

    @property
    def takes_plans(self) -> bool:
        """Whether a plan of a checkpoint is wanted."""
        return self._budget is not None and _DECIDED.isdisjoint(self._options)

    def _require_made_here(self, known: StoredPlan) -> None:
        """Refuse a plan that was chosen by the times of other operations.

        Raises:
            SteeringError: if it is of another compiler, or of another device.
        """
        assert self._model is not None
        here = device_name(next(self._model.parameters()).device)
        compiler = self._options.get("compiler", "inductor")
        if (known.compiler, known.device) != (compiler, here):
            raise SteeringError(
                f'it was made with compiler="{known.compiler}" on {known.device}; this is '
                f'compiler="{compiler}" on {here}.'
            )

    def _optimize(self, options: dict[str, Any]) -> None:
        assert self._model is not None
        given = {"optimizer": list(self._optimizers)} if self._optimizers else {}
        optimize(self._model, self._budget, **given | options)
        self._has_begun = True
        if self._before_calls is not None:
            self.before_training_calls(self._before_calls)

    def plan_text(self) -> str:
        """What `save_plan` would write; nothing before a step has been planned."""
        if self._call is None or not self.is_planned:
            return ""
        return as_text(self._call.session.stored_plan())

    def before_training_calls(self, tell: Callable[[], object]) -> None:
        """Have each training call of the model told before it runs, its batch being there."""
        self._before_calls = tell
        if self._call is not None:  # else it cannot be planned, which `optimize` has told
            self._call.before_training_call = tell

    @property
    def is_planned(self) -> bool:
        """Whether a step has been planned."""
        return self._call is not None and self._call.session.steps.is_planned

    @property
    def _is_optimized(self) -> bool:
        return self._call is not None

    @property
    def _call(self) -> OptimizedCall | None:
        assert self._model is not None
        call = _torch.compiled_call(self._model)
        return call if isinstance(call, OptimizedCall) else None

    def step_begins(self, *, is_measured: bool) -> None:
        """A step of the optimizer begins.

        Args:
            is_measured: whether its peak is wanted, if it compiles nothing. On a CPU, a step takes
                longer while it is measured.
        """
        self.leave()
        assert self._model is not None
        if is_measured:
            device = next(self._model.parameters()).device
            try:
                self._found = self._measuring.enter_context(
                    measuring_peak(device, until_compile=True)
                )
            except (RuntimeError, ValueError) as error:
                self._tell_once("peak", f"the peak is not measured: {error}")
            else:
                self._held_nbytes = self._resident_nbytes()
        self._began = time.perf_counter()

    def _resident_nbytes(self) -> int:
        """What is there as a step begins, its batch included."""
        assert self._model is not None
        call, alone = self._call, resident_nbytes(self._model)
        states = (resident_nbytes(self._model, (), one) - alone for one in self._optimizers)
        batch_nbytes = call.session.steps.resident.parts.batch_nbytes if call is not None else 0
        return alone + sum(states) + batch_nbytes

    def step_ends(self) -> dict[str, float]:
        """The step is over; figures for loggers, by name."""
        took_s = None if self._began is None else time.perf_counter() - self._began
        self.leave()
        found, self._found = self._found, []
        figures = self._planned_figures()
        if found:
            figures["autoremat/measured_peak_bytes"] = self._held_nbytes + found[0]
        if took_s is not None:
            figures["autoremat/measured_step_ms"] = 1e3 * took_s
        self._tell_of_known_plan()
        return figures

    def _tell_of_known_plan(self) -> None:
        """Once a step has been planned: a line, if the checkpoint's plan was not taken for it."""
        if self._known is None or self._call is None or not self.is_planned:
            return
        (path, known), self._known = self._known, None
        found = self._call.session.stored_plan()
        anew = [graph for graph in found.graphs if graph not in known.graphs]
        if anew:
            versions = ""
            if known.torch_version != found.torch_version:
                versions = f" (torch {known.torch_version} then, {found.torch_version} now)"
            tell(
                f"{path} was set aside for {len(anew)} of {len(found.graphs)} graphs of the step, "
                f"which were planned anew{versions}: {_difference(known, anew[0])}."
            )

    def log(self, send: Callable[[], object]) -> None:
        """Hand figures to loggers; one that cannot write is told of once, and training goes on."""
        try:
            send()
        except Exception as error:  # of whichever class a logger's library has
            self._tell_once(
                "log",
                f"figures cannot be logged: {type(error).__name__}: {error}. Training goes on "
                "without them there; give the logger a place that it can write. "
                "autoremat.report(model) has what was planned.",
            )

    def _planned_figures(self) -> dict[str, float]:
        if self._call is None or not self.is_planned:
            return {}
        steps = self._call.training.highest.steps
        if self._seen.get("autoremat/predicted_peak_bytes") != steps.peak_nbytes:
            self._seen = {
                "autoremat/budget_bytes": steps.budget_nbytes,
                "autoremat/predicted_peak_bytes": steps.peak_nbytes,
            }
            planned = [part.planned for part in steps.graphs.current]
            if all(isinstance(one, Planned) for one in planned):  # else it would be made again
                times_us = (one.whole.choice.solution.timeline.time_us for one in planned)
                self._seen["autoremat/predicted_step_ms"] = sum(times_us) / 1e3
        return dict(self._seen)

    def leave(self) -> None:
        """Nothing is measured any more: the step is over, or was cut short."""
        self._measuring.close()
        self._began = None

    def store(
        self, folder: Path, more: Mapping[str, str] | None = None, *, is_new: bool = False
    ) -> None:
        """Write plan and report into a checkpoint's folder, for people and for a resumed run.

        Args:
            folder: of the checkpoint.
            more: texts of other files, by their names.
            is_new: whether the folder may have to be made. Else one that is not there any more
                stays away: it would look like a checkpoint.
        """
        try:
            if is_new:
                folder.mkdir(parents=True, exist_ok=True)
            for name, text in (more or {}).items():
                (folder / name).write_text(text, encoding="utf-8")
            self._store_planned(folder)
        except OSError as error:
            self._tell_once(
                "store",
                f"plan and report are not in {folder}: {type(error).__name__}: {error}. Training "
                "goes on; a run that is resumed from there plans anew. Give the trainer a folder "
                "that can be written and stays where it is, or write the plan elsewhere by "
                "autoremat.save_plan(model, path).",
            )
        except Exception as error:  # a checkpoint matters more than what is beside it
            self._tell_once(
                "store", f"plan and report are not all in {folder}, and training goes on: {error}"
            )

    def _store_planned(self, folder: Path) -> None:
        assert self._model is not None
        found = report(self._model)
        (folder / REPORT).write_text(found.to_json(), encoding="utf-8")
        (folder / PAGE).write_text(found.to_html(), encoding="utf-8")
        save_plan(self._model, folder / PLAN)

    def _tell_once(self, kind: str, text: str) -> None:
        """Tell of something that goes wrong again and again, the first time."""
        if kind not in self._told:
            self._told.add(kind)
            tell(text)


def _difference(known: StoredPlan, graph: StoredGraph) -> str:
    """Why the known plan is none of a graph, in words."""
    differences = [first_mismatch(one.nodes, graph.nodes) for one in known.graphs]
    why = differences[0] if all(differences) and differences else None
    return why or "it does not fit any more"


def tell_if_untested(library: str) -> None:
    """A line, where a library is of a version that nobody has tried; it is used all the same."""
    try:
        here = version(library)
    except PackageNotFoundError:  # a copy that was not installed
        here = ""
    oldest, newest = TESTED.get(library, ("", ""))
    if newest and not _numbers(oldest) <= _numbers(here) <= _numbers(newest):
        tell(
            f"{library} {here or 'of an unknown version'} was not tested with this autoremat, "
            f"which knows {oldest} to {newest}. Training goes on as far as it goes; if something "
            "is wrong, install one of those versions, or a newer autoremat."
        )


def _numbers(text: str) -> tuple[int, ...]:
    """Major and minor: what comes behind them mends, and changes nothing."""
    return tuple(int(digits) for digits in re.findall(r"\d{1,9}", text)[:2])


def tell(text: str) -> None:
    """Warn of something, while the run goes on."""
    warnings.warn(f"autoremat: {text}", stacklevel=2)
