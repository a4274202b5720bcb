"""A memory policy for torchtitan's graph trainer, or for any graph of a whole step.

    import autoremat.torchtitan

    autoremat.torchtitan.register("40GB")  # then train with --compile.memory_policy autoremat

Enters: a graph that holds forward, loss and backward, as `make_fx` traces them, and a budget.
Leaves: a tag on each operation of the forward, to save or to recompute, as torchtitan's pass reads
them (`selective_activation_remat_pass`), and torch's of the same form. Guarantees: nothing else of
the graph changes, but for names of modules that would hide the backward from that pass; the
predicted peak is that of what the pass makes of the tags: each operation is repeated once, before
the first operation of the backward that needs it. Ranks of a job with equal graphs, budgets and
bytes beside them get equal tags; collectives run once unless they are marked as repeatable.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from autoremat_solver import Plan, Problem, Solver, simulate
from autoremat_solver.effort import CutOff
from autoremat_solver.plan import Status
from autoremat_solver.policies import save_all_but
from torch import fx

from autoremat import _torch
from autoremat.ask.options import Options
from autoremat.errors import InfeasibleBudget
from autoremat.graph.devices import device_of
from autoremat.graph.selectors import Selection
from autoremat.planning.found_before import answer
from autoremat.planning.identity import in_words
from autoremat.planning.pipeline import graph_of, state
from autoremat.problem.lower import Lowered, shell_of
from autoremat.problem.subject import Subject
from autoremat.ranks.store import shared_store
from autoremat.reporting import ResidentParts
from autoremat.units import format_nbytes

LAYERS = "layers."  # where the names of torchtitan's blocks begin
NOT_LAYERS = ("loss", "lm_head")  # modules whose backward comes before that of the blocks
SOLVES = 6  # at most: the pass repeats in another way than the solver's plans
ALL_AT_ONCE = ("chains", "smallest", "anneal", "anneal more", "rearrange")  # repeat several times

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tagged:
    """What was decided for a graph.

    Attributes:
        peak_nbytes: predicted for the step, all inputs of the graph included.
        budget_nbytes: what was asked for.
        recomputed: names of the operations that run again.
        time_us: of the step.
        extra_us: of that, what running operations again takes.
    """

    peak_nbytes: int
    budget_nbytes: int
    recomputed: tuple[str, ...]
    time_us: float
    extra_us: float

    def __str__(self) -> str:
        """One line for a log."""
        share = 100 * self.extra_us / max(1e-9, self.time_us - self.extra_us)
        return (
            f"autoremat: {len(self.recomputed)} operations run again (+{share:.1f} % time), peak "
            f"{format_nbytes(self.peak_nbytes)} of {format_nbytes(self.budget_nbytes)}"
        )


def register(
    budget: str | int,
    *,
    beside_nbytes: int = 0,
    name: str = "autoremat",
    time_limit: float = 30.0,
    repeatable: Selection = None,
) -> None:
    """Make a memory policy known to torchtitan's graph trainer.

    Args:
        budget: peak of everything that the step holds on the device; as of `optimize`.
        beside_nbytes: what it holds beside the inputs of the graph, which are parameters, buffers
            and the batch: the optimizer's state, as a rule, and gradients of earlier batches.
        name: for `--compile.memory_policy`.
        time_limit: seconds to choose a plan.
        repeatable: collectives and custom operators that may run again; as of
            `optimize`.

    Raises:
        ImportError: if torchtitan, or its graph trainer, is not there.
        ValueError: for a malformed budget or time limit.
    """
    from torchtitan.experiments.graph_trainer.registry import (  # type: ignore[import-not-found]
        register_memory_policy,
    )

    Options.parse(budget=budget, time_limit=time_limit, repeatable=repeatable)

    def policy(module: fx.GraphModule, *, config: object) -> fx.GraphModule:
        tagged = tag(
            module,
            budget,
            beside_nbytes=beside_nbytes,
            time_limit=time_limit,
            repeatable=repeatable,
        )
        _log.info("%s", tagged)
        return module

    register_memory_policy(name)(policy)


def tag(
    module: fx.GraphModule,
    budget: str | int,
    *,
    beside_nbytes: int = 0,
    time_limit: float = 30.0,
    repeatable: Selection = None,
) -> Tagged:
    """Tag the forward of a step's graph, so that the step's peak stays within a budget.

    Args:
        module: a graph whose first output is the loss, the others are gradients; what belongs to
            the backward has `node.meta["autograd_backward"]`, as torchtitan's tracer notes it.
        budget: as of `optimize`.
        beside_nbytes: as of `register`.
        time_limit: seconds to choose a plan.
        repeatable: as of `register`.

    Raises:
        ValueError: for a malformed budget, or a graph without a backward.
        InfeasibleBudget: if no plan of this kind fits.
    """
    if not any(map(_torch.traced_by_autograd, module.graph.nodes)):
        raise ValueError(
            "The graph has no backward: none of its nodes is marked as traced by "
            "torch.autograd.grad. Trace forward, loss and backward in one, with torchtitan's "
            'tracer, or with make_fx and node.meta["autograd_backward"] = True on each node of the '
            f"backward; torch 2.11 marks none by itself, this is {torch.__version__}."
        )
    options = Options.parse(
        budget=budget,
        compiler="eager",
        dropout="save_masks",
        time_limit=time_limit,
        repeatable=repeatable,
        verbose=False,
    )
    if (
        options.budget.is_free
        and options.setting.steering.repeatable
        and shared_store() is not None
    ):
        raise ValueError(
            "With repeatable= all ranks need one budget, since tags say what they communicate: "
            '"auto" is what each of them has free. Give it in bytes.'
        )
    subject = _stated(module, options, beside_nbytes)
    budget_nbytes = options.budget_nbytes(subject.device)
    plan = _chosen_once(subject, budget_nbytes, time_limit)
    _tag_nodes(module, subject.lowered, frozenset(plan.recomputed))
    show_backward_of_blocks(module.graph)
    problem = subject.lowered.problem
    timeline = simulate(problem, plan)
    extra_us = math.fsum(problem.op_by_name[name].time_us for name in plan.recomputed)
    recomputed = tuple(sorted(plan.recomputed))
    return Tagged(timeline.peak_nbytes, budget_nbytes, recomputed, timeline.time_us, extra_us)


def _stated(module: fx.GraphModule, options: Options, beside_nbytes: int) -> Subject:
    """The graph, stated for the solver as a joint graph is."""
    joint = _as_joint(module)
    graph = graph_of(joint, device_of(joint), num_fwd_outputs=1, static_indices=None)
    inputs = {name for node in graph.joint.primals for name in graph.storages.of_node[node]}
    resident_nbytes = sum(graph.storages.nbytes[name] for name in inputs) + beside_nbytes
    shell = shell_of(graph.joint, graph.storages, resident_nbytes=resident_nbytes)
    return state(graph, shell, options.setting)


def _as_joint(module: fx.GraphModule) -> fx.GraphModule:
    """A copy in the form of AOTAutograd's joint graphs: inputs are primals, the backward is marked.

    What the pass cannot repeat has to be saved: draws, whose state it does not keep, and what the
    backward of the loss reads, as it repeats nothing before that of the blocks.
    """
    graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    early = set(_loss_backward(module.graph))
    for number, node in enumerate(module.graph.nodes):
        if node.op == "placeholder":
            copy = graph.placeholder(f"primals_{number + 1}")
        else:
            copy = graph.node_copy(node, nodes.__getitem__)
        nodes[node], copy.meta = copy, dict(node.meta)
        if _torch.traced_by_autograd(node):
            _torch.must_stay_in_backward(copy)
        elif node.op == "call_function":
            is_draw = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            _torch.set_recompute_policy(copy, None)
            if is_draw or not early.isdisjoint(node.users):
                _torch.set_recompute_policy(copy, _torch.CheckpointPolicy.MUST_SAVE)
        copy.meta[_NODE] = node.name
    return fx.GraphModule(module, graph)


_NODE = "autoremat_node"  # in `meta`: the name of the node that a copy is of


def _loss_backward(graph: fx.Graph) -> Iterator[fx.Node]:
    """Nodes of the backward before that of the blocks, if it tells them apart."""
    backward = [node for node in graph.nodes if _torch.traced_by_autograd(node)]
    names = [_torch.module_name(node) for node in backward]
    first = next((i for i, name in enumerate(names) if name.startswith(LAYERS)), 0)
    yield from backward[:first]


@dataclass(frozen=True)
class _Again:
    """Names of the operations that a plan repeats."""

    names: list[str]


def _chosen_once(subject: Subject, budget_nbytes: int, time_limit_s: float) -> Plan:
    """What a rank of the job has chosen for this graph, or a process before; else what is now."""

    def chosen() -> _Again:
        return _Again(sorted(_chosen(subject, budget_nbytes, time_limit_s).recomputed))

    question = f"tags, {in_words(subject)}, {budget_nbytes}, {time_limit_s}"
    again = answer(question, _Again, chosen, subject.device)
    return _once(subject.lowered.problem, again.names)


def _chosen(subject: Subject, budget_nbytes: int, time_limit_s: float) -> Plan:
    """The fastest plan found that fits as the pass carries it out.

    The solver's plans may repeat an operation several times, or later. So what it is asked for is
    shifted by how much more the same choice takes where each is repeated once.
    """
    problem, cut_off = subject.lowered.problem, CutOff(time_limit_s)
    solver = Solver(problem, time_limit_s=time_limit_s, without=ALL_AT_ONCE)
    known = [save_all_but(problem), _once(problem, solver.smallest_peak().plan.recomputed)]
    target = budget_nbytes
    for _ in range(SOLVES):
        solution = solver.solve(target, time_limit_s=cut_off.left_s)
        known.append(_once(problem, solution.plan.recomputed))
        above_nbytes = simulate(problem, known[-1]).peak_nbytes - budget_nbytes
        if above_nbytes <= 0 or solution.status is Status.INFEASIBLE:
            break
        target = min(target, solution.timeline.peak_nbytes) - above_nbytes
        if target <= problem.resident_nbytes:
            break
    peaks = [simulate(problem, plan).peak_nbytes for plan in known]
    fitting = [plan for plan, peak in zip(known, peaks, strict=True) if peak <= budget_nbytes]
    if not fitting:
        raise InfeasibleBudget(
            budget_nbytes,
            min(peaks),
            problem.resident_nbytes,
            ResidentParts(parameters_nbytes=problem.resident_nbytes),
        )
    return min(fitting, key=lambda plan: simulate(problem, plan).time_us)


def _once(problem: Problem, names: Iterable[str]) -> Plan:
    """What the pass makes of a plan that repeats these operations: each runs again once."""
    again = set(names)
    dropped = {name for op in problem.ops if op.name in again for name in op.outputs}
    return save_all_but(problem, dropped)


def _tag_nodes(module: fx.GraphModule, lowered: Lowered, again: frozenset[str]) -> None:
    """Tag the nodes of the forward; a view goes with what it is a view of."""
    repeated = {lowered.node_of[name].meta[_NODE] for name in again}
    ops = {node.meta[_NODE] for node in lowered.node_of.values()}
    storages = {
        key for node in module.graph.nodes if node.name in repeated for key in _storages_of(node)
    }
    policies = _torch.CheckpointPolicy
    for node in module.graph.nodes:
        if node.op == "call_function" and not _torch.traced_by_autograd(node):
            is_view = node.name not in ops and not storages.isdisjoint(_storages_of(node))
            is_again = is_view or node.name in repeated
            policy = policies.MUST_RECOMPUTE if is_again else policies.MUST_SAVE
            _torch.set_recompute_policy(node, policy)


def _storages_of(node: fx.Node) -> set[int]:
    """Identities of the storages behind what a node gives."""
    keys = map(_torch.storage_key, _torch.tensor_leaves(_torch.fake_value(node)))
    return {key for key in keys if key is not None}


def show_backward_of_blocks(graph: fx.Graph) -> None:
    """Take names off sums of gradients that torch 2.13 gives the name of the loss.

    The pass repeats nothing before the last node of that name.
    """
    nodes = [node for node in graph.nodes if _torch.traced_by_autograd(node)]
    in_blocks = False
    for node in nodes:
        name = _torch.module_name(node)
        in_blocks = in_blocks or name.startswith(LAYERS)
        if in_blocks and name in NOT_LAYERS:
            _torch.forget_module_name(node)
