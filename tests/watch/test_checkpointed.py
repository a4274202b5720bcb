"""What code in eager mode saves in checkpoints: unseen in the first step, known from then on."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from autoremat import _torch
from autoremat.memory.meter import measure_peak, storage_sizes
from autoremat.watch.checkpointed import Reruns
from autoremat.watch.eager_backward import Foreseen, foresee

CPU = torch.device("cpu")


def waves(x: Tensor) -> Tensor:
    """Saves three tensors, one of them for two nodes."""
    return (x.sin().exp() * x.cos()).sin()


def layer(x: Tensor) -> Tensor:
    """Saves views, and twice the same storage."""
    y = x.reshape(-1, 50).softmax(-1)
    return (y * y).reshape(x.shape).tanh()


def nested(x: Tensor) -> Tensor:
    """A checkpoint within the checkpoint."""
    return checkpoint(waves, x.sin(), use_reentrant=False).cos()


def foreseen_of(result: Tensor, leaf: Tensor, reruns: Reruns) -> Foreseen:
    return foresee(
        [result],
        [],
        known=set(storage_sizes([leaf, result], CPU)),
        saved_so_far={},
        device=CPU,
        keeps_graph=False,
        find_remade=lambda nodes, planned: reruns.of(
            nodes, planned, CPU, lambda: set(storage_sizes([leaf], CPU))
        ),
    )


@pytest.mark.parametrize("run", [waves, layer])
def test_what_a_region_holds_again_is_known_once_one_alike_has_run(run: Callable[..., Tensor]):
    """The first two regions are alike, so what the first rerun shows holds for both."""
    reruns, leaf = Reruns(), torch.rand(400, 500).requires_grad_()

    def step() -> tuple[int, int]:
        x = leaf * 1.0
        for _ in range(2):
            x = checkpoint(run, x, use_reentrant=False)
        loss = x.sum()
        foreseen = foreseen_of(loss, leaf, reruns)
        leaf.grad = None
        measured_nbytes = measure_peak(loss.backward, device=CPU)
        return foreseen.eager_peak_nbytes - foreseen.first_nbytes, measured_nbytes

    unseen_nbytes, _ = step()
    foreseen_nbytes, measured_nbytes = step()
    assert unseen_nbytes < measured_nbytes
    assert 0.97 * measured_nbytes <= foreseen_nbytes <= 1.1 * measured_nbytes


def test_regions_within_regions_are_each_of_a_kind():
    """The inner one runs again within the outer one's rerun, and by itself."""
    reruns, leaf = Reruns(), torch.rand(400, 500).requires_grad_()
    for _ in range(3):
        loss = checkpoint(nested, leaf * 1.0, use_reentrant=False).sum()
        foreseen = foreseen_of(loss, leaf, reruns)
        leaf.grad = None
        measured_nbytes = measure_peak(loss.backward, device=CPU)
    foreseen_nbytes = foreseen.eager_peak_nbytes - foreseen.first_nbytes
    assert 0.9 * measured_nbytes <= foreseen_nbytes <= 1.4 * measured_nbytes


def test_what_is_no_work_of_the_region_counts_elsewhere():
    """A parameter, and the tensor that goes in."""
    reruns, leaf = Reruns(), torch.rand(400, 500).requires_grad_()
    for _ in range(2):
        x = leaf * 1.0
        loss = checkpoint(lambda x: x * leaf, x, use_reentrant=False).sum()
        foreseen = foreseen_of(loss, leaf, reruns)
        loss.backward()
    assert foreseen.remade_nbytes == 0


def test_nothing_is_left_of_a_look():
    """A region that never runs again is gone as soon as its graph is, without a collection."""
    reruns, leaf = Reruns(), torch.rand(400, 500).requires_grad_()
    loss = checkpoint(waves, leaf * 1.0, use_reentrant=False).sum()
    foreseen_of(loss, leaf, reruns)
    (found, _), *_ = _torch.checkpoints_of(loss.grad_fn.next_functions[0][0])
    frame = weakref.ref(found._frame)
    del loss, found
    assert frame() is None
