"""One case of the sweep: a random model, a form of a step and a budget.

Enters: a `Case`. Leaves: a row of plain values. Steps that plan are not measured, since planning
allocates as well: they are taken again until nothing more is planned. A budget that is refused is
replaced by the smallest peak that the refusal names.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from steps_forms import FORMS, Batch, Form, Size, Subject, Training, batch_of
from steps_models import Design
from steps_verdicts import Course
from torch import Tensor

import autoremat
from autoremat import _torch
from autoremat.memory.meter import cuda_peaks

SEED = 1234
SHARES = (0.35, 1.05)
QUIET_STEPS = 2  # without a new graph: then a size is planned
MOST_STEPS = 8  # of one size, until it is planned
TRIES = 3  # of a refused budget, each at the smallest peak that the refusal names
TOLERANCE = 1e-3  # of a gradient, relative to the largest one

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What one process does.

    Attributes:
        number: of the case in the sweep; with the seed it determines all that is random.
        seed: of the sweep.
        form: a name of `FORMS`.
        compiler: "eager" or "inductor".
        time_limit_s: of a solve, in seconds.
        most_layers: of a model.
        most_steps: of different sizes.
        device: of models and batches.
        wider: by how much models are wider than those of the CPU.
    """

    number: int
    seed: int
    form: str
    compiler: str = "eager"
    time_limit_s: float = 1.0
    most_layers: int = 7
    most_steps: int = 8
    device: str = "cpu"
    wider: int = 1

    @property
    def key(self) -> str:
        """A name that is unique within the page."""
        where = "" if self.device == "cpu" else f"-{self.device}"
        return f"{self.seed}-{self.number}-{self.form}-{self.compiler}{where}"


def row_of(case: Case) -> Row:
    """Everything that the page says of a case."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    with _short_collections():
        return {**_row(case), "seconds": time.perf_counter() - started}


@contextlib.contextmanager
def _short_collections() -> Iterator[None]:
    """Whoever measures a peak collects garbage and looks at all objects: not those from before."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _row(case: Case) -> Row:
    random = Random(f"{case.seed}/{case.number}/{case.form}")
    form = FORMS[case.form]
    sizes = form.sizes(random)[: case.most_steps]
    designs = [
        Design(str(random.random()), form.arrangement, case.most_layers, case.wider, case.device)
        for _ in form.kinds
    ]
    through, share = random.choice(form.through), random.uniform(*SHARES)
    # Of which nothing is left when planned steps are measured.
    eager_peak_nbytes = _eager_peak_nbytes(Steps(form, form.plain(designs), case.device), sizes)
    by_hand_nbytes = _eager_peak_nbytes(Steps(form, form.by_hand(designs), case.device), sizes)
    budget_nbytes = int(share * eager_peak_nbytes)
    subject = Subject(budget_nbytes, case.compiler, case.time_limit_s, through)
    watched = _accepted(form, designs, sizes, subject)
    plain = Steps(form, form.plain(designs), case.device)
    return {
        "share": share,
        "through": through,
        "asked_nbytes": budget_nbytes,
        "eager_peak_nbytes": eager_peak_nbytes,
        "by_hand_nbytes": by_hand_nbytes,
        **watched.course.judgement(),
        "gradient_error": _gradient_error(watched, plain),
        "layers": [type(layer).__name__ for layer in plain.training.model.body.layers],
    }


@dataclass
class Steps:
    """Steps of one form, from the same random seed each."""

    form: Form
    training: Training
    device: str

    def take(self, size: Size) -> None:
        """One step."""
        self._take(batch_of(size, self.device))

    def peak_nbytes(self, size: Size) -> int:
        """Bytes of a whole step: what is there before it, and the measured peak above that."""
        batch, device = batch_of(size, self.device), torch.device(self.device)
        if device.type == "cuda":  # all that the process has taken, as whoever runs out of it
            peaks = cuda_peaks(lambda: self._take(batch), device)
            return 0 if peaks is None else peaks.allocated_nbytes
        states = [dict(optimizer.state) for optimizer in self.training.optimizers]
        held = (batch, states)
        resident_nbytes = autoremat.resident_nbytes(self.training.whole, held, device=device)
        peak_nbytes = autoremat.measure_peak(lambda: self._take(batch), device=device)
        return resident_nbytes + peak_nbytes

    def _take(self, batch: Batch) -> None:
        torch.manual_seed(SEED)
        self.form.take(self.training, batch)


def _eager_peak_nbytes(plain: Steps, sizes: list[Size]) -> int:
    """Peak of the largest step without a plan, perhaps with checkpoints."""
    largest = max(sizes, key=lambda size: size.batch * size.length**2)
    for _ in range(2):  # gradients, and the optimizer's state
        plain.take(largest)
    return plain.peak_nbytes(largest)


# --- planned steps -----------------------------------------------------------------------------


@dataclass
class Watched(Steps):
    """Planned steps, and what was told of them."""

    course: Course
    last_size: Size | None = None

    def follow(self, sizes: list[Size]) -> None:
        """Take steps of these sizes; one whose budget is refused is not taken again."""
        settled: set[Size] = set()
        refused: set[Size] = set()
        for size in sizes:
            if size in refused:
                continue
            try:
                if size not in settled:
                    self._settle(size)
                    settled.add(size)
                self._measure(size)
                self.last_size = size
            except autoremat.InfeasibleBudget as error:
                self.training.forget_gradients()
                refused.add(size)
                self.course.refused(str(size), error)
                if self.course.first_refusal is not None:
                    return

    def _settle(self, size: Size) -> None:
        """Take steps until nothing more is planned."""
        quiet_steps = 0
        for _ in range(MOST_STEPS):
            quiet_steps = 0 if self._step(size, self._unmeasured) else quiet_steps + 1
            if quiet_steps == QUIET_STEPS:
                return

    def _measure(self, size: Size) -> None:
        """Measure a step in which nothing is planned."""
        for _ in range(MOST_STEPS):
            if not self._step(size, self.peak_nbytes):
                return

    def _unmeasured(self, size: Size) -> None:
        self.take(size)

    def _step(self, size: Size, take: Callable[[Size], int | None]) -> bool:
        """Take a step and judge it; returns whether anything was planned in it."""
        graphs_before = _graphs()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                measured_nbytes = take(size)
            finally:
                for entry in caught:
                    self.course.note(str(size), entry)
        is_planning = _graphs() > graphs_before
        self.course.ran(str(size), None if is_planning else measured_nbytes)
        return is_planning


def _graphs() -> int:
    """How many graphs Dynamo has handed over so far."""
    return int(_torch.dynamo_counters["stats"]["unique_graphs"])


def _accepted(form: Form, designs: list[Design], sizes: list[Size], subject: Subject) -> Watched:
    """Steps under the budget, or under the smallest peak that a refusal of it names."""
    for _ in range(TRIES):
        torch.compiler.reset()
        training = form.planned(designs, subject)
        watched = Watched(form, training, designs[0].device, Course(subject.budget_nbytes))
        watched.follow(sizes)
        refusal = watched.course.first_refusal
        if refusal is None:
            break
        subject = replace(subject, budget_nbytes=refusal.smallest_peak_nbytes)
    return watched


# --- gradients ---------------------------------------------------------------------------------


def _gradient_error(watched: Watched, plain: Steps) -> float | None:
    """The largest error of a gradient, relative to the largest gradient of the eager step.

    Of one more step of the last size that was not refused; None if all were.
    """
    if watched.last_size is None:
        return None
    mine, theirs = plain.training, watched.training
    mine.whole.load_state_dict(theirs.whole.state_dict())
    for own, other in zip(mine.optimizers, theirs.optimizers, strict=True):
        own.load_state_dict(copy.deepcopy(other.state_dict()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain.take(watched.last_size)
        watched.take(watched.last_size)
    found, expected = (list(map(_gradient, t.whole.parameters())) for t in (theirs, mine))
    scale = max(float(gradient.abs().max()) for gradient in expected) or 1.0
    differences = zip(found, expected, strict=True)
    return max(float((a - b).abs().max()) for a, b in differences) / scale


def _gradient(parameter: Tensor) -> Tensor:
    """Where there is none, zeros: torch passes zeros to a compiled graph that nobody reads."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
