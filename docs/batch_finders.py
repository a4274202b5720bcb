"""The batch finders of accelerate and Lightning, on a device whose memory is a number.

Enters: a case of `sized_cases.py`, and the largest batch whose step was measured to be within a
budget. Leaves: what each finder returns, how many steps it ran, how many of them ended without
memory, and seconds. Guarantees: a CPU runs out of no memory here, so steps of larger batches raise
what CUDA's allocator raises; that was measured beforehand, so seconds are those of steps that
nobody measures. Steps have no plan, as users of these finders have them.
"""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from row_store import Row
from sized_cases import Sized
from torch import Tensor

STEPS = 3  # of a trial, as Lightning has it by default: optimizers make their state in the first
SAMPLES = 8192  # of the data set; Lightning tries no batch above it


@dataclass
class Limit:
    """Memory of a device: steps of larger batches fail.

    Attributes:
        largest: the largest batch whose step is within the budget.
        steps: that were begun.
        failed: of these, those that did not fit.
    """

    largest: int
    steps: int = 0
    failed: int = 0

    def take(self, batch: int, step: Callable[[], Any]) -> None:
        """Take a step of so many samples.

        Raises:
            RuntimeError: as torch has it, if there is no memory for it; the step runs all the same.
        """
        self.steps += 1
        step()
        if batch > self.largest:
            self.failed += 1
            raise RuntimeError("CUDA out of memory. (A limit that is made up.)")


def by_accelerate(sized: Sized, limit: Limit) -> int:
    """`find_executable_batch_size` as it is: from 128 down, each 0.9 of the one before."""
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size
    def trained(batch_size: int) -> int:
        training, batch = sized.training(), sized.batch(batch_size)
        for _ in range(STEPS):
            limit.take(batch_size, lambda: training.step(batch))
        return batch_size

    return int(trained())


class Samples(torch.utils.data.Dataset[tuple[Tensor, ...]]):
    """The case's sample, again and again."""

    def __init__(self, sized: Sized) -> None:
        self._sample = tuple(t[0] for t in sized.case.inputs)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[Tensor, ...]:
        return self._sample


def by_lightning(sized: Sized, limit: Limit, **options: Any) -> int:
    """`Tuner.scale_batch_size`: doubles from two on, then halves or searches between."""
    import lightning as pl
    from lightning.pytorch.tuner import Tuner

    class Module(pl.LightningModule):
        """The case's model; where the case has no optimizer, plain SGD, which keeps nothing."""

        def __init__(self) -> None:
            super().__init__()
            self.training_of = sized.training()
            self.net = self.training_of.model
            self.batch_size = 2

        def training_step(self, batch: list[Tensor], _number: int) -> Tensor:
            return self.net(*batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            found = self.training_of.optimizer
            return torch.optim.SGD(self.parameters(), lr=1e-3) if found is None else found

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Samples(sized), batch_size=self.batch_size)

        def optimizer_step(self, *given: Any, **more: Any) -> None:
            limit.take(self.batch_size, partial(super().optimizer_step, *given, **more))

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    none = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_epochs=1, accelerator="cpu", default_root_dir=folder, **dict.fromkeys(none, False)
        )
        found = Tuner(trainer).scale_batch_size(Module(), steps_per_trial=STEPS, **options)
    assert found is not None
    return found


FINDERS: dict[str, Callable[[Sized, Limit], int]] = {
    "accelerate": by_accelerate,
    "Lightning, power": by_lightning,
    "Lightning, binsearch": partial(by_lightning, mode="binsearch", margin=0.0),
}


def found_by(finder: str, sized: Sized, largest: int) -> Row:
    """What a finder says, and what it took; without a batch, if it found none."""
    limit, batch = Limit(largest), None
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            batch = FINDERS[finder](sized, limit)
        except RuntimeError as error:
            if "batch size" not in str(error):
                raise
    return {
        "finder": finder,
        "batch": batch,
        "steps": limit.steps,
        "failed": limit.failed,
        "seconds": time.monotonic() - began,
    }
