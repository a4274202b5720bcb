"""Products of groups of rows: what they compute, and on which offsets they are timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoremat.cost.calls import Call, TensorSpec, tensor_spec
from autoremat.cost.grouped import even_offsets, is_called_grouped
from autoremat.cost.made_up_inputs import draw_inputs, runs_alone
from autoremat.cost.work import flop_count
from autoremat.graph.constraints import find_constraints
from autoremat.graph.random_draws import Replays
from autoremat.graph.storages import find_storages
from autoremat.inductor.library_calls import group_ends
from tests.joint_graphs import CPU, capture, leaf

ROWS, DEPTH, COLUMNS, GROUPS = 96, 16, 24, 4
GROUPED = torch.ops.aten._grouped_mm.default


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    """The layout of a contiguous tensor."""
    return tensor_spec(torch.empty(shape, dtype=dtype))


def call(left: tuple[int, ...], right: tuple[int, ...], target: Any = GROUPED) -> Call:
    """A grouped product of factors of these shapes."""
    ends = spec(GROUPS, dtype=torch.int32)
    args = (spec(*left), spec(*right), ends)
    return Call(target, args, {}, (spec(ROWS, COLUMNS),), ())


@pytest.mark.parametrize(
    ("left", "right", "flops"),
    [
        ((ROWS, DEPTH), (GROUPS, DEPTH, COLUMNS), 2 * ROWS * DEPTH * COLUMNS),  # rows of groups
        ((DEPTH, ROWS), (ROWS, COLUMNS), 2 * ROWS * DEPTH * COLUMNS),  # sums over groups
        ((GROUPS, ROWS, DEPTH), (DEPTH, COLUMNS), 2 * ROWS * DEPTH * COLUMNS),  # columns of groups
        ((GROUPS, ROWS, DEPTH), (GROUPS, DEPTH, COLUMNS), 2 * GROUPS * ROWS * DEPTH * COLUMNS),
    ],
)
def test_each_row_is_multiplied_once(left: tuple[int, ...], right: tuple[int, ...], flops: int):
    """Whatever group it is in; torch has no formula for it."""
    assert flop_count(call(left, right)) == flops


@pytest.mark.parametrize(
    ("left", "right", "last"),
    [
        ((ROWS, DEPTH), (GROUPS, DEPTH, COLUMNS), ROWS),
        ((DEPTH, ROWS), (ROWS, COLUMNS), ROWS),
        ((GROUPS, ROWS, DEPTH), (DEPTH, COLUMNS), COLUMNS),
    ],
)
def test_made_up_groups_have_all_rows(left: tuple[int, ...], right: tuple[int, ...], last: int):
    """They begin where a GPU's kernel can read at once, and none ends beyond the last row."""
    ends = draw_inputs(call(left, right)).args[2]
    assert ends.dtype == torch.int32
    assert ends.tolist() == [last // GROUPS // 16 * 16 * n for n in range(1, GROUPS)] + [last]


def test_uneven_rows_are_all_in_a_group():
    """Where their number is no multiple of that of the groups."""
    ends = even_offsets(spec(3, dtype=torch.int64), (100, DEPTH), (3, DEPTH, COLUMNS))
    assert ends.tolist() == [32, 64, 100]


def test_generated_code_names_them():
    """As it calls operators."""
    assert is_called_grouped("torch.ops.aten._grouped_mm.default")
    assert is_called_grouped("torch.ops.transformers.grouped_mm_fallback.default")
    assert not is_called_grouped("torch.ops.aten.mm.default")
    assert is_called_grouped("extern_kernels._grouped_mm")
    assert not is_called_grouped("extern_kernels.mm")
    assert not is_called_grouped("assert_size_stride")


@pytest.mark.parametrize(
    "text",
    [
        "extern_kernels._grouped_mm(rows, reinterpret_tensor(weight, (4, 16, 24), (384, 1, 16), 0),"
        " ends, out_dtype=None)",
        "torch.ops.transformers.grouped_mm_fallback.default(rows, weight, ends)",
    ],
)
def test_generated_code_is_timed_on_groups_with_rows(text: str):
    """Whatever view of a buffer it is given."""
    layouts = {"rows": spec(ROWS, DEPTH), "weight": spec(GROUPS, COLUMNS, DEPTH)}
    layouts["ends"] = spec(GROUPS, dtype=torch.int32)
    assert group_ends(text, layouts)["ends"].tolist() == [16, 32, 48, ROWS]
    with pytest.raises(ValueError, match="groups"):
        group_ends(text.replace("ends", "ends.view(4)"), layouts)


def test_what_transformers_computes_experts_by_may_run_again():
    """It is an operator of its own, and a loop over products."""
    pytest.importorskip("transformers.integrations.moe")
    product = torch.ops.transformers.grouped_mm_fallback
    ends = torch.tensor([1, 4], dtype=torch.int32)

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return product(x.sin(), weight, ends).sin().sum()

    joint = capture(step, leaf(4, 3), leaf(2, 3, 5)).prepared()
    storages = find_storages(joint.nodes, CPU)
    constraints = find_constraints(joint, storages, replays=Replays(states=True))
    assert not constraints.run_once
    shapes = (ROWS, DEPTH), (GROUPS, DEPTH, COLUMNS)
    one = call(*shapes, product.default)
    assert runs_alone(one)
    inputs = draw_inputs(one)
    assert product(*inputs.args).abs().sum() > 0
    gradient = torch.ops.transformers.grouped_mm_fallback_backward.default
    assert flop_count(call(*shapes, gradient)) == 2 * flop_count(one)
