"""How one graph of a step is planned: constraints, costs, and the choice of a plan.

Enters: a joint graph and its storages, then its problem and a budget. Leaves: what each stage
says, under the options of one session. Guarantees: the stages are the same in training and
offline, where operations may be estimated for a device that is not here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import torch
from autoremat_solver import Solver
from torch import fx

from autoremat.asked import choose_as_asked
from autoremat.capture import JointGraph
from autoremat.choose import (
    Choice,
    Subject,
    choose_by_reading,
    choose_by_simulation,
    choose_without_search,
)
from autoremat.constraints import Constraints, find_constraints, with_selected
from autoremat.cost import OpCost, estimate_nodes
from autoremat.curve import Curve, curve_of
from autoremat.device import device_name
from autoremat.draws import Replays, makes_seeds, replays, safe_policy
from autoremat.fusion import inlined_nodes, shared_by_layers
from autoremat.hardware import DeviceSpec
from autoremat.options import Offline, Options
from autoremat.profile import profile_nodes
from autoremat.progress import Progress
from autoremat.storage import Storages


class Planner:
    """Plans graphs under the options of a session, each by itself.

    Attributes:
        draws_in_compiled_code: whether compiled code draws other random numbers than eager code
            would, in any of the graphs so far.
    """

    def __init__(self, options: Options, offline: Offline | None) -> None:
        """Plan under these options; offline, if no step is going to run."""
        self.draws_in_compiled_code = False
        self._options = options
        self._offline = offline

    def constrain(
        self, joint: JointGraph, storages: Storages, device: torch.device, *, is_first: bool
    ) -> tuple[Constraints, frozenset[fx.Node]]:
        """What must be saved or recomputed, and what Inductor computes inside its consumers."""
        eager = self._options.compiler == "eager"
        if not eager and any(makes_seeds(node) for node in joint.nodes):
            self.draws_in_compiled_code = True
        constraints = find_constraints(joint, storages, replays=self.replays(device))
        inlined = frozenset[fx.Node]() if eager else inlined_nodes(joint, storages, constraints)
        steering = self._options.steering
        constraints = with_selected(
            constraints,
            joint,
            storages,
            steering.selectors,
            must_match=steering.must_match if is_first else (),
            inlined=inlined,
        )
        if eager:
            return constraints, inlined
        inlined = frozenset(
            n for n in inlined if constraints.must_save.isdisjoint(storages.made_by[n])
        )
        shared = shared_by_layers(joint, storages, inlined) - constraints.must_recompute
        return replace(constraints, must_save=constraints.must_save | shared), inlined

    def price(
        self, joint: JointGraph, inlined: frozenset[fx.Node], progress: Progress
    ) -> Mapping[fx.Node, OpCost]:
        """Time and workspace of each operation: measured, or estimated by a data sheet."""
        priced = [n for n in joint.nodes if n.op == "call_function" and n not in inlined]
        if self._spec is None:
            timed = functools.partial(progress.advance, unit="timings")
            return profile_nodes(priced, progress=timed)
        return estimate_nodes(priced, self._spec.ceilings)

    def choose(self, subject: Subject, number: int, budget_nbytes: int, *, refuses: bool) -> Choice:
        """The user's own choice of a plan, or the fastest plan found that fits.

        Args:
            subject: the graph.
            number: how many graphs of the step come before it.
            budget_nbytes: of the whole step.
            refuses: as for `search`.
        """
        steering, reads = self._options.steering, self._reads_inductor
        choice = choose_as_asked(subject, steering, number, budget_nbytes, reads=reads)
        return choice or self.search(subject, budget_nbytes, refuses=refuses)

    def search(self, subject: Subject, budget_nbytes: int, *, refuses: bool) -> Choice:
        """The fastest plan found that fits.

        Args:
            subject: the graph.
            budget_nbytes: of the whole step.
            refuses: whether a plan that does not fit is refused, so that nothing has to be
                searched for where none can fit.
        """
        if refuses and subject.lowered.problem.resident_nbytes > budget_nbytes:
            return choose_without_search(subject, budget_nbytes, reads=self._reads_inductor)
        options = self._options
        solver = Solver(
            subject.lowered.problem, time_limit_s=options.time_limit_s, strict=options.strict
        )
        if self._reads_inductor:
            return choose_by_reading(subject, solver, budget_nbytes)
        return choose_by_simulation(subject, solver, budget_nbytes)

    def curve(self, subject: Subject, choice: Choice) -> Curve:
        """Peaks and times of other plans, where an offline report is to show them."""
        if self._offline is None or not self._offline.curve_points:
            return Curve()
        return curve_of(subject, choice, self._offline.curve_points, self._offline.curve_limit_s)

    def replays(self, device: torch.device) -> Replays:
        """How draws may be repeated in the graphs."""
        compiler = self._options.compiler
        return replays(self._options.dropout or safe_policy(compiler, device), compiler, device)

    def device_name(self, device: torch.device) -> str:
        """Name of the device that is planned for."""
        return device_name(device) if self._spec is None else self._spec.name

    @property
    def _spec(self) -> DeviceSpec | None:
        """The data sheet of the device that is planned for; None if the device is here."""
        return None if self._offline is None else self._offline.spec

    @property
    def _reads_inductor(self) -> bool:
        """Whether peaks are read from the code that Inductor generates."""
        return self._options.compiler == "inductor" and self._spec is None
