"""Memory as the allocator sees it, and what an optimizer adds."""

from __future__ import annotations

import copy
import dataclasses
import threading
import warnings

import pytest
import torch
from torch import nn

from autoremat.memory.meter import measure_peak, memory_timeline, resident_nbytes, with_peak
from autoremat.memory.optimizer_memory import OptimizerFootprint, optimizer_footprint
from autoremat.memory.storage_sizes import storages_nbytes

KIB = 1024


def block(kib: int) -> torch.Tensor:
    """A tensor of that many KiB."""
    return torch.empty(kib * KIB, dtype=torch.uint8)


def small_model() -> nn.Module:
    """Matrices, vectors and more than one size, so that no two storages are confused."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64, bias=False), nn.LayerNorm(64)
    )


def trained_once(model: nn.Module) -> nn.Module:
    """The model with gradients in place."""
    model(torch.randn(4, 128)).sum().backward()
    return model


@pytest.mark.thorough
def test_the_peak_is_the_highest_sum_of_live_bytes():
    """4 and 8 KiB together, then 2 KiB alone: the peak is 12 KiB."""

    def step():
        one, two = block(4), block(8)
        del one, two
        return block(2)

    assert measure_peak(step, device="cpu") == 12 * KIB
    assert memory_timeline(step) == (0, 4096, 12288, 8192, 0, 2048)


def test_a_result_counts_while_it_lives():
    """What the step returns is alive until the measuring stops."""
    assert memory_timeline(lambda: block(3))[-1] == 3 * KIB


def test_memory_from_before_counts_as_negative_when_freed():
    """The peak is relative to the start, so freeing old memory makes room."""
    held = [block(16)]

    def step():
        held.clear()
        return block(10)

    assert memory_timeline(step) == (0, -16 * KIB, -6 * KIB)
    held.append(block(16))
    assert measure_peak(step, device="cpu") == 0


def test_memory_at_the_address_of_a_recorded_block_counts_once():
    """The allocator remembers the size of what an earlier session saw there, and tells that."""
    found = next(filter(None, (at_the_address_of_a_recorded_block() for _ in range(100))), None)
    if found is None:
        pytest.skip("The allocator of this system did not use an address again.")
    nbytes = found[0].nbytes
    assert memory_timeline(found.clear) == (0, -nbytes)


def at_the_address_of_a_recorded_block() -> list[torch.Tensor]:
    """A tensor that lies where a larger one was freed after it was recorded; maybe none."""
    recorded, others = [], []
    memory_timeline(lambda: recorded.append(block(16)))
    address = recorded[0].data_ptr()
    others.append(block(16))
    recorded.clear()
    for nbytes in range(16 * KIB - 8, 8 * KIB, -8):
        others.append(torch.empty(nbytes, dtype=torch.uint8))
        if others[-1].data_ptr() == address:
            return others[-1:]
    return []


def test_memory_that_two_storages_share_goes_with_the_last():
    """As that of a tensor and of what NumPy has made of it."""
    whole = block(16)
    held = [torch.from_numpy(whole.numpy())]
    assert memory_timeline(held.clear) == (0,)
    both = [whole, torch.from_numpy(whole.numpy())]
    del whole
    assert memory_timeline(both.clear) == (0, -16 * KIB)


def test_measuring_copies_nothing_that_is_copied_on_write():
    """The step does, when it writes."""
    first = block(16)
    second = torch._lazy_clone(first)
    assert measure_peak(lambda: second.fill_(1), device="cpu") == 16 * KIB


def test_tensors_without_memory_may_be_there():
    """Such as masked ones, whose data are other tensors."""
    mask = torch.ones(4, dtype=torch.bool)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # masked tensors are a prototype
        held = torch.masked.masked_tensor(torch.randn(4), mask)
    assert measure_peak(lambda: block(1), device="cpu") == KIB
    assert held.shape == (4,)


def test_a_storage_that_is_emptied_counts_once():
    """As FSDP frees what it has gathered, before the tensor goes."""
    held = []
    memory_timeline(lambda: held.append(block(16)))

    def step():
        held[0].untyped_storage().resize_(0)
        held.clear()

    assert memory_timeline(step) == (0, -16 * KIB)


@pytest.mark.thorough
def test_gradients_dropped_by_the_step_make_room():
    """A step that begins with `zero_grad` does not pay for two sets of gradients."""
    model, x = nn.Linear(256, 256), torch.ones(1, 256)
    params = sum(p.nbytes for p in model.parameters())

    def step():
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()

    step()
    first = memory_timeline(step)
    assert min(first) <= -params
    assert -params // 16 <= first[-1] <= params // 16
    # Now the gradients come from a recorded step, whose frees the allocator reports itself.
    again = memory_timeline(step)
    assert again == first


@pytest.mark.thorough
def test_garbage_from_before_is_collected_before():
    """A reference cycle left behind does not lower the step's curve."""
    cycle = [block(64)]
    cycle.append(cycle)
    del cycle

    def step():
        import gc

        gc.collect()
        return block(1)

    assert memory_timeline(step) == (0, KIB)


@pytest.mark.thorough
def test_a_raising_step_stops_the_profiler():
    """The step's own exception comes out, and measuring works afterwards."""

    def step():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure_peak(step, device="cpu")
    assert measure_peak(lambda: block(1), device="cpu") == KIB


@pytest.mark.thorough
def test_nested_measuring_says_what_is_wrong():
    """Profiler sessions do not nest, and the outer one survives the refusal."""
    with pytest.raises(RuntimeError, match="another torch profiler is recording"):
        measure_peak(lambda: measure_peak(lambda: block(1), device="cpu"), device="cpu")
    assert measure_peak(lambda: block(1), device="cpu") == KIB


def test_unknown_devices_are_refused():
    """Only CPU and CUDA have an allocator that can be read."""
    with pytest.raises(ValueError, match="cpu and cuda"):
        measure_peak(lambda: None, device="meta")


def test_a_multilayer_step_peaks_where_arithmetic_says():
    """Linear, ReLU, Linear, sum: at the second product's gradient, by hand.

    Live at the highest point: the two activations h and r of the forward (h is not kept by ReLU,
    which keeps its result), the gradient of r, and the weight gradients as they come.
    """
    rows, width = 256, 128
    one, two = (
        torch.randn(width, width, requires_grad=True),
        torch.randn(width, 1, requires_grad=True),
    )
    x = torch.randn(rows, width)

    def step():
        hidden = torch.relu(x @ one)
        (hidden @ two).sum().backward()
        one.grad = two.grad = None

    step()
    activation, weight = 4 * rows * width, 4 * width * width
    # r, the gradient of r and the gradient of h; then h's gradient and the first weight's.
    expected = 3 * activation + 4 * width
    peak = measure_peak(step, device="cpu")
    assert expected <= peak <= expected + weight // 8


def test_resident_memory_counts_each_storage_once():
    """Tied weights, views of a batch and a buffer: one count for each storage."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(8, 8))
    model.tied = nn.Parameter(model.weight.data)
    model.register_buffer("steps", torch.zeros(4, dtype=torch.int64))
    batch = torch.zeros(32)
    assert resident_nbytes(model) == 256 + 32
    assert resident_nbytes(model, {"x": batch, "y": (batch[:4], batch.view(4, 8))}) == 288 + 128
    model.weight.grad = torch.zeros(8, 8)
    assert resident_nbytes(model) == 288 + 256


@dataclasses.dataclass
class Batch:
    """A user's container that torch's pytree does not know."""

    ids: torch.Tensor
    mask: torch.Tensor | None = None


def test_resident_memory_looks_into_containers():
    """Dataclasses and Hugging Face outputs are opened."""
    outputs = pytest.importorskip("transformers.modeling_outputs")
    model = nn.Identity()
    assert resident_nbytes(model, [Batch(torch.zeros(8))]) == 32
    assert resident_nbytes(model, outputs.BaseModelOutput(torch.zeros(4))) == 16


def test_resident_memory_counts_optimizer_state():
    """Two moments and a step count for each parameter, once they exist."""
    model = trained_once(nn.Linear(128, 4))
    optimizer = torch.optim.Adam(model.parameters())
    before = resident_nbytes(model, optimizer=optimizer)
    optimizer.step()
    params = 4 * (128 * 4 + 4)
    assert resident_nbytes(model, optimizer=optimizer) - before == 2 * params + 2 * 4


def test_other_devices_are_left_out_and_cuda_is_rounded():
    """A fake tensor stands for one on a GPU that need not exist."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        tensors = [torch.empty(3, device="cuda"), torch.empty(3)]
        assert storages_nbytes(tensors, torch.device("cuda")) == 512
        assert storages_nbytes(tensors, torch.device("cpu")) == 12


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd_nesterov": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adamw_single": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adafactor": torch.optim.Adafactor,
    "nadam": torch.optim.NAdam,
    "tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), foreach=False),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_footprint_is_what_the_first_step_allocates(name):
    """New state to the byte, and the peak up to a few scalars."""
    model = trained_once(small_model())
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    found = optimizer_footprint(optimizer)
    before = resident_nbytes(model, optimizer=optimizer)
    peak = measure_peak(optimizer.step, device="cpu")
    assert found.state_nbytes == resident_nbytes(model, optimizer=optimizer) - before
    assert found.state_nbytes + found.transient_nbytes == pytest.approx(peak, abs=64)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["sgd_momentum", "adamw", "adamw_foreach", "adafactor"])
def test_state_that_exists_is_not_created_again(name):
    """After a step only the transient remains."""
    model = trained_once(small_model())
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    optimizer.step()
    found = optimizer_footprint(optimizer)
    assert found.state_nbytes == 0
    assert found.transient_nbytes == pytest.approx(
        measure_peak(optimizer.step, device="cpu"), abs=64
    )


def test_sizing_an_optimizer_changes_nothing():
    """Parameters, gradients, state, hooks and the scheduler's step stay as they were."""
    model = trained_once(small_model())
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    hooked: list[bool] = []
    optimizer.register_step_pre_hook(lambda *_: hooked.append(True))
    weights = copy.deepcopy(model.state_dict())
    assert optimizer_footprint(optimizer).state_nbytes > 0
    assert not hooked
    assert not optimizer.state
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())
    optimizer.step()
    scheduler.step()
    assert hooked == [True]


@pytest.mark.thorough
def test_sizing_an_optimizer_takes_no_memory_of_the_models_size():
    """The copy is fake: real allocations stay far below the parameters'."""
    model = trained_once(small_model())
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    params = sum(p.nbytes for p in model.parameters())
    assert measure_peak(lambda: optimizer_footprint(optimizer), device="cpu") < params // 20


def test_gradients_need_not_exist_yet():
    """Before the first backward every trainable parameter is taken to have a gradient."""
    model = small_model()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainable = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert optimizer_footprint(optimizer).state_nbytes == trainable


def test_what_cannot_be_run_on_fakes_is_estimated():
    """An optimizer that needs a closure gets a figure marked as not measured."""
    model = small_model()
    params = sum(p.nbytes for p in model.parameters())
    found = optimizer_footprint(torch.optim.LBFGS(model.parameters()))
    assert found == OptimizerFootprint(2 * params, 2 * params)


@pytest.mark.thorough
def test_what_the_backward_allocates_is_seen():
    """Autograd runs the CPU backward in the calling thread, whose events are recorded."""
    x = torch.zeros(KIB, requires_grad=True)
    caller = threading.get_ident()
    ran_in: list[int] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.sum()

        @staticmethod
        def backward(ctx, grad):
            ran_in.append(threading.get_ident())
            return grad.expand(KIB) + 0

    def step():
        Probe.apply(x).backward()

    peak = measure_peak(step, device="cpu")
    assert ran_in == [caller]
    assert peak >= 4 * KIB


def test_a_call_may_be_watched_without_what_the_user_profiles():
    """What it returns, and the most that it had; nothing is known while somebody records."""

    def run() -> int:
        held = block(64)
        block(32)
        return held.numel()

    cpu = torch.device("cpu")
    assert with_peak(run, cpu) == (64 * KIB, 96 * KIB)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert with_peak(run, cpu) == (64 * KIB, 0)
