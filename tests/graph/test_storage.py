"""Which nodes share a storage, and what it takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autoremat.graph.storages import Storages, find_storages
from autoremat.memory.storage_sizes import rounded_nbytes
from tests.joint_graphs import CPU, capture, leaf


def storages_of(function: object, *inputs: object) -> tuple[dict[str, object], Storages]:
    """Nodes by name, and the storages of a captured function."""
    joint = capture(function, *inputs).prepared()  # type: ignore[arg-type]
    return {node.name: node for node in joint.nodes}, find_storages(joint.nodes, CPU)


def test_views_live_in_the_storage_they_look_into():
    """In `sin -> view -> exp`, `view` lies in the storage of `sin`."""
    nodes, storages = storages_of(lambda x: x.sin().view(2, 4).exp().sum(), leaf(8))
    assert storages.of_node[nodes["view"]] == ("sin",)
    assert storages.made_by[nodes["view"]] == ()
    assert storages.made_by[nodes["sin"]] == ("sin",)
    assert storages.root["sin"] is nodes["sin"]
    assert storages.nbytes["sin"] == 32


def test_inputs_are_resident_and_incoming_gradients_are_not():
    """Tangents are made by whoever calls the backward."""
    _, storages = storages_of(lambda x: x.sin().sum(), leaf(8))
    assert storages.resident == {"primals_1"}
    assert "tangents_1" in storages.nbytes


def test_views_of_inputs_are_resident_too():
    """A transposed input takes nothing."""
    nodes, storages = storages_of(lambda x: (x.t() @ x).sum(), leaf(4, 2))
    assert storages.of_node[nodes["t"]] == ("primals_1",)


def test_elements_of_a_tuple_have_storages_of_their_own():
    """Each result of a LayerNorm; its element stands for the storage."""
    nodes, storages = storages_of(
        lambda x: torch.nn.functional.layer_norm(x, (8,)).sin().sum(), leaf(4, 8)
    )
    norm = nodes["native_layer_norm"]
    assert len(storages.made_by[norm]) == 3
    first = storages.of_node[nodes["getitem"]]
    assert first == (storages.made_by[norm][0],)
    assert storages.root[first[0]] is nodes["getitem"]
    assert [storages.nbytes[name] for name in storages.made_by[norm]] == [128, 16, 16]


def test_several_views_of_one_storage_count_once():
    """Three chunks are read, one storage is."""
    nodes, storages = storages_of(
        lambda x: torch.cat([c.sin() for c in x.exp().chunk(2)]).sum(), leaf(8)
    )
    assert storages.nbytes["exp"] == 32
    assert storages.read_by(nodes["cat"]) == ("sin", "sin_1")


def test_a_clone_is_fresh():
    """Even where a pass has left the input's fake value on it."""
    nodes, storages = storages_of(lambda x: (x.sin().clone() + 1).sum(), leaf(8))
    clone = next((n for n in nodes.values() if n.name.startswith("clone")), None)
    if clone is not None:
        assert storages.made_by[clone] == (clone.name,)


def test_an_expanded_value_takes_its_storage():
    """A broadcast of one number takes four bytes."""
    nodes, storages = storages_of(lambda x: x.sin().sum(), leaf(8))
    assert storages.nbytes[storages.of_node[nodes["expand"]][0]] == 4


def test_values_on_another_device_count_as_nothing():
    """The plan is for one device."""
    joint = capture(lambda x: x.sin().sum(), leaf(8)).prepared()
    storages = find_storages(joint.nodes, torch.device("cuda"))
    assert set(storages.nbytes.values()) == {0}


@pytest.mark.parametrize(
    ("device", "nbytes", "rounded"),
    [("cpu", 1, 1), ("cuda", 0, 0), ("cuda", 1, 512), ("cuda", 512, 512), ("cuda", 513, 1024)],
)
def test_bytes_are_rounded_as_the_allocator_rounds(device: str, nbytes: int, rounded: int):
    """512 on CUDA, not at all on CPU."""
    assert rounded_nbytes(nbytes, torch.device(device)) == rounded


def test_constants_of_the_graph_are_resident():
    """They belong to the graph and live as long as it does."""

    def function(x: Tensor) -> Tensor:
        y = x.sin().clone()
        y[0] = 1.0
        return y.sin().sum()

    joint = capture(function, leaf(8)).prepared()
    storages = find_storages(joint.nodes, CPU)
    constants = [node for node in joint.nodes if node.op == "get_attr"]
    assert constants
    assert {name for node in constants for name in storages.of_node[node]} <= storages.resident


def test_a_copy_into_a_view_takes_the_whole_storage():
    """The backward of an in-place write into two of 32 rows copies all 32, at every trace."""

    def function(x: Tensor) -> Tensor:
        y = x.sin()
        y[:, ::2].mul_(2.0)
        y[1:3].add_(x[0])
        return y.sin().sum()

    for _ in range(2):
        nodes, storages = storages_of(function, leaf(32, 16))
        copies = [n for n in nodes.values() if n.target is torch.ops.aten.copy.default]
        assert len(copies) == 4
        assert [storages.nbytes[storages.made_by[node][0]] for node in copies] == [2048] * 4


@pytest.mark.parametrize(
    "loss",
    [
        F.binary_cross_entropy,
        F.mse_loss,
        F.smooth_l1_loss,
        F.soft_margin_loss,
        F.huber_loss,
        F.l1_loss,
    ],
)
def test_a_loss_takes_the_storage_that_torch_gives_it(loss: Callable[..., Tensor]):
    """Of some, the mean lies in the storage of all elements that it is the mean of."""
    x, target = leaf(4, 1), torch.ones(1, 8)  # both are broadcast
    nodes, storages = storages_of(
        lambda x: loss(*torch.broadcast_tensors(x.sin().abs(), target)), x
    )
    number = nodes[loss.__name__] if loss.__name__ in nodes else nodes["mean"]
    made = loss(*torch.broadcast_tensors(x.sin().abs(), target)).untyped_storage().nbytes()
    assert storages.nbytes[storages.of_node[number][0]] == made
