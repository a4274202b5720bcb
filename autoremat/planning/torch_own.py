"""Torch's own partition of a graph: a plan that may be chosen, and what others are held against.

Enters: a stated graph. Leaves: torch's two modules, what they are a plan of, and what the step
takes by them. Guarantees: where they would compute something else than the joint graph, they are
not offered.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from autoremat_solver import Plan, Problem, simulate
from autoremat_solver.policies import save_all_but
from torch import fx

from autoremat import _torch
from autoremat._torch import LOADS_OF_BOOLS, STORES_OF_BOOLS, Loop
from autoremat.cost.loop_times import loops_us
from autoremat.emit.equivalence import first_difference
from autoremat.graph.joint_graph import copy_module
from autoremat.graph.random_draws import is_seeded, keep_draws
from autoremat.inductor.reading import Reading
from autoremat.planning.choice import Baseline, written_out
from autoremat.planning.known_readings import read_once
from autoremat.planning.torch_plan import TorchPlan, torch_plan
from autoremat.problem.subject import Subject


@dataclass(frozen=True)
class Own:
    """Torch's own partition, written out.

    Attributes:
        forward: its forward module.
        backward: its backward module.
        torchs: what it does, as a plan.
        problem: of which that is a plan.
        least_nbytes: what it takes at least: what is resident, and the tensors that it saves.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    torchs: TorchPlan
    problem: Problem
    least_nbytes: int


class Unplanned:
    """A graph as it runs under Inductor without a plan of ours."""

    def __init__(self, subject: Subject) -> None:
        """Of one graph."""
        self._subject = subject

    @cached_property
    def own(self) -> Own | None:
        """Torch's own partition; None if it is not safe, or if no plan says what it does.

        It is not safe where its backward would read an input that the forward overwrites, or
        compute something else than the joint graph, as with random numbers that it draws again.
        """
        joint, lowered = self._subject.joint, self._subject.lowered
        module = copy_module(joint.module)
        if any(is_seeded(node) for node in self._subject.constraints.run_once):
            keep_draws(module)
        forward, backward = _torch.min_cut(module, num_fwd_outputs=joint.num_fwd_outputs)
        if first_difference(joint.module, forward, backward, joint.num_fwd_outputs) is not None:
            return None
        inputs = {node.name for node in backward.graph.find_nodes(op="placeholder")}
        if not inputs.isdisjoint(node.name for node in joint.overwritten):
            return None
        torchs = torch_plan(joint, lowered, forward, backward)
        if torchs is None:
            return None
        problem = torchs.lowered(lowered, joint).problem
        saved_nbytes = sum(lowered.storages.fake_nbytes[name] for name in torchs.saved)
        return Own(forward, backward, torchs, problem, problem.resident_nbytes + saved_nbytes)

    @cached_property
    def own_masks_us(self) -> float:
        """What torch's own partition takes to write masks of dropout and to read them.

        On a processor, vectors of Inductor's code move bools one by one: to draw a mask once more
        may take less. Elsewhere, and where there are none, it is 0.
        """
        own, subject = self.own, self._subject
        if own is None or subject.device.type != "cpu":
            return 0.0
        storages = subject.lowered.storages
        drawn = filter(_is_drawn_mask, subject.joint.nodes)
        masks = {name for node in drawn for name in storages.made_by[node]} & own.torchs.saved
        count = sum(storages.fake_nbytes[name] for name in masks)
        moved = Loop(2 * count, {LOADS_OF_BOOLS: count, STORES_OF_BOOLS: count})
        return loops_us([moved] if count else [], subject.device)

    @cached_property
    def code(self) -> Reading:
        """Of torch's own partition; else of a plan that recomputes what it must alone."""
        own = self.own
        modules = (own.forward, own.backward) if own else written_out(self._subject, self._plan)
        return read_once(self._subject, *modules)

    def baseline(self) -> Baseline:
        """What the step takes without a plan of ours."""
        return Baseline(self.code.peak_nbytes, self.time_us(), self.code.time_us)

    def time_us(self) -> float:
        """Of its operations, for which nothing is read."""
        problem, plan = self._subject.lowered.problem, self._plan
        if self.own is not None:
            problem, plan = self.own.problem, self.own.torchs.plan
        return simulate(problem, plan).time_us

    @property
    def _plan(self) -> Plan:
        problem = self._subject.lowered.problem
        return save_all_but(problem, {v.name for v in problem.values if v.must_recompute})


def _is_drawn_mask(node: fx.Node) -> bool:
    is_bool = getattr(_torch.fake_value(node), "dtype", None) == torch.bool
    return is_bool and any(map(is_seeded, node.all_input_nodes))
