"""What may not be recomputed, or must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from autoremat.graph.constraints import Constraints, find_constraints, is_batch_norm_update
from autoremat.graph.random_draws import Replays, is_random, makes_seeds
from autoremat.graph.storages import find_storages
from tests.joint_graphs import CPU, capture, leaf

STATES = Replays(states=True)


def constraints_of(
    function: Callable[..., Any], *inputs: Any, replays: Replays = STATES
) -> Constraints:
    """The rules for a captured function."""
    joint = capture(function, *inputs).prepared()
    return find_constraints(joint, find_storages(joint.nodes, CPU), replays=replays)


def reasons(constraints: Constraints) -> dict[str, str]:
    """Why operators run once, by their name."""
    return {str(n.target).removeprefix("aten."): why for n, why in constraints.run_once.items()}


def test_plain_arithmetic_is_free():
    """Nothing runs once, nothing must be kept."""
    rules = constraints_of(lambda x: x.sin().exp().softmax(0).sum(), leaf(4))
    assert not rules.run_once
    assert not rules.replayed
    assert not rules.must_save
    assert not rules.must_recompute


@pytest.mark.parametrize("replay", [True, False])
def test_random_operators_are_replayed_or_run_once(replay: bool):
    """Where the executor cannot replay the generator's state, the mask is kept."""
    rules = constraints_of(
        lambda x: F.dropout(x, 0.5).sin().sum(), leaf(4), replays=Replays(states=replay)
    )
    assert bool(rules.replayed) is replay
    assert ("draws random numbers" in rules.run_once.values()) is not replay


@pytest.mark.parametrize(("dropout", "random"), [(0.0, False), (0.3, True)])
def test_attention_is_random_only_with_dropout(dropout: float, random: bool):
    """Its tag says random always."""

    def function(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=dropout).sum()

    joint = capture(function, leaf(1, 1, 4, 8)).prepared()
    assert any(is_random(node) for node in joint.nodes) is random


@pytest.mark.parametrize(
    "decide",
    [
        lambda x: x.topk(2)[0],
        lambda x: x.sort()[0],
        lambda x: x.kthvalue(2)[0],
        lambda x: x[x.detach().argsort()],
    ],
    ids=["topk", "sort", "kthvalue", "argsort"],
)
def test_discrete_decisions_are_made_once(decide: Callable[[Tensor], Tensor]):
    """A tie could turn."""
    rules = constraints_of(lambda x: decide(x.sin()).sin().sum(), leaf(4))
    assert any("decision" in why for why in rules.run_once.values())


def test_readers_of_an_overwritten_input_run_once():
    """A second run would read the new value."""
    buffer = torch.ones(4)

    def function(x: Tensor) -> Tensor:
        y = (x + buffer).sin()
        buffer.mul_(2.0)
        return y.sum()

    why = reasons(constraints_of(function, leaf(4)))
    assert why["add.Tensor"] == "reads an input that the step overwrites"
    assert why["copy_.default"] == "has side effects"


def test_batch_norm_may_run_again():
    """Its output does not depend on the statistics that it updates."""
    norm = torch.nn.BatchNorm1d(4)
    joint = capture(lambda x: norm(x).square().mean(), leaf(8, 4)).prepared()
    rules = find_constraints(joint, find_storages(joint.nodes, CPU), replays=STATES)
    updates = [node for node in joint.nodes if is_batch_norm_update(node)]
    assert len(updates) == 1
    assert updates[0] not in rules.run_once


def test_shapes_that_depend_on_data_are_found_once():
    """Two runs could disagree on the shape."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        rules = constraints_of(lambda x: x[(x > 0).nonzero().squeeze(1)].sin().sum(), leaf(4))
    assert any("shape depends on data" in why for why in rules.run_once.values())


def test_only_a_mask_makes_the_shape_of_an_index_depend_on_data():
    """Positions, as in embeddings and attention masks, may be looked up again."""
    rules = constraints_of(lambda x, at: x[at].sin().sum(), leaf(4), torch.tensor([2, 0]))
    assert not rules.run_once
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        rules = constraints_of(lambda x: x[x > 0].sin().sum(), leaf(4))
    assert any("shape depends on data" in why for why in rules.run_once.values())


@torch.library.custom_op("autoremat_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """An operator of somebody else."""
    return x * 2


twice.register_fake(lambda x: torch.empty_like(x))
twice.register_autograd(lambda ctx, gradient: gradient * 2)


def test_custom_operators_run_once():
    """Nobody says that they are repeatable."""
    rules = constraints_of(lambda x: twice(x.sin()).sin().sum(), leaf(4))
    assert list(rules.run_once.values()) == [
        "is a custom operator that is not known to be repeatable"
    ]


def test_checkpoint_regions_must_be_recomputed():
    """What the user checkpoints is not kept for the backward."""

    def function(x: Tensor) -> Tensor:
        return checkpoint(lambda y: y.sin().exp(), x.cos(), use_reentrant=False).sin().sum()

    rules = constraints_of(function, leaf(4))
    assert rules.must_recompute
    assert not rules.must_recompute & rules.must_save


def test_seeds_of_compiled_code_are_made_once():
    """Inductor replays masks from them."""
    graph = torch.fx.Graph()
    seeds = graph.call_function(torch.ops.prims.inductor_seeds.default, (3, torch.device("cpu")))
    assert makes_seeds(seeds)
