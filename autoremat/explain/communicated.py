"""What a plan keeps since communication runs once.

Enters: a planned graph. Leaves: a sentence with bytes at the peak, or none. Guarantees: the bytes
are there at the peak of this plan, so a permission to communicate again saves them at most. No size
is compared but by its hint: nothing here adds a guard to what is compiled.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from autoremat_solver.simulate import instance_spans, simulate
from torch import fx

from autoremat import _torch
from autoremat.graph.collectives import run_once_collectives
from autoremat.planning.choice import Choice, as_chosen
from autoremat.problem.lower import without_spare_states
from autoremat.problem.subject import Subject
from autoremat.units import format_nbytes

_LEAST = 0.05  # of the peak above what is resident: less is not worth a word


def kept_of_communication(subject: Subject, choice: Choice) -> str | None:
    """What would let the plan communicate again, and what it could save; None if that is little."""
    with suppress(Exception):  # what is only told may cost nobody their report
        return _kept(as_chosen(subject, choice), choice)
    return None


def _kept(subject: Subject, choice: Choice) -> str | None:
    joint, storages = subject.joint, subject.lowered.storages
    once, live = subject.constraints.run_once, _live_at_peak(subject, choice)
    kept: set[str] = set()
    for node in joint.forward:
        if node in once and _torch.is_collective(node.target) and not _torch.is_wait(node.target):
            kept.update(_first_kept(node, subject, live))
    nbytes = sum(storages.nbytes[name] for name in kept)
    above_nbytes = choice.peak_nbytes - subject.lowered.problem.resident_nbytes
    if not kept or nbytes < _LEAST * above_nbytes:
        return None
    names = run_once_collectives(joint, once)
    return (
        f"Collectives run once, so what {', '.join(names)} make is kept, {format_nbytes(nbytes)} "
        "at the peak: checkpoints communicate again, and a plan may with "
        f'repeatable="{names[0]}".'
    )


def _live_at_peak(subject: Subject, choice: Choice) -> frozenset[str]:
    plan = choice.solution.plan
    problem = without_spare_states(subject.lowered.problem, plan)
    step = simulate(problem, plan).peak_step
    spans = instance_spans(problem, plan)
    return frozenset(name for name, born, last in spans if born <= step <= last)


def _first_kept(source: fx.Node, subject: Subject, live: frozenset[str]) -> frozenset[str]:
    """Of what a node makes and what is made of that in its shape, what comes first and is live."""
    storages, forward = subject.lowered.storages, set(subject.joint.forward)
    seen, waiting = {source}, [source]
    while waiting:
        node = waiting.pop(0)
        found = live.intersection(storages.of_node[node])
        if found:
            return found
        users = (user for user in node.users if user in forward and user not in seen)
        alike = [user for user in users if _kind(user) == _kind(source)]
        seen.update(alike)
        waiting += alike
    return frozenset()


def _kind(node: fx.Node) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Shape, by hints, and type; None of what is no tensor."""
    value = _torch.fake_value(node)
    if not isinstance(value, torch.Tensor):
        return None
    return tuple(map(_torch.size_hint, value.shape)), value.dtype
