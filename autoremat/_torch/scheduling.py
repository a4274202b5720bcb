"""Private names of Inductor's scheduler: its kernels before they are fused, and what it fuses."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._inductor import custom_graph_pass, ir, memory
from torch._inductor.codegen.wrapper import EfficientPeakEstimate, can_match_buffer_size
from torch._inductor.scheduler import NopKernelSchedulerNode, SchedulerNode
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from autoremat._torch.inductor import writes_in_place

__all__ = [
    "Copying",
    "CustomSchedulerPass",
    "Kernels",
    "Overwrite",
    "Scheduled",
    "ScheduledBuffer",
    "called_operators",
    "kernels_before_fusion",
    "limit_fusion",
    "limit_joining",
    "limit_reuse",
    "never_reuse",
    "origin_names",
    "pre_fusion_pass",
]

# What Inductor's caches accept as a pass over scheduler nodes; before 2.12 the class for graphs.
CustomSchedulerPass: Any = getattr(
    custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass
)


def pre_fusion_pass() -> Any:
    """The pass over scheduler nodes that the user has configured, if any."""
    return torch._inductor.config._pre_fusion_custom_pass


def origin_names(nodes: Sequence[Any]) -> set[str]:
    """Names of the graph nodes that Inductor's scheduler nodes compute."""
    parts = (part.node for node in nodes for part in node.get_nodes())
    return {origin.name for part in parts for origin in getattr(part, "origins", ())}


@dataclass(frozen=True)
class ScheduledBuffer:
    """Memory of one kernel's result, or of an input that may be freed.

    Attributes:
        allocated_nbytes: bytes taken when its maker runs.
        freed_nbytes: bytes returned after its last reader.
        makers: the kernels that make it: one, or those of the parts of a concatenation, of which
            the first takes the memory of all; none for an input.
        readers: the kernels that read it.
        is_kept: whether it is live at the end.
    """

    allocated_nbytes: int
    freed_nbytes: int
    makers: tuple[int, ...]
    readers: tuple[int, ...]
    is_kept: bool


@dataclass(frozen=True)
class Overwrite:
    """A result that may take the memory of what its kernel reads.

    Attributes:
        kernel: the one that reads and writes.
        nbytes: what is then not taken twice.
        earlier: kernels that must run in an earlier one than this: those that read the same memory,
            unless this one needs what they make and they read it at the same places.
    """

    kernel: int
    nbytes: int
    earlier: tuple[int, ...]


@dataclass(frozen=True)
class Kernels:
    """Inductor's kernels before fusion, numbered in their order.

    Attributes:
        numbers: their numbers, by the names of operations.
        predecessors: for each kernel those that must run before it.
        buffers: what they make and read.
        overwrites: what may be written over, as Inductor decides it: for each kernel by result, the
            first that is possible.
    """

    numbers: Mapping[str, int]
    predecessors: tuple[tuple[int, ...], ...]
    buffers: tuple[ScheduledBuffer, ...]
    overwrites: tuple[tuple[Overwrite, ...], ...]


@dataclass(frozen=True)
class Copying:
    """Operators that copy to memory which does not count, and back.

    Attributes:
        away: whose result lies there.
        back: whose argument lies there.
        waits: whose result is its first argument.
    """

    away: frozenset[Any] = frozenset()
    back: frozenset[Any] = frozenset()
    waits: frozenset[Any] = frozenset()


def kernels_before_fusion(nodes: Sequence[Any], copying: Copying | None = None) -> Kernels:
    """Inductor's scheduler nodes by their positions; inside a compile only."""
    with _no_plan_left(nodes):
        return _kernels(nodes, copying or Copying())


def called_operators(nodes: Sequence[Any]) -> set[Any]:
    """The operators that Inductor's scheduler nodes call as they are."""
    return {_operator(node.node) for node in nodes} - {None}


def never_reuse(nodes: Sequence[Any], operators: Collection[Any]) -> None:
    """Let no later result lie in memory that these operators have given; inside a compile only.

    It is then freed as the code ends.
    """
    found = (n.node.get_name() for n in nodes if _operator(n.node) in operators)
    V.graph.never_reuse_buffers.update(found)


def _operator(node: Any) -> Any:
    """What makes a result, or a part of it."""
    if isinstance(node, ir.MultiOutput):
        node = node.inputs[0]
    return node.op_overload if isinstance(node, ir.FallbackKernel) else None


def _copied(nodes: Sequence[Any], copying: Copying) -> tuple[dict[str, str], set[str]]:
    """By name the memory that a copy lies in, and the memory that does not count."""
    whole: dict[str, str] = {}
    elsewhere: set[str] = set()
    for node in (node.node for node in nodes):
        operator = _operator(node)
        if operator in copying.away | copying.back | copying.waits:
            name, first = node.get_name(), node.inputs[0].get_name()
            is_given = isinstance(node, ir.MultiOutput) or operator in copying.waits
            whole[name] = whole.get(first, first) if is_given else name
            if operator in copying.away:
                elsewhere.add(whole[name])
            elif operator in copying.back and not is_given:
                elsewhere.add(whole.get(first, first))
    return whole, elsewhere


@contextlib.contextmanager
def _no_plan_left(nodes: Sequence[Any]) -> Iterator[None]:
    """Afterwards the nodes know as little of memory as before.

    Inductor, too, plans by nodes as they are fused only where `reorder_for_peak_memory` is on; else
    it would find these.
    """
    buffers = list(nodes[0].scheduler.name_to_buf.values())
    known = [vars(thing).copy() for thing in (*buffers, *nodes)]
    try:
        yield
    finally:
        for thing, before in zip((*buffers, *nodes), known, strict=True):
            for name in ("mpi_buffer", "mpi_node"):
                if name in before:
                    setattr(thing, name, before[name])
                else:
                    vars(thing).pop(name, None)


def _kernels(nodes: Sequence[Any], copying: Copying) -> Kernels:
    scheduler, outputs = nodes[0].scheduler, OrderedSet(V.graph.get_output_names())
    _, inputs = memory.prepare_planning_info(
        list(nodes),
        scheduler.name_to_buf,
        scheduler.name_to_fused_node,
        OrderedSet(V.graph.graph_inputs.keys()),
        outputs,
    )
    position = {node: number for number, node in enumerate(nodes)}
    made: list[tuple[Any, tuple[int, ...]]] = [(b, ()) for b in inputs.values()]
    made += [(b, (position[node],)) for node in nodes for b in node.get_outputs()]
    own: dict[str, ScheduledBuffer] = {}
    for buffer, makers in made:
        planned, name = buffer.mpi_buffer, buffer.get_name()
        readers = {position[reader] for reader in planned.succ_nodes}
        sizes = int(planned.size_alloc), int(planned.size_free)
        own[name] = ScheduledBuffer(*sizes, makers, tuple(sorted(readers)), name in outputs)
    copied, elsewhere = _copied(nodes, copying)
    wholes = {b.get_name(): _whole(b) for b, _ in made} | copied
    buffers = tuple(_in_one_memory(own, wholes, elsewhere))
    predecessors = tuple(
        tuple(sorted(position[before] for before in node.mpi_node.pred_nodes)) for node in nodes
    )
    numbers = {part.get_name(): position[node] for node in nodes for part in node.get_nodes()}
    parts = [part for node in nodes for part in node.get_nodes()]
    possible = (tuple(_overwrites(part, numbers)) for part in parts)
    return Kernels(numbers, predecessors, buffers, tuple(filter(None, possible)))


def _whole(buffer: Any) -> str:
    """The name of the memory that a buffer lies in: of a concatenation, if it is a part of one."""
    name, node = buffer.get_name(), getattr(buffer, "node", None)  # an input has none
    if node is not None and isinstance(node.get_output_spec(), ir.NonOwningLayout):
        whole = node.layout.view.get_name()
        if isinstance(V.graph.get_buffer(whole), ir.ConcatKernel):
            return str(whole)
    return str(name)


def _in_one_memory(
    buffers: Mapping[str, ScheduledBuffer], wholes: Mapping[str, str], elsewhere: Collection[str]
) -> Iterator[ScheduledBuffer]:
    """Parts of a concatenation have its memory, and copies that of who began them."""
    parts: dict[str, list[ScheduledBuffer]] = {}
    for name, whole in wholes.items():
        parts.setdefault(whole, []).append(buffers[name])
    for whole, found in parts.items():
        here = whole not in elsewhere
        yield ScheduledBuffer(
            allocated_nbytes=max(here * part.allocated_nbytes for part in found),
            freed_nbytes=max(here * part.freed_nbytes for part in found),
            makers=tuple(sorted({maker for part in found for maker in part.makers})),
            readers=tuple(sorted({reader for part in found for reader in part.readers})),
            is_kept=any(part.is_kept for part in found),
        )


def _overwrites(node: Any, numbers: Mapping[str, int]) -> Iterator[Overwrite]:
    """What a loop may write over, in the order in which Inductor tries: one of them it will."""
    if not isinstance(node, SchedulerNode) or not writes_in_place():
        return
    results = [buffer for buffer in node.get_outputs() if _may_lie_elsewhere(buffer.node)]
    for read in node.read_writes.reads if len(results) == 1 else ():
        buffer = _overwritable(node.scheduler, read.name)
        if buffer is None:
            continue
        users = {user.node.get_name(): user for user in buffer.users}
        own = users.get(node.get_name())
        if own is None or not own.can_inplace or not users.keys() <= numbers.keys():
            continue
        if not can_match_buffer_size(buffer.node, results[0].node):
            continue
        places = _places(node, read.name)
        earlier = {
            numbers[name]
            for name, user in users.items()
            if user.node is not node
            and (name not in node.ancestors or _places(user.node, read.name) != places)
        }
        if len(places) == 1 and numbers[node.get_name()] not in earlier:
            nbytes = int(results[0].mpi_buffer.size_alloc)
            yield Overwrite(numbers[node.get_name()], nbytes, tuple(sorted(earlier)))


def _may_lie_elsewhere(result: ir.Buffer) -> bool:
    """Whether a result has memory of its own choice."""
    fixed = result.get_inputs_that_alias_output() or result.get_mutation_names()
    is_shared = isinstance(result.get_output_spec(), _SHARED)
    return bool(result.should_allocate() and not fixed and not is_shared)


def _overwritable(scheduler: Any, name: str) -> Any:
    """The buffer of this name if something may ever be written over it, else None."""
    graph: Any = V.graph
    donated = scheduler.name_to_donated_buffer.get(name)
    buffer = donated or scheduler.name_to_buf.get(name)
    is_fixed = (name in graph.graph_inputs and donated is None) or name in graph.never_reuse_buffers
    if buffer is None or buffer.node is None or is_fixed or name in graph.constants:
        return None
    layouts = (ir.NoneLayout, ir.MultiOutputLayout, ir.MutationLayoutSHOULDREMOVE, *_SHARED)
    maker = buffer.defining_op
    is_view = (
        maker is not None
        and isinstance(maker.node, (ir.FallbackKernel, ir.MultiOutput))
        and len(buffer.node.get_inputs_that_alias_output()) > 0
    )
    is_kept = is_view or isinstance(maker, NopKernelSchedulerNode)
    return None if is_kept or isinstance(buffer.node.get_output_spec(), layouts) else buffer


def _places(node: Any, name: str) -> set[Any]:
    """Where a node reads and writes a buffer, as Inductor says it."""
    return {place for place in node.read_writes.reads_and_writes() if place.name == name}


def limit_fusion(
    nodes: Sequence[Any], numbers: Mapping[str, int], admits: Callable[[Sequence[int]], bool]
) -> None:
    """Let the nodes' own scheduler ask, last of all, whether two may become one kernel.

    `inductor_choices_class`, which is documented, does not serve: torch 2.13 makes one object of
    it per thread, at the thread's first compile, and keeps that for all later ones of anybody.

    Args:
        nodes: the nodes before any fusion.
        numbers: their positions by the names of operations (`kernels_before_fusion`).
        admits: is given, for each position, the first one in the same kernel, as it would be. What
            is fused already is asked of the scheduler each time: it fuses less than it asks about.
    """
    scheduler = nodes[0].scheduler
    makes_cycle = scheduler.will_fusion_create_cycle

    def refuses(node1: Any, node2: Any) -> bool:
        return makes_cycle(node1, node2) or not admits(_fused(scheduler, numbers, node1, node2))

    scheduler.will_fusion_create_cycle = refuses


@dataclass(frozen=True)
class Scheduled:
    """A kernel as it is fused, in the order in which code is generated.

    Attributes:
        parts: numbers of the kernels before fusion.
        may_share: whether it may be in one C++ function with its neighbours.
    """

    parts: tuple[int, ...]
    may_share: bool


def limit_joining(
    nodes: Sequence[Any],
    numbers: Mapping[str, int],
    ends: Callable[[Sequence[Scheduled]], Collection[int]],
) -> None:
    """Let the nodes' functions on the CPU end where they are told to.

    Inductor puts kernels that follow each other into one C++ function, for which all of what they
    make is allocated before it is called, and after which all of what they read is freed.

    Args:
        nodes: the nodes before any fusion.
        numbers: their positions by the names of operations (`kernels_before_fusion`).
        ends: is given the kernels when the first is generated; says after which a function ends.
    """
    devices = {device for node in nodes if (device := node.get_device()) is not None}
    for device in devices:
        if device.type == "cpu":
            backend = nodes[0].scheduler.get_backend(device)
            backend.ready_to_flush = _ready_to_flush(backend, numbers, ends)


def _ready_to_flush(
    backend: Any,
    numbers: Mapping[str, int],
    ends: Callable[[Sequence[Scheduled]], Collection[int]],
) -> Callable[[], bool]:
    is_ready, scheduler = backend.ready_to_flush, backend.scheduler

    @functools.cache
    def last_nodes() -> set[Any]:
        nodes: list[Any] = []
        kernels: list[Scheduled] = []
        for node in scheduler.nodes:
            parts = {numbers[part.get_name()] for part in node.get_nodes()}
            if isinstance(node, NopKernelSchedulerNode) and nodes:  # never asked about
                kernels[-1] = replace(kernels[-1], parts=(*kernels[-1].parts, *sorted(parts)))
            else:
                nodes.append(node)
                kernels.append(Scheduled(tuple(sorted(parts)), _may_share(node)))
        return {nodes[end] for end in ends(kernels)}

    return lambda: is_ready() or scheduler.current_node in last_nodes()


def _may_share(node: Any) -> bool:
    device = node.get_device()
    is_on_cpu = device is not None and device.type == "cpu"
    return is_on_cpu and not (node.is_extern() or node.is_template())


# Layouts of memory that other processes see; a release may be without.
_SHARED: tuple[Any, ...] = tuple(filter(None, [getattr(ir, "CommBufferLayout", None)]))

# What the peak of a scheduler's code may be.
_limits_nbytes: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def limit_reuse(nodes: Sequence[Any], limit_nbytes: int) -> None:
    """Let the nodes' code keep free memory for a later result only where the peak allows it.

    Inductor holds on to what is free if a result of the same size comes later and its own estimate
    of the peak is not exceeded between. That estimate counts what is written over twice.

    Args:
        nodes: the nodes before any fusion.
        limit_nbytes: the peak that must not be exceeded.
    """
    _install()
    _limits_nbytes[nodes[0].scheduler] = limit_nbytes


@functools.cache
def _install() -> None:
    """Let Inductor's estimate of a peak ask for a limit; for the rest of the process."""
    start = EfficientPeakEstimate.__init__

    @functools.wraps(start)
    def __init__(self: EfficientPeakEstimate) -> None:
        start(self)
        limit_nbytes = _limits_nbytes.get(V.graph.scheduler, self.overall_peak_memory)
        self.overall_peak_memory = min(self.overall_peak_memory, limit_nbytes)

    EfficientPeakEstimate.__init__ = __init__  # type: ignore[method-assign]


def _fused(scheduler: Any, numbers: Mapping[str, int], *joined: Any) -> list[int]:
    """For each position the first one in its kernel, if the joined nodes become one."""
    names = {part.get_name() for node in joined for part in node.get_nodes()}
    of_position = {numbers[name]: id(scheduler.name_to_fused_node[name]) for name in numbers}
    together = {of_position[numbers[name]] for name in names}
    first: dict[int, int] = {}
    kernels = (of_position[position] for position in range(len(of_position)))
    return [
        first.setdefault(0 if kernel in together else kernel, position)
        for position, kernel in enumerate(kernels)
    ]
