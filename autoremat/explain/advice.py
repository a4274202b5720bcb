"""What a user can change about a model, so that its step takes less: each with its bytes and line.

Enters: a planned graph, and the step at which it peaks. Leaves: sentences, the one that saves most
first. Guarantees: each is about memory that is there at the peak of this plan and that no plan can
free, since the training loop holds or hands it in, or since nobody has said that it may be made
again; nothing is advised that is little beside the peak. No size is compared but by its hint:
advice adds no guard to what is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from autoremat_solver import Plan
from autoremat_solver.simulate import instance_spans
from torch import fx

from autoremat import _torch
from autoremat.explain.places import source_of
from autoremat.graph.collectives import run_once_collectives
from autoremat.problem.subject import Subject
from autoremat.units import format_nbytes

LEAST = 0.05  # of the peak above what is resident: less is not worth a change


def advice_of(subject: Subject, plan: Plan, step: int, peak_nbytes: int) -> tuple[str, ...]:
    """What would lower the peak of a graph, whatever the plan; none where anything goes wrong.

    Args:
        subject: with the problem that the plan is one of.
        plan: the plan.
        step: at which it peaks.
        peak_nbytes: resident bytes included.
    """
    problem = subject.lowered.problem
    try:
        spans = instance_spans(problem, plan)
        live = frozenset(name for name, born, last in spans if born <= step <= last)
        found = [
            *_returned_beside_loss(subject, live),
            *_returned_and_cast(subject, live),
            *_kept_of_collectives(subject, live),
        ]
    except Exception:  # what is only told may cost nobody their plan
        return ()
    least_nbytes = LEAST * (peak_nbytes - problem.resident_nbytes)
    worth = [(nbytes, text) for nbytes, text in found if nbytes >= least_nbytes]
    return tuple(text for _, text in sorted(worth, key=lambda one: -one[0]))


def _returned_beside_loss(subject: Subject, live: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Results that a loss comes with, of which the peak has the gradients that are handed in."""
    joint, storages = subject.joint, subject.lowered.storages
    shell = subject.lowered.shell
    if shell.later_gradients_nbytes or shell.room_nbytes or not any(map(_is_loss, joint.tangents)):
        return  # what other graphs of the step read has a gradient by right
    sizes = {
        node: storages.total_nbytes([node])
        for node in joint.tangents
        if not _is_loss(node) and not live.isdisjoint(storages.of_node[node])
    }
    if not sizes:
        return
    largest = max(sizes, key=sizes.__getitem__)
    result = _torch.results_of_tangents(joint.module.graph).get(largest)
    what = f"`{result.name}`{_at(result)}" if result is not None else "a result"
    others = f" and {len(sizes) - 1} more" if len(sizes) > 1 else ""
    nbytes = sum(sizes.values())
    yield (
        nbytes,
        f"The model returns {what}{others} beside its loss, so the backward is given a gradient "
        f"for that, {format_nbytes(nbytes)} at the peak, zeros where nobody uses it: if only the "
        "loss is differentiated, return it alone, or detach() the rest.",
    )


def _returned_and_cast(subject: Subject, live: frozenset[str]) -> Iterator[tuple[int, str]]:
    """The largest result that the peak has in another precision as well, as the loss needs it."""
    problem, storages, joint = subject.lowered.problem, subject.lowered.storages, subject.joint
    held = live.intersection(problem.outputs)
    pairs: list[tuple[int, fx.Node, fx.Node]] = []
    for node in joint.nodes:
        source = _cast_from(node) if node in joint.forward else None
        if source is None or held.isdisjoint(storages.of_node[source]):
            continue
        cast = next(
            (one for one in _made_of(node) if live.intersection(storages.of_node[one])), None
        )
        if cast is not None:
            nbytes = min(storages.total_nbytes([one]) for one in (source, cast))
            pairs.append((nbytes, source, cast))
    if pairs:
        nbytes, source, cast = max(pairs, key=lambda pair: pair[0])
        types = (str(_torch.fake_value(one).dtype) for one in (source, cast))
        first, second = (text.removeprefix("torch.") for text in types)
        yield (
            nbytes,
            f"The model returns `{source.name}`{_at(source)} in {first}, which the peak has beside "
            f"`{cast.name}` in {second}, {format_nbytes(nbytes)} at least: compute the loss in "
            "chunks of tokens, do not return what it is computed from, or leave it in one "
            "precision.",
        )


def _kept_of_collectives(subject: Subject, live: frozenset[str]) -> Iterator[tuple[int, str]]:
    """What is kept of communication that runs once: its results, or what they were made into."""
    joint, storages = subject.joint, subject.lowered.storages
    once = subject.constraints.run_once
    kept: set[str] = set()
    for node in joint.forward:
        if node in once and _torch.is_collective(node.target) and not _torch.is_wait(node.target):
            kept.update(_first_kept(node, subject, live))
    if not kept:
        return
    names = run_once_collectives(joint, once)
    nbytes = sum(storages.nbytes[name] for name in kept)
    yield (
        nbytes,
        f"Collectives run once, so what {', '.join(names)} make is kept, {format_nbytes(nbytes)} "
        "at the peak: checkpoints communicate again, and a plan may with "
        f'repeatable="{names[0]}".',
    )


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


def _made_of(cast: fx.Node) -> Iterator[fx.Node]:
    """A cast, and what is made of it in its own shape and type."""
    seen, waiting = {cast}, [cast]
    while waiting:
        node = waiting.pop(0)
        yield node
        for user in node.users:
            if user not in seen and user.op == "call_function" and _kind(user) == _kind(cast):
                seen.add(user)
                waiting.append(user)


def _cast_from(node: fx.Node) -> fx.Node | None:
    """What a node has in another floating-point type."""
    sources = node.all_input_nodes if node.op == "call_function" else []
    if len(sources) != 1:
        return None
    own, given = _kind(node), _kind(sources[0])
    if own is None or given is None or own[0] != given[0] or own[1] == given[1]:
        return None
    return sources[0] if own[1].is_floating_point and given[1].is_floating_point else None


def _kind(node: fx.Node) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Shape, by hints, and type; None of what is no tensor."""
    value = _torch.fake_value(node)
    if not isinstance(value, torch.Tensor):
        return None
    return tuple(map(_torch.size_hint, value.shape)), value.dtype


def _is_loss(node: fx.Node) -> bool:
    """Whether it is one floating-point number."""
    kind = _kind(node)
    return kind is not None and not kind[0] and kind[1].is_floating_point


def _at(node: fx.Node) -> str:
    source = source_of(node)
    return f" ({source})" if source else ""
