"""Ours beside what users have: peak and time of one model's training step, measured here.

Enters: a function that makes model and batch, names of variants, budgets. Leaves: a `Comparison`
of rows, which `table` and `plot` show. Guarantees: each variant is built anew in a process of its
own, so that no peak holds another variant's memory and a crash costs one row; steps are timed in
turn, so that a slower minute of the machine falls on all variants alike.

`variants` says what is compared, `race` measures, `worker` is the other process, `layers` wraps a
model's layers in checkpoints as users do by hand. Importing this needs no torch.
"""

from __future__ import annotations

from autoremat.comparison.model import Comparison, Row
from autoremat.comparison.race import ComparisonError, compare

__all__ = ["Comparison", "ComparisonError", "Row", "compare"]
