"""What a user can change about a model, so that its step takes less: each with its bytes and line.

Enters: a planned graph. Leaves: sentences, the one that saves most first. Guarantees: each is about
memory that the plan has at its peak or is given at the start of its backward, and no plan can
avoid; nothing is advised that is little beside the peak.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from autoremat_solver.simulate import instance_spans
from torch import fx

from autoremat import _torch
from autoremat.explain.places import source_of
from autoremat.planning.choice import Choice
from autoremat.problem.subject import Subject
from autoremat.units import format_nbytes

LEAST = 0.05  # of the peak above what is resident: less is not worth a change


def advice_of(subject: Subject, choice: Choice) -> tuple[str, ...]:
    """What would lower the peak of a graph, whatever the plan.

    Args:
        subject: with the problem that the choice's plan is a plan of.
        choice: the plan.
    """
    above = choice.peak_nbytes - subject.lowered.problem.resident_nbytes
    found = [*_returned_beside_loss(subject), *_in_two_precisions(subject, choice)]
    worth = [(nbytes, text) for nbytes, text in found if nbytes >= LEAST * above]
    return tuple(text for _, text in sorted(worth, key=lambda one: -one[0]))


def _returned_beside_loss(subject: Subject) -> Iterator[tuple[int, str]]:
    """Results that a loss comes with: the backward is given gradients of all of them."""
    joint, storages = subject.joint, subject.lowered.storages
    sizes = {node: storages.total_nbytes([node]) for node in joint.tangents if not _is_loss(node)}
    if not any(map(_is_loss, joint.fwd_outputs)) or not sizes:
        return
    largest = max(sizes, key=sizes.__getitem__)
    like = _shape(largest)
    named = next((node for node in joint.fwd_outputs if _shape(node) == like), None)
    what = f"`{named.name}`{_at(named)}" if named is not None else "a result"
    others = f" and {len(sizes) - 1} more results" if len(sizes) > 1 else ""
    size = format_nbytes(sum(sizes.values()))
    yield (
        sum(sizes.values()),
        f"The model returns {what}{others} beside its loss, so the backward is given a gradient "
        f"of {size}, zeros if nobody uses it: return the loss alone, or detach() what is only "
        "looked at.",
    )


def _in_two_precisions(subject: Subject, choice: Choice) -> Iterator[tuple[int, str]]:
    """The largest value that the peak has twice: as it was, and cast or made of the cast."""
    problem, plan = subject.lowered.problem, choice.solution.plan
    storages, step = subject.lowered.storages, choice.solution.timeline.peak_step
    spans = instance_spans(problem, plan)
    live = dict.fromkeys(name for name, born, last in spans if born <= step <= last)
    roots = [storages.root[name] for name in live if name in storages.root]
    pairs: list[tuple[int, fx.Node, fx.Node]] = []
    for node in subject.joint.forward:
        source = _cast_from(node)
        if source is None or live.keys().isdisjoint(storages.of_node[source]):
            continue
        cast = next((root for root in roots if _shape(root) == _shape(node)), None)
        if cast is not None:
            pairs.append(
                (min(storages.total_nbytes([one]) for one in (source, cast)), source, cast)
            )
    if pairs:
        nbytes, source, cast = max(pairs, key=lambda pair: (pair[0], pair[1].name))
        first, second = (
            str(_torch.fake_value(n).dtype).removeprefix("torch.") for n in (source, cast)
        )
        yield (
            nbytes,
            f"`{source.name}`{_at(source)} is there in {first} at the peak and, as `{cast.name}`, "
            f"in {second}, at least {format_nbytes(nbytes)} more: compute the loss in chunks of "
            "tokens, do not return what it is computed from, or leave it in one precision.",
        )


def _cast_from(node: fx.Node) -> fx.Node | None:
    """What a node has in another floating-point type."""
    sources = node.all_input_nodes if node.op == "call_function" else []
    if len(sources) != 1:
        return None
    value, given = _torch.fake_value(node), _torch.fake_value(sources[0])
    if not isinstance(value, torch.Tensor) or not isinstance(given, torch.Tensor):
        return None
    is_cast = value.shape == given.shape and value.dtype != given.dtype
    is_floating = value.dtype.is_floating_point and given.dtype.is_floating_point
    return sources[0] if is_cast and is_floating else None


def _is_loss(node: fx.Node) -> bool:
    """Whether it is one floating-point number."""
    value = _torch.fake_value(node)
    return isinstance(value, torch.Tensor) and not value.shape and value.dtype.is_floating_point


def _shape(node: fx.Node) -> object:
    value = _torch.fake_value(node)
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None


def _at(node: fx.Node) -> str:
    source = source_of(node)
    return f" ({source})" if source else ""
