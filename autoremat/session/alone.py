"""What runs without gradients while no graph waits for its backward: a rollout, say.

Enters: a session's steps, what runs, and what it is given. Leaves: what is live before it, where
that is to be looked into. Guarantees: nothing that goes wrong here reaches the call; of calls that
are alike, about the logarithm of their number are looked into.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Protocol

import torch

from autoremat import _torch
from autoremat.ask.options import Options
from autoremat.memory.storage_sizes import tensors_in
from autoremat.watch import between
from autoremat.watch.audit import Audit
from autoremat.watch.ledger import has_reruns
from autoremat.watch.open_run import Owner, Run
from autoremat.watch.situations import about

MOST_SEEN = 64  # of a call's arguments, and of what is in them
PER_OCTAVE = 4  # sizes of what is given: text is generated token by token


class Waiting(Owner, Protocol):
    """A session's steps."""

    options: Options
    audit: Audit
    device: torch.device

    @property
    def is_planned(self) -> bool:
        """Whether any graph was planned."""

    @property
    def open_runs(self) -> list[Run]:
        """Runs that wait for their backward on its device, also of others' graphs."""


def live_before(steps: Waiting, of: Hashable, given: Any) -> int | None:
    """What is live as it begins; None where there is nothing to be learned.

    Args:
        steps: of the model, or of that around the graph.
        of: tells models, and graphs, apart.
        given: its arguments.
    """
    with suppress(Exception):  # arguments of the user's may answer anything
        if not _is_of_interest(steps):
            return None
        sizes = (about(_elements_of(given), PER_OCTAVE),)
        if steps.audit.situations.is_known(("alone", of), sizes):
            return None
        tensors = tensors_in(given)
        if not any(isinstance(tensor, _torch.FakeTensor) for tensor in tensors):
            return steps.audit.live_alone_nbytes(steps.device, tensors)
    return None


def _is_of_interest(steps: Waiting) -> bool:
    """Whether it is a real call, of a model in training mode, under a budget.

    An evaluation is no part of a training step, and may take more than one. A reentrant checkpoint
    runs its forward without gradients, for a backward that is to come.
    """
    if not steps.is_planned or steps.options.budget.is_least or steps.open_runs:
        return False
    modules = steps.audit.present.modules
    if modules and not any(module.training for module in modules):
        return False
    is_of_a_step = _torch.is_in_backward() or has_reruns(steps)
    is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined]
    is_traced |= _torch.in_functional_transform()
    return not is_of_a_step and not is_traced and between.may_begin()


def _elements_of(given: Any) -> int:
    """Of tensors among the arguments and in containers there: of the first of them."""
    count, due = 0, [given]
    for _ in range(MOST_SEEN):
        if not due:
            break
        value = due.pop()
        if isinstance(value, torch.Tensor):
            count += value.numel()
        elif isinstance(value, Mapping):
            due.extend(islice(value.values(), MOST_SEEN))
        elif isinstance(value, Sequence) and not isinstance(value, str):
            due.extend(islice(value, MOST_SEEN))
    return count
