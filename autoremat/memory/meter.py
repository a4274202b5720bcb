"""Memory as it really is: the peak of a step, what is resident, what an optimizer adds.

Enters: a callable, a module or an optimizer. Leaves: bytes. Guarantees: the measured peak is
relative to what was allocated when the callable started, frees of older memory counted as
negative; storages are counted once; neither model nor optimizer is changed, and sizing an
optimizer allocates no memory of the model's size.

On CPU the allocator's events are read from a torch profiler session. They miss what threads
started by the user allocate, memory that a library takes from elsewhere than torch's allocator
(that of a NumPy array counts where it ends), and the free of older memory that Python cannot see
(activations of a forward that ran before the step; DistributedDataParallel's first buckets, in the
second step, which makes them anew), which makes the figure too high. On CUDA the
allocator's statistics are read, and its peak statistics reset.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch.profiler import record_function

from autoremat._torch import (
    MemoryEvent,
    address_of,
    memory_events,
    memory_events_of,
    own_gradients,
    profiler_is_active,
    profiler_warms_up,
    real_execution,
    recording_memory,
    sharded_units,
    storage_identity,
    tensors_of_units,
    waiting_gradients,
)
from autoremat.memory.optimizers import (
    layers_of,
    parameters_of,
    tensors_beside_state,
    tensors_in_state,
)
from autoremat.memory.storage_sizes import counted_apart, storages_of, tensors_in
from autoremat.reporting.resident import ResidentParts

Device = torch.device | str | None
T = TypeVar("T")

_PREFIX = "autoremat::meter::"
_MARK = f"{_PREFIX}step"
_FREED = f"{_PREFIX}freed::"
_ROUNDS = 4  # of garbage that holds garbage; what makes some anew without end is left


_until_compile: list[ExitStack] = []
_compiles = 0  # that have begun
_taking = 0  # blocks whose peak is taken from CUDA's allocator, one within the other


def peaks_are_taken() -> bool:
    """Whether somebody's figure comes of CUDA's peak statistics now: nobody else may reset them."""
    return _taking > 0


@contextmanager
def _taking_peaks(device: torch.device) -> Iterator[None]:
    """From a reset on to what is read."""
    global _taking
    torch.cuda.reset_peak_memory_stats(device)
    _taking += 1
    try:
        yield
    finally:
        _taking -= 1


def measure_peak(step: Callable[[], object], *, device: Device = None) -> int:
    """Highest number of bytes allocated above what was allocated when the step started.

    The step's result is alive until the end and therefore counts. Call the step once or twice
    before, so that compilation, lazy state and library caches do not count. Where gradients and
    optimizer state exist already, they are not part of the figure. On the CPU the second step of
    DistributedDataParallel seems to take more, by the bytes of all gradients: it lets go of its
    first buckets before it makes others, which nobody sees.

    Args:
        step: the callable; it runs once.
        device: "cpu" or "cuda"; the accelerator if there is one, else the CPU.

    Raises:
        ValueError: the device is neither CPU nor CUDA.
        RuntimeError: on CPU, another torch profiler is recording.
    """
    held: list[object] = []
    with measuring_peak(device) as found:
        held.append(step())
    return found[0]


@contextmanager
def measuring_peak(device: Device = None, *, until_compile: bool = False) -> Iterator[list[int]]:
    """The same of the block inside: its peak is in the list once the block is over.

    Args:
        device: as for `measure_peak`.
        until_compile: whether nothing is measured of a block in which a graph is compiled: the
            figure would be that of compiling.

    Raises:
        ValueError: as `measure_peak` does.
        RuntimeError: the same.
    """
    found, peaks = list[int](), list[int]()
    with ExitStack() as block:
        block.enter_context(_noting_peak(_device(device), peaks))
        if until_compile:
            _until_compile.append(block)
        yield found
        is_whole = not until_compile or block in _until_compile
        _until_compile.clear()
    found += peaks if is_whole else []


def compile_begins() -> None:
    """A graph is compiled now: blocks that are measured until then are over."""
    global _compiles
    _compiles += 1
    while _until_compile:
        _until_compile.pop().close()


def compiles_begun() -> int:
    """How often a graph of anybody's was compiled: what that takes is of no step."""
    return _compiles


@contextmanager
def _noting_peak(device: torch.device, peaks: list[int]) -> Iterator[None]:
    if device.type == "cpu":
        timeline: list[int] = []
        with _recorded(timeline):
            yield
        peaks.append(max(timeline))
        return
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    with _taking_peaks(device):
        yield
    torch.cuda.synchronize(device)
    peaks.append(torch.cuda.max_memory_allocated(device) - before)


def with_peak(run: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """What a call returns, and the most that it had allocated, compiled code of it included.

    No statistics of the user's are reset, and no session is disturbed: 0 where another profiler is
    recording, or where the process has taken more on a GPU before.
    """
    held: list[T] = []
    if device.type == "cuda":
        before, highest = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated
        highest_before = highest(device)
        held.append(run())
        return held.pop(), highest(device) - before if highest(device) > highest_before else 0
    if profiler_is_active():
        return run(), 0
    events = memory_events_of(lambda: held.append(run()), _PREFIX)
    return held.pop(), max(accumulate((event.nbytes for event in events), initial=0))


@dataclasses.dataclass(frozen=True)
class CudaPeaks:
    """What torch's statistics of CUDA's allocator say of steps.

    Attributes:
        before_nbytes: allocated when the steps began.
        allocated_nbytes: most that was allocated, that included.
        reserved_nbytes: most that was taken from the device.
    """

    before_nbytes: int
    allocated_nbytes: int
    reserved_nbytes: int


def cuda_peaks(
    step: Callable[[], object], device: torch.device, *, steps: int = 1
) -> CudaPeaks | None:
    """The peaks of steps alone; None where the allocator is not CUDA's, and nothing is run.

    What compiling and measuring took goes back to the device first.
    """
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    before_nbytes = torch.cuda.memory_allocated(device)
    with _taking_peaks(device):
        for _ in range(steps):
            step()
    allocated_nbytes = torch.cuda.max_memory_allocated(device)
    return CudaPeaks(before_nbytes, allocated_nbytes, torch.cuda.max_memory_reserved(device))


def memory_timeline(step: Callable[[], object], *, device: Device = "cpu") -> tuple[int, ...]:
    """Bytes allocated above the start, after each allocation and each free of a step on CPU.

    The first entry is 0, the start; entries are negative where the step has freed more than it
    has allocated.

    Raises:
        ValueError: the device is not the CPU; CUDA's allocator keeps a peak but no curve.
        RuntimeError: another torch profiler is recording.
    """
    device = _device(device)
    if device.type != "cpu":
        raise ValueError(f"A memory timeline is available on cpu, not on {device}.")
    timeline: list[int] = []
    with _recorded(timeline) as held:
        held.append(step())
    return tuple(timeline)


@contextmanager
def _recorded(timeline: list[int]) -> Iterator[list[object]]:
    """The timeline of the block inside; what it hands over is freed as soon as it is over."""
    if profiler_is_active() or profiler_warms_up():
        raise RuntimeError(
            "Memory cannot be measured while another torch profiler is recording, because "
            "sessions do not nest. Measure outside the profiled region."
        )
    _collect_garbage()  # else it would be freed at some moment of the step and lower the curve
    older = _by_address(_cpu_storages())
    watched = [_watch_free(at, storage) for at, found in older.items() for storage in found]
    blocks = {at: (max(s.nbytes() for s in found), len(found)) for at, found in older.items()}
    older.clear()
    try:
        with recording_memory() as session:
            held: list[object] = []
            with record_function(_MARK):
                yield held
            held.clear()
    finally:
        for finalizer in watched:
            finalizer.detach()
    deltas = _cpu_deltas(memory_events(session, _PREFIX), blocks)
    timeline.extend(accumulate(deltas, initial=0))


def _collect_garbage() -> None:
    """All of it: what autograd's graphs hold becomes garbage when they have gone."""
    for _ in range(_ROUNDS):
        if not gc.collect():
            return


def _cpu_storages() -> Iterator[torch.UntypedStorage]:
    """Storages on the CPU that Python can see: those of all tensors and of their gradients."""
    for thing in gc.get_objects():
        # `isinstance` would ask proxies for their class and run their code.
        if not issubclass(type(thing), torch.Tensor):
            continue
        try:
            tensors = [thing, thing.grad] if thing.is_leaf and thing.requires_grad else [thing]
            storages = [s for t in tensors if t is not None for s in storages_of(t)]
        except (RuntimeError, NotImplementedError):
            # Half-dead and functional tensors have no storage to show.
            continue
        yield from (s for s in storages if s.device.type == "cpu" and s.nbytes() > 0)


def _by_address(
    storages: Iterable[torch.UntypedStorage],
) -> dict[int, list[torch.UntypedStorage]]:
    """The distinct storages with memory, by where that is: some share it, as NumPy's arrays do."""
    found: dict[int, list[torch.UntypedStorage]] = {}
    for storage in {storage_identity(storage): storage for storage in storages}.values():
        found.setdefault(address_of(storage), []).append(storage)
    found.pop(0, None)
    return found


def _watch_free(address: int, storage: torch.UntypedStorage) -> weakref.finalize:
    """Mark the end of a storage in the profiler's own record.

    The CPU allocator reports a free only for memory that it saw allocated while a profiler was
    recording; without the marks, gradients that `zero_grad` drops would still seem live.
    """
    watched = weakref.finalize(storage, _mark_free, address)
    watched.atexit = False
    return watched


def _mark_free(address: int) -> None:
    # In a rerun of a selective checkpoint its mode would ask for the mark among what was saved.
    with real_execution(), record_function(f"{_FREED}{address}"):
        pass


def _cpu_deltas(
    events: Sequence[MemoryEvent], older: Mapping[int, tuple[int, int]]
) -> Iterator[int]:
    """Bytes allocated (positive) and freed (negative) within the marked span, in time order.

    Args:
        events: of the session.
        older: of what was there before, by address, the bytes and how many storages share them. The
            end of a storage is told by a mark, that of the memory by the allocator if an earlier
            session has seen it; in any order.
    """
    span = next(event for event in events if event.name == _MARK)
    left = dict(older)
    for event in events:
        if not span.start_ns <= event.start_ns <= span.end_ns or event is span:
            continue
        if event.nbytes:
            yield event.nbytes
            continue
        address = event.address or int(event.name.removeprefix(_FREED))
        nbytes, owners = left.pop(address, (0, 0))
        if event.name and owners > 1:
            left[address] = nbytes, owners - 1
        elif nbytes:
            yield -nbytes


def _device(device: Device) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"Memory can be measured on cpu and cuda, not on {device}.")
    return device


# --- resident ----------------------------------------------------------------------------------


def resident_nbytes(
    module: torch.nn.Module,
    inputs: Any = (),
    optimizer: torch.optim.Optimizer | None = None,
    device: Device = None,
) -> int:
    """Bytes that stay allocated through a step, each storage counted once.

    Parameters, buffers and tables that modules keep as such, gradients that exist, optimizer state
    that exists and the inputs (nested in tuples, dicts, dataclasses and registered containers);
    parameters of other modules in the optimizer, and their gradients.

    Args:
        module: the model.
        inputs: the batch.
        optimizer: the optimizer, if its state counts; it may be wrapped.
        device: what is elsewhere is not counted; the first parameter's device if not given.
    """
    if device is None:
        tensors = [*module.parameters(), *module.buffers()]
        device = tensors[0].device if tensors else "cpu"
    return resident_parts(module, inputs, optimizer, torch.device(device)).nbytes


def resident_parts(
    module: torch.nn.Module,
    inputs: Any,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
) -> ResidentParts:
    """The bytes of `resident_nbytes`, by what they are."""
    units = sharded_units(module)
    parameters = [*module.parameters(), *tensors_of_units(units)]
    stepped = parameters_of(optimizer)
    return ResidentParts(
        *counted_apart(
            parameters,
            [*gradients_of(parameters), *waiting_gradients(units)],
            state_of([optimizer]),
            buffers_of(module),
            tensors_in(inputs),
            [*stepped, *gradients_of(stepped)],
            device=device,
        )
    )


def buffers_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """Buffers of a module and its parts, and what they keep as one: tables that are no buffers.

    What was computed with gradients is a step's own, and counts there.
    """
    kept = (value for part in module.modules() for value in vars(part).values())
    tables = (t for t in kept if isinstance(t, torch.Tensor) and t.grad_fn is None)
    return [*module.buffers(), *tables]


def state_of(optimizers: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors that optimizers keep, each of their layers, in their state or beside it."""
    layers = [layer for optimizer in optimizers for layer in layers_of(optimizer)]
    found = [tensor for layer in layers for tensor in tensors_in_state(layer)]
    return [*found, *(tensor for layer in layers for tensor in kept_beside_state(layer))]


def kept_beside_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Tensors in attributes of an optimizer that are neither its parameters nor their gradients."""
    found = tensors_beside_state(optimizer)
    if not found:
        return []
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    storages = (s for t in [*stepped, *gradients_of(stepped)] for s in storages_of(t))
    known = {storage_identity(storage) for storage in storages}
    return [t for t in found if known.isdisjoint(map(storage_identity, storages_of(t)))]


def gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of parameters that exist now.

    `torch.func.functional_call` may have put results of operations in the parameters' place: those
    have none, and torch warns who asks.
    """
    return [gradient for _, gradient in own_gradients(parameters)]
