"""What calls of a model without gradients have made, and losses of it.

Enters: results as such calls end. Leaves: whether a backward that begins makes gradients of them,
or of a copy: of what is as wide and no parameter. Guarantees: holds no tensor.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from autoremat import _torch
from autoremat.memory.storage_sizes import storage_identities, tensors_in
from autoremat.watch.eager_backward import first_nodes
from autoremat.watch.eager_code import nodes_behind
from autoremat.watch.open_run import Roots


class Made:
    """By the calls of one session."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._widths: set[tuple[int, torch.dtype]] = set()

    def note(self, results: Any) -> None:
        """A call has made these."""
        self._widths |= {_width_of(tensor) for tensor in tensors_in(results) if tensor.dim() > 1}

    def is_reached(self, roots: Roots, known: Collection[int]) -> bool:
        """Whether a backward makes gradients of results.

        Args:
            roots: where it begins.
            known: identities of the results' storages, as far as they live.
        """
        nodes = filter(_torch.accumulates, nodes_behind(first_nodes(roots)))
        leaves = [node.variable for node in nodes]
        return any(self._is_as_wide(leaf) for leaf in leaves) or any(
            key in known for key in storage_identities(leaves)
        )

    def _is_as_wide(self, leaf: torch.Tensor) -> bool:
        is_copy = leaf.dim() > 1 and not isinstance(leaf, torch.nn.Parameter)
        return is_copy and _width_of(leaf) in self._widths


def _width_of(tensor: torch.Tensor) -> tuple[int, torch.dtype]:
    return tensor.shape[-1], tensor.dtype
