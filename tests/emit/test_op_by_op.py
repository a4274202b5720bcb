"""What runs op by op, where torch's tracing is wrong about an operation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import autoremat
from autoremat.emit.op_by_op import compile_eager
from tests.tiny import WIDTH, sequences
from tests.training import make_seeded


class Transposed(nn.Module):
    """An activation whose gradient comes transposed, behind a layer whose backward views it."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.into(x)).transpose(1, 2).contiguous().cumsum(-1)
        return self.out(x.transpose(1, 2)).square().mean()


@pytest.mark.parametrize("through", ["optimize", "backend"])
@pytest.mark.parametrize("activation", [F.softplus, F.relu6, F.hardswish, F.hardsigmoid])
def test_strides_that_tracing_has_wrong_end_no_step(
    activation: Callable[[Tensor], Tensor], through: str
):
    """Gradients are eager mode's; torch's `aot_eager` raises an error."""
    plain, planned = (make_seeded(lambda: Transposed(activation)) for _ in range(2))
    options = {"compiler": "eager", "verbose": False}
    if through == "optimize":
        autoremat.optimize(planned, "1GB", **options)
    else:
        planned.compile(backend="autoremat", options={"budget": "1GB", **options})
    for model in (plain, planned):
        model(sequences()).backward()
    for mine, theirs in zip(planned.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)


CONVERTED = torch.ops.prims.convert_element_type.default
SIZE = torch.ops.aten.sym_size.int


def traced(function: Callable[[Tensor], object], x: Tensor) -> fx.GraphModule:
    """A graph for any sizes, as torch traces it."""
    return make_fx(function, tracing_mode="symbolic")(x)


def targets(module: fx.GraphModule) -> set[object]:
    return {node.target for node in module.graph.nodes if node.op == "call_function"}


def test_what_torch_wrote_in_python_runs_as_operations_of_cpp():
    """Conversions and sizes, of which graphs for sizes that vary have many."""

    def scaled(x: Tensor) -> Tensor:
        half = CONVERTED(x, torch.bfloat16)
        return half.new_zeros(x.shape[0] * 2, x.shape[1]) + CONVERTED(half, torch.float32).sum()

    x = torch.randn(3, 4)
    module = traced(scaled, x)
    assert {CONVERTED, SIZE} <= targets(module)
    run = compile_eager(module, [x])
    assert not {CONVERTED, SIZE} & targets(module)
    assert all(callable(target) for target in targets(module))  # who runs it again calls them
    for rows in (3, 5):
        given = torch.randn(rows, 4)
        assert torch.equal(run([given]), scaled(given))


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(4, 5),
        torch.randn(4, 5).t(),
        torch.randn(4, 1).expand(4, 5),
        torch.randn(8, 9)[:, ::2],
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 4, 5)[:, :2].permute(0, 2, 1, 3),
        torch.tensor(1.0),
    ],
    ids=lambda value: f"{tuple(value.shape)}, {value.stride()}",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16, torch.bool])
def test_conversions_are_laid_out_as_torchs_are(value: Tensor, dtype: torch.dtype):
    """Copies in memory of their own, also where nothing has to be converted."""
    module = fx.symbolic_trace(lambda x: CONVERTED(x, dtype))
    mine, theirs = compile_eager(module, [value])([value]), CONVERTED(value, dtype)
    assert CONVERTED not in targets(module)
    assert mine.stride() == theirs.stride()
    assert mine.dtype == theirs.dtype
    assert torch.equal(mine, theirs)
    own, given = (one.untyped_storage() for one in (mine, value))
    assert own.data_ptr() != given.data_ptr()
    assert own.nbytes() == theirs.untyped_storage().nbytes()
