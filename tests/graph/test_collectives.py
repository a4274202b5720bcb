"""Communication in a graph: what runs once, what may gather again, what it costs and holds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, distributed, nn

from autoremat import _torch
from autoremat.cost.calls import LINKS, estimate_nodes
from autoremat.cost.op_times import NOMINAL_CEILINGS
from autoremat.graph.collectives import late_nbytes
from autoremat.graph.constraints import find_constraints
from autoremat.graph.joint_graph import JointGraph
from autoremat.graph.random_draws import Replays
from autoremat.graph.storages import find_storages
from tests.joint_graphs import CPU, capture, leaf

SIZE = 8

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="needs torch.distributed")


@pytest.fixture(autouse=True)
def two_processes() -> Iterator[None]:
    """A group of two, of which only this process is there: collectives communicate nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    distributed.destroy_process_group()


class Gathered(torch.autograd.Function):
    """A parameter from the shards of all processes, as SimpleFSDP gathers it."""

    @staticmethod
    def forward(_ctx, shard: Tensor) -> Tensor:
        ops = torch.ops._c10d_functional
        whole = ops.all_gather_into_tensor(shard.to(torch.bfloat16), 2, group())
        return ops.wait_tensor(whole)

    @staticmethod
    def backward(_ctx, gradient: Tensor) -> Tensor:
        ops = torch.ops._c10d_functional
        own = ops.reduce_scatter_tensor(gradient.float(), "sum", 2, group())
        return ops.wait_tensor(own)


def group() -> str:
    return distributed.group.WORLD.group_name


class Sharded(nn.Module):
    """`tanh(x @ gathered(w))`."""

    def __init__(self) -> None:
        super().__init__()
        self.shard = nn.Parameter(torch.ones(SIZE, 2 * SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.to(torch.bfloat16) @ Gathered.apply(self.shard)).float().sum()


def reduced(x: Tensor) -> Tensor:
    """`sin(all_reduce(exp(x)))`, with its gradient reduced as well."""
    from torch.distributed._functional_collectives import all_reduce

    return all_reduce(x.exp(), "sum", distributed.group.WORLD).sin().sum()


def gathered_rows(x: Tensor) -> Tensor:
    """The same with a gather of what the forward has made."""
    return Gathered.apply(x.exp()).float().sin().sum()


def collectives(joint: JointGraph) -> list[torch.fx.Node]:
    """Of the forward."""
    found = [node for node in joint.nodes if _torch.is_collective(node.target)]
    return [node for node in found if node not in joint.backward]


def run_once(joint: JointGraph) -> dict[str, str | None]:
    """Why each collective of the forward runs once; None if it may run again."""
    rules = find_constraints(joint, find_storages(joint.nodes, CPU), replays=Replays(states=True))
    names = {node: node.target.overloadpacket.__name__ for node in collectives(joint)}
    return {name: rules.run_once.get(node) for node, name in names.items()}


def test_parameters_may_be_gathered_again():
    """Of equal plans all processes gather, or none; a cast on the way changes nothing."""
    found = run_once(capture(Sharded(), leaf(4, 2 * SIZE)).prepared())
    assert found == {"all_gather_into_tensor": None, "wait_tensor": None}


def test_what_is_made_is_gathered_once():
    """To gather an activation again, it would have to be there again, on all processes at once."""
    found = run_once(capture(gathered_rows, leaf(SIZE, SIZE)).prepared())
    assert set(found.values()) == {"communicates with other processes"}


def test_a_reduction_runs_once():
    """It, and what waits for it."""
    found = run_once(capture(reduced, leaf(SIZE, SIZE)).prepared())
    assert found.keys() == {"all_reduce", "wait_tensor"}
    assert set(found.values()) == {"communicates with other processes"}


def test_a_collective_costs_its_bytes_over_the_link():
    """A reduction goes both ways; what waits for it is free."""
    joint = capture(reduced, leaf(SIZE, SIZE)).prepared()
    sent, waiting = collectives(joint)
    costs = estimate_nodes(joint.nodes, lambda _: NOMINAL_CEILINGS["cpu"])
    link = LINKS["cpu"]
    expected_us = link.latency_us + 2 * SIZE * SIZE * 4 / (link.gbps * 1e3)
    assert costs[sent].time_us == pytest.approx(expected_us)
    assert costs[waiting].time_us == 0.0


def test_one_buffer_outlives_its_last_use():
    """The largest that any collective makes; a graph without one has none."""
    for function, nbytes in ((reduced, SIZE * SIZE * 4), (lambda x: x.sin().sum(), 0)):
        joint = capture(function, leaf(SIZE, SIZE)).prepared()
        assert late_nbytes(joint, find_storages(joint.nodes, CPU)) == nbytes


def test_parameters_that_are_dtensors_stay_at_one_address():
    """Torch takes each apart into its local part and its mesh, and counts it once."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = distributed.init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE // 2, SIZE))
    parallelize_module(model, mesh, {"0": ColwiseParallel()})
    joint = capture(lambda x: model(x).sum(), torch.ones(4, SIZE)).prepared()
    sizes = [v.nbytes for n in joint.static_inputs if isinstance(v := _torch.fake_value(n), Tensor)]
    expected = [SIZE * SIZE // 2, SIZE // 2, SIZE // 2 * SIZE, SIZE]
    assert sorted(sizes) == sorted(4 * count for count in expected)
