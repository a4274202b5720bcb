"""A graph, stated for the solver: what every choice of a plan is made for.

Enters: what graph, cost and problem say of it. Leaves: one value that the rooms behind them share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from autoremat.cost.calls import OpCost
from autoremat.cost.device_specs import DeviceSpec
from autoremat.graph.constraints import Constraints
from autoremat.graph.joint_graph import JointGraph
from autoremat.host.memory import Host
from autoremat.problem.lower import Lowered


@dataclass(frozen=True)
class Subject:
    """A graph, stated for the solver.

    Attributes:
        joint: forward and backward.
        constraints: what may not be recomputed, or must be.
        lowered: its operations in their shell.
        device: where they run.
        costs: time and workspace of each operation.
        elsewhere: the device that they run on, if it is not here.
        sizes: what its symbolic sizes stand for, where they are others than while it was traced.
        host: where its values may wait; None if they may not leave.
        handed_over: storages among its inputs that count where earlier graphs of the step made
            them.
        absent: bytes of what is resident and not among its inputs, as expressions of its sizes.
    """

    joint: JointGraph
    constraints: Constraints
    lowered: Lowered
    device: torch.device
    costs: Mapping[fx.Node, OpCost]
    elsewhere: DeviceSpec | None = None
    sizes: Mapping[Any, int] = field(default_factory=dict)
    host: Host | None = None
    handed_over: frozenset[str] = frozenset()
    absent: tuple[Any, ...] = ()


class Peaks(NamedTuple):
    """Of a plan written out; see `planning.choice.Choice`."""

    nbytes: int
    needed_nbytes: int
