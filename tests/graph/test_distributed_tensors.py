"""DTensors: models whose parameters are spread over processes, here over one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import autoremat
from autoremat.memory.meter import resident_nbytes
from autoremat.memory.storage_sizes import storages_of
from tests.process_group import one_process  # noqa: F401
from tests.tiny import WIDTH, Chain, rows
from tests.training import UNBOUNDED, make_seeded

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="needs torch.distributed")


def sharded(model: nn.Module) -> nn.Module:
    """FSDP2: each layer by itself, then the rest."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer, mesh=mesh())
    return fully_shard(model, mesh=mesh())


def parallel(model: nn.Module) -> nn.Module:
    """Tensor parallelism: every layer split by its columns."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    plan = {f"layers.{number}": ColwiseParallel() for number in range(len(model.layers))}
    return parallelize_module(model, mesh(), plan)


def mesh() -> distributed.DeviceMesh:
    return distributed.init_device_mesh("cpu", (1,))


def distributed_tensor() -> Tensor:
    from torch.distributed.tensor import Replicate, distribute_tensor

    return distribute_tensor(rows(), mesh(), [Replicate()])


def test_the_storage_of_a_dtensor_is_that_of_its_local_part():
    """Its device mesh, which is no tensor, has none."""
    (storage,) = storages_of(distributed_tensor())
    assert storage.nbytes() == rows().nbytes


class Wrapping(Tensor):
    """A tensor made of another one, of one that is not there, and of a number."""

    inner: Tensor
    missing: Tensor | None
    scale: float

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapping:
        """Around a tensor."""
        wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.inner, wrapper.missing, wrapper.scale = inner, None, 1.0
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        raise NotImplementedError(function)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner", "missing", "scale"], None


def test_what_a_wrapper_lacks_has_no_storage():
    """Wrappers may be nested."""
    x = rows()
    assert [s.nbytes() for s in storages_of(Wrapping(Wrapping(x)))] == [x.nbytes]


@pytest.mark.thorough
def test_the_peak_is_measured_beside_a_dtensor():
    """Of any step, while one is alive somewhere."""
    alive = distributed_tensor()
    assert autoremat.measure_peak(lambda: torch.ones(1024), device="cpu") == 4096
    assert alive.shape == rows().shape


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("spread", "told"),
    [(parallel, nullcontext()), (sharded, pytest.warns(autoremat.FallbackWarning, match="AR105"))],
    ids=["parallel", "sharded"],
)
def test_a_model_of_dtensors_is_verified(spread: Callable[[nn.Module], nn.Module], told: Any):
    """Gradients, which are DTensors, are eager mode's; where Dynamo skips a model, that is told."""
    torch._dynamo.reset()
    model = spread(make_seeded(Chain))
    autoremat.optimize(model, UNBOUNDED, compiler="eager", verbose=False, time_limit=1.0)
    with told:
        found = autoremat.verify(model, rows())
    assert found.loss_agrees
    assert found.gradients_agree
    assert resident_nbytes(model) == 6 * (WIDTH + 1) * WIDTH * 4
    assert not any(found.code == "AR101" for found in autoremat.report(model).fallbacks)
