"""Random numbers: which nodes draw them, and which of them may be drawn again.

Enters: nodes, the user's `DropoutPolicy`, the executor and the device. Leaves: `Replays`, the ways
in which a repeated draw gives the numbers of its first run. Guarantees: a draw that no way covers
runs once, and what the backward needs of it is saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoremat import _torch
from autoremat.graph.dropout_policy import DropoutPolicy


@dataclass(frozen=True)
class Replays:
    """How a draw may be repeated.

    Attributes:
        states: by running its operator again under the generator's saved state.
        seeds: by computing it again from a seed that Inductor's code keeps.
    """

    states: bool = False
    seeds: bool = False


def safe_policy(compiler: str, device: torch.device) -> DropoutPolicy:
    """The policy without which nobody has to worry about gradients.

    Replays are tested on the CPU. On CUDA the generator's state restores the numbers by its own
    contract; but where Inductor draws four numbers at a time (torch 2.13), kernels of other shapes
    may draw others from one seed (pytorch#198333). Other devices are unknown.
    """
    if device.type == "cpu":
        return DropoutPolicy.REPLAY
    if device.type == "cuda" and (compiler == "eager" or not _torch.DRAWS_FOUR_AT_A_TIME):
        return DropoutPolicy.REPLAY
    return DropoutPolicy.SAVE_MASKS


def replays(policy: DropoutPolicy, compiler: str, device: torch.device) -> Replays:
    """The ways that an executor has to follow a policy."""
    if policy is DropoutPolicy.SAVE_MASKS:
        return Replays()
    if compiler == "eager":
        return Replays(states=_torch.restores_rng_state(device))
    return Replays(seeds=True)


def is_random(node: fx.Node) -> bool:
    """Whether a repeat of the node would draw new random numbers."""
    target = node.target
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    probability = _argument(node, "dropout_p")  # attention is random only where it drops out
    return not (isinstance(probability, (int, float)) and probability == 0.0)


def _argument(node: fx.Node, name: str) -> Any:
    """What an operator is given under a name, or its default; None if it has no such argument."""
    for position, argument in enumerate(_torch.arguments_of(node.target)):
        if argument.name == name:
            given = node.args[position] if len(node.args) > position else None
            given = node.kwargs.get(name, given)
            return argument.default_value if given is None else given
    return None


def is_seeded(node: fx.Node) -> bool:
    """Whether the node draws from a seed that it is given: the same numbers each time it runs."""
    return node.target in _torch.SEEDED_DRAWS


def makes_seeds(node: fx.Node) -> bool:
    """Whether Inductor's own generator draws here, which gives other numbers than eager's."""
    return node.target in _torch.SEED_MAKERS


def has_own_generator(node: fx.Node) -> bool:
    """Whether a draw is from a generator of the user's, whose state nobody saves."""
    return _argument(node, "generator") is not None


def keep_draws(module: fx.GraphModule, *, unseeded: bool = False) -> None:
    """Tag seeded draws, or all, so that torch's own partitioner does not draw again either."""
    for node in module.graph.nodes:
        if is_seeded(node) or (unseeded and is_random(node)):
            for kept in (node, *filter(_torch.is_getitem, node.users)):
                _torch.set_recompute_policy(kept, _torch.CheckpointPolicy.MUST_SAVE)


def drawn_again(forward: fx.GraphModule, backward: fx.GraphModule) -> str | None:
    """A draw of the forward that the backward makes anew, with neither state nor seed."""
    drawn = {node.name for node in forward.graph.nodes if is_random(node)}
    names = (node.name for node in backward.graph.nodes if is_random(node))
    return next((name for name in names if name in drawn), None)
