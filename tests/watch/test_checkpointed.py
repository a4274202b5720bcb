"""What code in eager mode saves in checkpoints: unseen in the first step, known from then on."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from autoremat import _torch
from autoremat.memory.meter import measure_peak
from autoremat.memory.storage_sizes import storage_sizes
from autoremat.watch.checkpointed import Reruns
from autoremat.watch.eager_backward import Foreseen, foresee
from autoremat.watch.eager_code import nodes_behind

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


def learned_nbytes(reruns: Reruns) -> int:
    """What the only kind of region was seen to make."""
    (layout,) = reruns._layouts.values()
    return sum({number: size for sizes in layout for number, size in sizes.items()}.values())


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
    for number in range(2):
        x = leaf * 1.0
        loss = checkpoint(lambda x: (x * leaf).exp(), x, use_reentrant=False).sum()
        foreseen = foreseen_of(loss, leaf, reruns)
        loss.backward()
        assert foreseen.is_complete == bool(number)
    assert learned_nbytes(reruns) == leaf.nbytes  # the result of `exp` alone


def test_what_goes_in_by_name_counts_as_what_goes_in():
    reruns, leaf = Reruns(), torch.rand(400, 500).requires_grad_()

    def run(x: Tensor, *, other: Tensor) -> Tensor:
        return (x * other).exp()

    for _ in range(2):
        loss = checkpoint(run, leaf * 1.0, other=leaf * 2.0, use_reentrant=False).sum()
        foreseen = foreseen_of(loss, leaf, reruns)
        loss.backward()
    assert learned_nbytes(reruns) == leaf.nbytes
    assert foreseen.first_nbytes == pytest.approx(2 * leaf.nbytes, abs=64)


def test_what_a_selective_policy_keeps_is_there_before_the_rerun():
    """It counts until the last node of the region has run: here it goes in the rerun already."""
    kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
    reruns, leaf = Reruns(), torch.rand(400, 500).requires_grad_()
    for _ in range(2):
        x = leaf * 1.0
        loss = checkpoint(lambda x: x.sin().exp().abs(), x, use_reentrant=False, context_fn=kept)
        total = loss.sum()
        foreseen = foreseen_of(total, leaf, reruns)
        del x, loss
        measured_nbytes = measure_peak(total.backward, device=CPU)
    assert foreseen.first_nbytes == pytest.approx(2 * leaf.nbytes, abs=64)  # what goes in, and sin
    assert learned_nbytes(reruns) == leaf.nbytes  # of exp, which two nodes hold
    foreseen_nbytes = foreseen.eager_peak_nbytes - foreseen.first_nbytes
    assert measured_nbytes <= foreseen_nbytes <= measured_nbytes + 1.1 * leaf.nbytes


def test_what_this_backward_does_not_reach_stays():
    """A region of two results: the caller holds the other one on."""
    reruns, leaf = Reruns(), torch.rand(400, 500).requires_grad_()

    for _ in range(2):
        result, held = checkpoint(two_results, leaf * 1.0, use_reentrant=False)
        total = result.sum()
        foreseen = foreseen_of(total, leaf, reruns)
        del result
        leaf.grad = None
        measured_nbytes = measure_peak(total.backward, device=CPU)
        del held
    assert learned_nbytes(reruns) == 3 * leaf.nbytes  # three exponentials, one of them reached
    foreseen_nbytes = foreseen.eager_peak_nbytes - foreseen.first_nbytes
    assert 0.9 * measured_nbytes <= foreseen_nbytes <= 1.2 * measured_nbytes


def two_results(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin().exp(), x.cos().exp().sin().exp().cos()


def test_what_nobody_held_when_it_was_learned_is_learned_again():
    """Three exponentials are made again where the second result is held, else one."""
    reruns, leaf = Reruns(), torch.rand(400, 500).requires_grad_()
    for holds, is_known in ((False, False), (False, True), (True, False), (True, True)):
        result, held = checkpoint(two_results, leaf * 1.0, use_reentrant=False)
        if not holds:
            del held
        total = result.sum()
        foreseen = foreseen_of(total, leaf, reruns)
        assert foreseen.is_complete == is_known
        del result
        leaf.grad = None
        measured_nbytes = measure_peak(total.backward, device=CPU)
    foreseen_nbytes = foreseen.eager_peak_nbytes - foreseen.first_nbytes
    assert 0.9 * measured_nbytes <= foreseen_nbytes <= 1.2 * measured_nbytes


def test_what_is_not_reached_counts_in_a_region_of_planned_graphs_too():
    """Nobody's plan tells of it."""
    reruns, leaf = Reruns(), torch.rand(400, 500).requires_grad_()
    for _ in range(2):
        result, _held = checkpoint(two_results, leaf * 1.0, use_reentrant=False)
        nodes = list(nodes_behind([result.grad_fn]))
        found, _, is_complete = reruns.of(nodes, set(nodes), CPU, set)
        result.sum().backward()
    assert is_complete
    (unreached,) = found[None].values()
    assert sum(unreached.values()) == 2 * leaf.nbytes


def test_regions_that_check_nothing_are_told_apart_by_what_they_make():
    """Of two that are given the same, one is 64 times as wide inside."""
    reruns, leaf = Reruns(), torch.rand(100, 8).requires_grad_()
    weights = [torch.rand(8, width) for width in (8, 512)]

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).exp().sin() @ weight.T

    for _ in range(2):
        x = leaf * 1.0
        for weight in weights:
            x = checkpoint(run, x, weight, use_reentrant=False, determinism_check="none")
        loss = x.sum()
        foreseen = foreseen_of(loss, leaf, reruns)
        leaf.grad = None
        measured_nbytes = measure_peak(loss.backward, device=CPU)
    assert foreseen.is_complete
    foreseen_nbytes = foreseen.eager_peak_nbytes - foreseen.first_nbytes
    assert 0.9 * measured_nbytes <= foreseen_nbytes <= 1.3 * measured_nbytes


def test_what_goes_in_within_a_list_is_held():
    """Autograd does not keep it: the checkpoint does."""
    reruns, leaf = Reruns(), torch.rand(400, 500).requires_grad_()

    def run(x: Tensor, others: list[Tensor]) -> Tensor:
        return (x * others[0]).exp()

    loss = checkpoint(run, leaf * 1.0, [leaf * 2.0], use_reentrant=False).sum()
    foreseen = foreseen_of(loss, leaf, reruns)
    assert foreseen.first_nbytes == pytest.approx(2 * leaf.nbytes, abs=64)


def test_what_an_earlier_backward_has_made_again_is_held():
    """As long as the nodes of the other result are."""
    reruns, leaf = Reruns(), torch.rand(400, 500).requires_grad_()
    first, second = checkpoint(two_results, leaf * 1.0, use_reentrant=False)
    before = foreseen_of(second.sum(), leaf, reruns).first_nbytes
    first.sum().backward(retain_graph=True)
    assert foreseen_of(second.sum(), leaf, reruns).first_nbytes >= before + 2 * leaf.nbytes


@pytest.mark.parametrize("options", [{"determinism_check": "none"}, {"early_stop": False}, {}])
def test_a_rerun_that_fails_ends_as_it_would(options: dict[str, Any]):
    """And the next step is learned from."""
    reruns, leaf = Reruns(), torch.rand(400, 500).requires_grad_()
    runs = 0

    def run(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        if runs == 2:
            raise torch.OutOfMemoryError("in the rerun")
        return x.sin().exp()

    def step() -> Foreseen:
        loss = checkpoint(run, leaf * 1.0, use_reentrant=False, **options).sum()
        foreseen = foreseen_of(loss, leaf, reruns)
        loss.backward()
        return foreseen

    with pytest.raises(torch.OutOfMemoryError, match="in the rerun"):
        step()
    assert not step().is_complete
    assert step().is_complete
    assert reruns._looks == 0


def test_what_a_look_does_wrong_ends_no_backward_and_is_told_by_the_next_one():
    """Once; from then on looks are taken as before, and nothing of the step is held meanwhile."""
    reruns, leaf = Reruns(), torch.rand(400, 500).requires_grad_()
    seen: list[weakref.ref[Tensor]] = []

    def run(x: Tensor) -> Tensor:
        inner = x.sin()
        seen.append(weakref.ref(inner))
        return (inner.exp() * x.cos()).sin()

    def find_known() -> set[int]:
        raise RuntimeError("a defect")

    def look(loss: Tensor, find: Callable[[], set[int]]) -> None:
        nodes = list(nodes_behind([loss.grad_fn]))
        reruns.of(nodes, (), CPU, find)

    def loss_of_step() -> Tensor:
        return checkpoint(run, leaf * 1.0, use_reentrant=False).sum()

    loss = loss_of_step()
    look(loss, find_known)
    loss.backward()
    assert leaf.grad is not None
    assert [reference() for reference in seen] == [None, None]
    with pytest.raises(RuntimeError, match="a defect"):
        look(loss_of_step(), set)
    loss = loss_of_step()
    look(loss, set)
    loss.backward()
    assert foreseen_of(loss_of_step(), leaf, reruns).is_complete


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_code_in_a_region_that_is_looked_at_runs_as_it_was_compiled():
    """In eager mode it saves other values, of which some may look alike."""
    torch._dynamo.reset()
    reruns, leaf = Reruns(), torch.rand(400, 500).requires_grad_()
    by_compiler = 0

    def count(graph: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal by_compiler
            by_compiler += 1
            return graph(*args)

        return run

    compiled = torch.compile(waves, backend=count)
    loss = checkpoint(compiled, leaf * 1.0, use_reentrant=False).sum()
    assert not foreseen_of(loss, leaf, reruns).is_complete
    loss.backward()
    assert by_compiler == 2


def test_nothing_is_left_of_a_look():
    """A region that never runs again is gone as soon as its graph is, without a collection."""
    reruns, leaf = Reruns(), torch.rand(400, 500).requires_grad_()
    loss = checkpoint(waves, leaf * 1.0, use_reentrant=False).sum()
    assert not foreseen_of(loss, leaf, reruns).is_complete
    (found, *_), *_ = _torch.checkpoints_of(loss.grad_fn.next_functions[0][0])
    frame = weakref.ref(found._frame)
    del loss, found
    assert frame() is None
