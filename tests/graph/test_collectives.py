"""Communication in a graph: what runs once, what may gather again, what it costs and holds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, distributed, nn

import autoremat
from autoremat import _torch
from autoremat.cost.device_specs import find_spec
from autoremat.cost.estimates import LINKS
from autoremat.cost.gpu_times import estimate_nodes
from autoremat.graph.collectives import late_nbytes
from autoremat.graph.constraints import Constraints, find_constraints, marked_repeatable
from autoremat.graph.joint_graph import JointGraph
from autoremat.graph.random_draws import Replays
from autoremat.graph.selectors import parse_selectors
from autoremat.graph.storages import find_storages
from tests.joint_graphs import CPU, capture, leaf
from tests.training import UNBOUNDED, optimized, step

SIZE = 8
GATHER = "_c10d_functional.all_gather_into_tensor"

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


class Layers(nn.Module):
    """Frozen ones behind one that learns; weights take more than what they make of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2 * SIZE))
        self.layers = nn.ModuleList(Sharded() for _ in range(6)).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = (x * self.scale).to(torch.bfloat16)
        for layer in self.layers:
            x = torch.tanh(x @ Gathered.apply(layer.shard))
        return x.float().sum()


def reduced(x: Tensor) -> Tensor:
    """`sin(all_reduce(exp(x)))`, with its gradient reduced as well."""
    from torch.distributed._functional_collectives import all_reduce

    return all_reduce(x.exp(), "sum", distributed.group.WORLD).sin().sum()


def collectives(joint: JointGraph) -> list[torch.fx.Node]:
    """Of the forward."""
    found = [node for node in joint.nodes if _torch.is_collective(node.target)]
    return [node for node in found if node not in joint.backward]


def rules_of(joint: JointGraph, *repeatable: str) -> Constraints:
    """The constraints, where operators that are so named may run again."""
    storages = find_storages(joint.nodes, CPU)
    selectors = parse_selectors("repeatable", repeatable)
    marked, _ = marked_repeatable(joint, storages, selectors)
    return find_constraints(joint, storages, replays=Replays(states=True), repeatable=marked)


def run_once(joint: JointGraph, *repeatable: str) -> dict[str, str | None]:
    """Why each collective of the forward runs once; None if it may run again."""
    rules = rules_of(joint, *repeatable)
    names = {node: node.target.overloadpacket.__name__ for node in collectives(joint)}
    return {name: rules.run_once.get(node) for node, name in names.items()}


def test_parameters_may_be_gathered_again_if_their_user_says_so():
    """Torch's own tag, which has them saved, does not hold either."""
    joint = capture(Sharded(), leaf(4, 2 * SIZE)).prepared()
    assert None not in run_once(joint).values()
    assert run_once(joint, GATHER) == {"all_gather_into_tensor": None, "wait_tensor": None}
    assert rules_of(joint, GATHER).must_save.isdisjoint(["all_gather_into_tensor", "wait_tensor"])


@pytest.mark.parametrize(("budget", "gathers_again"), [("min", True), (UNBOUNDED, False)])
def test_a_plan_keeps_what_is_gathered_or_gathers_it_again(budget: int | str, gathers_again: bool):
    """Whatever fits the budget in less time."""
    model = optimized(Layers, budget, repeatable=GATHER)
    step(model, (torch.ones(2, 2 * SIZE),))
    gathers = [v for v in autoremat.report(model).values if "all_gather" in v.op]
    assert len(gathers) == len(model.layers)
    assert any(value.recomputes for value in gathers) == gathers_again


def test_a_reduction_runs_once():
    """It, and what waits for it."""
    found = run_once(capture(reduced, leaf(SIZE, SIZE)).prepared())
    assert found.keys() == {"all_reduce", "wait_tensor"}
    assert set(found.values()) == {"communicates with other processes"}


def test_a_reduction_runs_again_where_the_user_says_so():
    """With what waits for it; another's name changes nothing."""
    joint = capture(reduced, leaf(SIZE, SIZE)).prepared()
    marked = run_once(joint, "_c10d_functional.all_reduce")
    assert marked == {"all_reduce": None, "wait_tensor": None}
    assert None not in run_once(joint, "_c10d_functional.reduce_scatter_tensor").values()


def test_a_collective_costs_its_bytes_over_the_link():
    """A reduction goes both ways; what waits for it is free."""
    joint = capture(reduced, leaf(SIZE, SIZE)).prepared()
    sent, waiting = collectives(joint)
    costs = estimate_nodes(joint.nodes, find_spec("A100 80GB"))
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
