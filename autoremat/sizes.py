"""Symbolic sizes of a graph: its plan is for those at hand, and smaller ones.

Enters: the forward's inputs as they were traced. Leaves: guards of Dynamo's. Guarantees: a larger
batch finds the code that was planned for one as large, or is compiled and planned itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from autoremat import _torch

GUARDED_COMPILES = 4  # of one function; Dynamo gives it up after eight


def keep_to_sizes(primals: Iterable[fx.Node], compile_number: int) -> None:
    """Let the compiled code not run where any of the inputs is larger than now.

    Without that, a last batch of an epoch that is smaller would leave code with symbolic sizes and
    a plan for few samples, and Dynamo would run it for the full batches to come. Sizes that keep
    growing are guarded a few times only: the code after that is for all.

    Args:
        primals: inputs of the joint graph's forward.
        compile_number: how often the function was compiled before.
    """
    if compile_number >= GUARDED_COMPILES:
        return
    values = (node.meta.get("val") for node in primals)
    for value in (value for value in values if isinstance(value, torch.Tensor)):
        sizes: Iterable[int | torch.SymInt] = value.shape
        for size in sizes:
            if isinstance(size, torch.SymInt) and _torch.can_be_bounded(size):
                bool(size <= _torch.size_hint(size))  # asking leaves the guard
