"""From one joint graph to its plan: three functions, each of values only.

Enters: a joint graph as AOTAutograd hands it over, what stands around it in the step, the setting
that it is planned in, and a budget. Leaves: a `Graph`, its `Shell`, the `Subject` that states it
for the solver, and the `Choice` of a plan. Guarantees: training, offline plans, docs and tests plan
a graph by these functions, and nothing is remembered between two graphs but what the ranks of a
job have in common.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from autoremat_solver import Link, Solver
from torch import fx

from autoremat import _torch
from autoremat.ask.options import Setting
from autoremat.cost.calls import OpCost
from autoremat.cost.gpu_times import estimate_nodes
from autoremat.cost.host_link import link_of, link_to_host
from autoremat.cost.op_times import profile_nodes
from autoremat.errors import SteeringError
from autoremat.graph.constraints import (
    Constraints,
    find_constraints,
    marked_repeatable,
    with_selected,
)
from autoremat.graph.joint_graph import JointGraph, prepare
from autoremat.graph.storages import Storages, find_storages
from autoremat.host.disk import Disk
from autoremat.host.memory import Host, HostMemory
from autoremat.inductor.in_place import as_loops
from autoremat.inductor.inlining import inlined_nodes, shared_by_layers
from autoremat.inductor.laid_out import as_laid_out, with_laid_out_inputs
from autoremat.planning.asked import choose_as_asked, choose_known
from autoremat.planning.choice import Choice
from autoremat.planning.first_found import choose_once
from autoremat.planning.offloaded import choose_with_offload
from autoremat.planning.read import ALIKE, choose_by_reading
from autoremat.planning.simulated import choose_by_simulation
from autoremat.planning.sizes import Symbols, subject_at
from autoremat.planning.unsearched import choose_without_search
from autoremat.planning.workspaces import with_fixed_workspaces
from autoremat.problem.lower import lower
from autoremat.problem.shell import Shell
from autoremat.problem.subject import Subject
from autoremat.progress import current

_BRIEF_BOUND = 0.05  # of the usual effort, for a plan of one step
_LEFT_OUT = ("quicken smallest",)  # there


@dataclass(frozen=True)
class Graph:
    """A joint graph, and who shares memory in it.

    Attributes:
        joint: forward and backward.
        storages: of its values.
        device: that they are counted on.
    """

    joint: JointGraph
    storages: Storages
    device: torch.device


def graph_of(
    module: fx.GraphModule,
    device: torch.device,
    *,
    num_fwd_outputs: int,
    static_indices: Sequence[int] | None,
) -> Graph:
    """A joint graph, cleaned, classified and with its storages; arguments as of `prepare`."""
    joint = prepare(module, num_fwd_outputs=num_fwd_outputs, static_indices=static_indices)
    return Graph(joint, find_storages(joint.nodes, device), device)


def state(
    graph: Graph,
    shell: Shell,
    setting: Setting,
    *,
    is_first: bool = True,
    costs: Mapping[fx.Node, OpCost] | None = None,
) -> Subject:
    """A graph in its shell, stated for the solver: constrained, priced and lowered.

    Args:
        graph: the graph.
        shell: what stands around it.
        setting: how it is planned.
        is_first: whether it is the first of its step: what the user named must be in it.
        costs: time and workspace of its operations, where they are known.
    """
    constraints, inlined = _constrain(graph, setting, is_first=is_first)
    if setting.offload is not None:
        shell = replace(shell, link=_link(setting.offload, graph.device))
    if costs is None:
        costs = _price(graph.joint, inlined, setting)
    lowered = lower(graph.joint, graph.storages, constraints, costs, shell, inlined=inlined)
    if setting.compiler != "eager":
        lowered = with_laid_out_inputs(as_loops(lowered), graph.joint)
    elsewhere = setting.spec if setting.stands_in else None
    return Subject(
        *(graph.joint, constraints, lowered, graph.device, costs),
        elsewhere=elsewhere,
        host=setting.offload,
    )


def over_sizes(subject: Subject, said: Symbols, setting: Setting) -> Subject:
    """A graph that was stated at its largest sizes, with what operations take at the smallest.

    Args:
        subject: the graph.
        said: by symbol, the smallest size that was said of it.
        setting: how it is planned.
    """
    if not subject.sizes or setting.spec is not None:
        return subject
    measure = functools.partial(_measure, setting=setting, joint=subject.joint)
    return with_fixed_workspaces(subject, said, measure)


def stated_at(subject: Subject, numbers: Symbols, setting: Setting) -> Subject:
    """The same graph with other numbers for its symbolic sizes, its operations priced at these.

    Args:
        subject: the graph.
        numbers: what each symbol stands for.
        setting: how it is planned.
    """
    shell = subject_at(subject, numbers).lowered.shell
    with _torch.sizes_as(numbers):
        storages = find_storages(subject.joint.nodes, subject.device)
        graph = Graph(subject.joint, storages, subject.device)
        found = state(graph, shell, setting, is_first=False)
    found = replace(found, handed_over=subject.handed_over, absent=subject.absent)
    return replace(found, sizes=numbers)


def choose(
    subject: Subject,
    budget_nbytes: int,
    setting: Setting,
    *,
    number: int = 0,
    refuses: bool = False,
    least: bool = False,
    is_passing: bool = False,
) -> Choice:
    """The user's own choice of a plan, or the fastest plan found that fits, by a rank of the job.

    Args:
        subject: the graph, as it is stated.
        budget_nbytes: of the whole step.
        setting: how it is planned.
        number: how many graphs of the step come before it.
        refuses: as for `search`.
        least: the same.
        is_passing: the same.
    """
    steering, reads = setting.steering, setting.reads_inductor
    choice = choose_as_asked(subject, steering, number, budget_nbytes, reads=reads)
    if choice is None and steering.known is not None:
        choice = choose_known(subject, steering.known, budget_nbytes, reads=reads)
    if choice is not None:
        return choice
    searched = functools.partial(
        search,
        *(subject, budget_nbytes, setting),
        refuses=refuses,
        least=least,
        is_passing=is_passing,
    )
    asked = f"refuses={refuses}, time_limit={setting.time_limit_s}, strict={setting.strict}"
    asked += f", least={least}, passing={is_passing}"
    if subject.host is not None:
        asked += f", host={subject.host.free_nbytes}"
    return choose_once(subject, budget_nbytes, asked, searched, reads=reads)


def search(
    subject: Subject,
    budget_nbytes: int,
    setting: Setting,
    *,
    refuses: bool = False,
    least: bool = False,
    is_passing: bool = False,
) -> Choice:
    """The fastest plan found that fits, whatever the user chose.

    Args:
        subject: the graph, as it is stated.
        budget_nbytes: of the whole step.
        setting: how it is planned.
        refuses: whether a plan that does not fit is refused, so that nothing has to be searched
            for where none can fit.
        least: whether, if none fits, the smallest peak that is found is the budget.
        is_passing: whether another plan follows before long: what only proves this one, or makes
            one faster that does not fit, is left out.
    """
    if refuses and subject.lowered.shell.resident_nbytes > budget_nbytes:
        return choose_without_search(subject, budget_nbytes, reads=setting.reads_inductor)
    if subject.host is not None:
        look = functools.partial(
            choose_with_offload,
            *(subject, subject.host),
            time_limit_s=setting.time_limit_s,
            reads=setting.reads_inductor,
        )
        choice = look(budget_nbytes)
        return choice if choice.fits or not least else look(choice.needed_nbytes)
    problem = subject.lowered.problem
    new = functools.partial(
        Solver,
        problem,
        time_limit_s=setting.time_limit_s,
        strict=setting.strict,
        bound_effort=_BRIEF_BOUND if is_passing else None,
        without=_LEFT_OUT if is_passing else (),
    )
    if setting.reads_inductor:
        solver = new(good_enough=ALIKE)
        return choose_by_reading(subject, solver, budget_nbytes, least=least)
    choice = choose_by_simulation(subject, new(), budget_nbytes)
    if choice.fits or not least:
        return choice
    return choose_by_simulation(subject, new(), choice.needed_nbytes)


def _link(host: Host, device: torch.device) -> Link:
    """How fast copies are.

    Raises:
        SteeringError: if the graph is not where the host is.
    """
    if isinstance(host, HostMemory) and host.speed is not None:
        return host.speed
    is_disk = isinstance(host, Disk)
    if device.type != ("cpu" if is_disk else "cuda"):
        where = "the CPU" if is_disk else "a GPU"
        raise SteeringError(
            f"offload={host.asked!r} is for models on {where}, and this one is on {device}."
        )
    return link_of(host) if isinstance(host, Disk) else link_to_host(device)


def _constrain(
    graph: Graph, setting: Setting, *, is_first: bool
) -> tuple[Constraints, frozenset[fx.Node]]:
    """What must be saved or recomputed, and what Inductor computes inside its consumers."""
    joint, storages, steering = graph.joint, graph.storages, setting.steering
    eager = setting.compiler == "eager"
    repeatable, allowed = marked_repeatable(joint, storages, steering.repeatable)
    constraints = find_constraints(
        joint, storages, replays=setting.replays(graph.device), repeatable=repeatable
    )
    constraints = replace(constraints, allowed=allowed)
    inlined = frozenset[fx.Node]() if eager else inlined_nodes(joint, storages, constraints)
    constraints = with_selected(
        constraints,
        joint,
        storages,
        steering.decided,
        must_match=steering.must_match if is_first else (),
        inlined=inlined,
    )
    if eager:
        return constraints, inlined
    inlined = frozenset(n for n in inlined if constraints.must_save.isdisjoint(storages.made_by[n]))
    shared = shared_by_layers(joint, storages, inlined) - constraints.must_recompute
    return replace(constraints, must_save=constraints.must_save | shared), inlined


def _price(
    joint: JointGraph, inlined: frozenset[fx.Node], setting: Setting
) -> Mapping[fx.Node, OpCost]:
    """Time and workspace of each operation: measured, or estimated by a data sheet."""
    priced = [n for n in joint.nodes if n.op == "call_function" and n not in inlined]
    if setting.spec is not None:
        return estimate_nodes(priced, setting.spec, inlined)
    return _measure(priced, setting=setting, joint=joint)


def _measure(
    nodes: Sequence[fx.Node], *, setting: Setting, joint: JointGraph
) -> Mapping[fx.Node, OpCost]:
    timed = functools.partial(current().advance, unit="timings")
    lays_out = setting.compiler != "eager" and _torch.prefers_channels_last(joint.forward)
    return profile_nodes(nodes, as_compiled=as_laid_out if lays_out else None, progress=timed)
