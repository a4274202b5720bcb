"""What a step holds whatever the plan, by what it is.

Enters: bytes. Leaves: a frozen `ResidentParts` whose total is their sum, so that no breakdown can
contradict it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoremat.reporting.fields import check_fields


@dataclass(frozen=True, slots=True)
class ResidentParts:
    """Bytes that are live whatever the plan. A storage counts once, in the first part it is of.

    Attributes:
        parameters_nbytes: parameters of the model.
        gradients_nbytes: gradients of theirs that exist already.
        optimizer_nbytes: the optimizer's state, that which its next step creates included.
        buffers_nbytes: buffers of the model.
        batch_nbytes: what the call was given.
        others_nbytes: what others hold meanwhile: eager code between the graphs, earlier graphs
            of the step, plain attributes of the model, other models in the same optimizer.
        unseen_nbytes: of CUDA's allocator, what no tensor shows: workspaces of libraries, and
            remainders of blocks.
    """

    parameters_nbytes: int = 0
    gradients_nbytes: int = 0
    optimizer_nbytes: int = 0
    buffers_nbytes: int = 0
    batch_nbytes: int = 0
    others_nbytes: int = 0
    unseen_nbytes: int = 0

    def __post_init__(self) -> None:
        """Refuses fields of the wrong type."""
        check_fields(self)

    @property
    def nbytes(self) -> int:
        """All of them together."""
        return sum(self.by_name.values())

    @property
    def by_name(self) -> Mapping[str, int]:
        """Each part under its name in words, those of no bytes included."""
        return {
            "parameters": self.parameters_nbytes,
            "gradients": self.gradients_nbytes,
            "optimizer state": self.optimizer_nbytes,
            "buffers": self.buffers_nbytes,
            "batch": self.batch_nbytes,
            "held by others": self.others_nbytes,
            "workspaces and remainders": self.unseen_nbytes,
        }
