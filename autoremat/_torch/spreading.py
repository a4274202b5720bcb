"""Private names of what shares a model among processes: units of FSDP1 and FSDP2, DDP's buckets.

Guarantees: importing this imports nothing of `torch.distributed`; without it, nothing is shared.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload

from autoremat._torch.gathering import (
    Gathering,
    gathered_of,
    moving_between,
    moving_in,
    tensors_among,
)
from autoremat._torch.owned import OfParameter, own_gradients

__all__ = [
    "REGISTERS_REDUCTION",
    "ShardedUnit",
    "active_replica",
    "gathered_inputs",
    "is_collective",
    "is_wait",
    "replica_among",
    "sharded_gradients",
    "sharded_units",
    "sharding_ranks",
    "tensors_of_units",
    "units_that_gather",
    "waiting_gradients",
]

_COLLECTIVES = frozenset(
    {"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor"}
)

_RESHARDING = frozenset({"FULL_SHARD", "HYBRID_SHARD"})  # after forward, of FSDP1's strategies
_GATHERED = ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard")  # of FSDP1's

REGISTERS_REDUCTION = "RegisterPostBackwardFunctionBackward"
"""The node behind which FSDP2 reduces a unit's gradients; it hands on those that it takes."""


@dataclass(frozen=True)
class ShardedUnit:
    """Parameters that FSDP gathers together and whose gradients it reduces together.

    Its tensors are not shown: some have no storage at present.

    Attributes:
        is_root: whether it is what no other unit gathers: the rest of the model.
        model: identity of what all units of one model have in common.
        runs_forward: whether its forward is running.
        shards: its parameters, as this process owns them.
        gathered: its parameters as a forward sees them, once they were gathered; under FSDP1 what
            these are views of, and the parameters that others see.
        moving: what is gathered now, and buffers of collectives.
        gradients: of its parameters that no process has reduced yet.
        waiting: identities of those that are gathered and have such a gradient.
        gathered_nbytes: of its parameters, gathered.
        buffer_nbytes: of what is gathered ahead: under FSDP2 before it is laid out.
        kept_nbytes: of its parameters from its forward to its backward.
        staying_nbytes: of its parameters, what stays gathered after its backward.
        reduced_nbytes: of the buffers that its gradients are reduced from, as many as are kept.
        gradient_share: of the bytes of its gradients, what stays of them after its backward.
        forward_ahead: numbers of the units whose gathers begin with its own in the forward, where
            the user says so.
        gathered_ahead: numbers of the units whose backward gathers begin with its own, where the
            user has said so.
        gathering: what tells which units of its model have changed; None under FSDP1.
        is_latest: whether of its model it has gone forward last: its backward comes next, and is
            gathered for ahead.
    """

    is_root: bool
    model: int
    runs_forward: bool
    shards: tuple[torch.Tensor, ...] = field(repr=False)
    gathered: tuple[torch.Tensor, ...] = field(repr=False)
    moving: tuple[torch.Tensor, ...] = field(repr=False)
    gradients: tuple[torch.Tensor, ...] = field(repr=False)
    waiting: frozenset[int]
    gathered_nbytes: int
    buffer_nbytes: int
    kept_nbytes: int
    staying_nbytes: int
    reduced_nbytes: int
    gradient_share: float
    gathered_ahead: tuple[int, ...] = ()
    forward_ahead: tuple[int, ...] = ()
    gathering: Gathering | None = field(default=None, repr=False)
    is_latest: bool = False


def sharded_units(model: nn.Module) -> list[ShardedUnit]:
    """The units of the model that a module is (a part of), in the order of its modules."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    modules = list(model.modules())
    units = _units(_known(_states(modules)))
    return [*units, *(unit for found in _flat_by_root(modules) for unit in _flat_units(found))]


def sharded_gradients(
    modules: Iterable[nn.Module], gathered: Iterable[torch.Tensor] = ()
) -> Iterator[OfParameter]:
    """The gradients that exist of units; also those that wait to be reduced.

    These are told of their unit's first parameter. It takes a small part of the units' time.

    Args:
        modules: the units are among them.
        gathered: or these are some of their gathered parameters, of FSDP2.
    """
    if "torch.distributed.fsdp" not in sys.modules or not torch.distributed.is_initialized():
        return  # each backward asks: without processes there are no units
    modules = list(modules)
    yield from _gradients(dict.fromkeys([*_states(modules), *_states_that_gather(gathered)]))
    for found in _flat_by_root(modules):
        for flat in (handle.flat_param for handle in _handles(found)):
            yield from own_gradients(_parameters_of_flat(flat))
            yield from ((flat, waiting) for waiting in _waiting_of_flat(flat))


def gathered_inputs(joint: fx.GraphModule, inputs: Sequence[object]) -> list[int]:
    """Positions of the views of what FSDP1 gathers: AOTAutograd takes them for no parameters.

    Args:
        joint: a graph of forward and backward.
        inputs: what its forward is given; where that is something else, nothing is found.
    """
    from autoremat._torch.compiling import is_primal  # imports the compiler, as its caller has

    flat = sys.modules.get("torch.distributed.fsdp._flat_param")
    count = sum(map(is_primal, joint.graph.find_nodes(op="placeholder")))
    if flat is None or count != len(inputs):
        return []
    bases = (v._base if isinstance(v, torch.Tensor) else None for v in inputs)
    return [n for n, base in enumerate(bases) if isinstance(base, flat.FlatParameter)]


def sharding_ranks(modules: Iterable[nn.Module]) -> Iterator[tuple[int, ...]]:
    """The ranks among which FSDP2 shards parameters, also while they are gathered."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    for _, group in _groups_of(_states(modules)):
        yield tuple(sorted(group.mesh_info.mesh.mesh.flatten().tolist()))


def units_that_gather(tensors: Iterable[torch.Tensor]) -> list[ShardedUnit]:
    """The units of FSDP2 of the models some of whose gathered parameters these are, of each all."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    return _units(_known(_states_that_gather(tensors)))


def _states_that_gather(tensors: Iterable[torch.Tensor]) -> list[Any]:
    asked = set(map(id, tensors))
    states = _states(_with_state()) if asked else []
    return [state for state in states if not asked.isdisjoint(_gathered(state))]


def _with_state() -> list[nn.Module]:
    """All modules to which a function of `torch.distributed` was applied, as `fully_shard` is."""
    return list(torch.distributed._composable_state._module_state_mapping)


def _states(modules: Iterable[nn.Module]) -> list[Any]:
    """Those of FSDP2 among modules, each once."""
    of_fsdp = torch.distributed.fsdp.FSDPModule
    return list(dict.fromkeys(m._get_fsdp_state() for m in modules if isinstance(m, of_fsdp)))


def _known(states: Iterable[Any]) -> list[Any]:
    """These and all that share a root with them, which each knows once its forward has run."""
    roots = {id(state._state_ctx): state for state in states}
    return [s for state in roots.values() for s in state._state_ctx.all_states or [state]]


def _groups_of(states: Iterable[Any]) -> list[tuple[Any, Any]]:
    return [(state, group) for state in states for group in _groups(state)]


def _gathered(state: Any) -> set[int]:
    return {id(gathered_of(param)) for group in _groups(state) for param in group.fsdp_params}


def _gradients(states: Iterable[Any]) -> Iterator[OfParameter]:
    """Of the models whose states these are."""
    for _, group in _groups_of(_known(states)):
        params = group.fsdp_params
        yield from own_gradients([param.sharded_param for param in params])
        yield from own_gradients(tensors_among(map(gathered_of, params)))
        yield from ((params[0].sharded_param, waiting) for waiting in _waiting(group))


def _waiting(group: Any) -> tuple[torch.Tensor, ...]:
    """Gradients in the type of their reduction, and what only some processes have reduced."""
    accumulated = (param.unsharded_accumulated_grad for param in group.fsdp_params)
    return tensors_among([*accumulated, group._partial_reduce_output])


def _units(states: Iterable[Any]) -> list[ShardedUnit]:
    """Of these; what is gathered ahead is told by its number among them."""
    groups = _groups_of(states)
    numbers = {id(group): number for number, (_, group) in enumerate(groups)}
    by_model: dict[int, list[Any]] = {}
    for state, group in groups:
        by_model.setdefault(id(state._state_ctx), []).append(group)
    gatherings = {model: Gathering.of(found) for model, found in by_model.items()}
    return [_unit(s, group, numbers, gatherings[id(s._state_ctx)]) for s, group in groups]


def _flat_by_root(modules: Iterable[nn.Module]) -> list[list[Any]]:
    """What FSDP1 has wrapped, by the root that it shares, once that has run."""
    found: dict[int, list[Any]] = {}
    for m in modules:
        if isinstance(m, torch.distributed.fsdp.FullyShardedDataParallel):
            order = m._exec_order_data
            found.setdefault(id(order) if order.all_handles else 0, []).append(m)
    return list(found.values())


def _handles(states: Sequence[Any]) -> list[Any]:
    """Of all that share their root; before its first forward, of these alone."""
    known = states[0]._exec_order_data.all_handles or [s._handle for s in states]
    return [handle for handle in known if handle is not None]


def _flat_units(states: Sequence[Any]) -> list[ShardedUnit]:
    """Of what FSDP1 has wrapped."""
    handles = _handles(states)
    return [_flat_unit(handle, states[0], handles) for handle in handles]


def _flat_unit(handle: Any, state: Any, handles: Sequence[Any]) -> ShardedUnit:
    """One flat parameter; the state tells what all of them have in common."""
    flat, parameters = handle.flat_param, _parameters_of_flat(handle.flat_param)
    world = handle.world_size if handle.uses_sharded_strategy else 1
    length = -(-flat._unpadded_unsharded_size.numel() // world) * world
    inside = set(handle._fully_sharded_module.modules())
    is_root = all(other._fully_sharded_module in inside for other in handles)
    stays = is_root or handle._sharding_strategy.name not in _RESHARDING
    whole_nbytes = length * handle._fwd_bwd_param_dtype.itemsize
    gathered_nbytes = whole_nbytes if world > 1 else 0
    owned_nbytes = length * handle._orig_param_dtype.itemsize // world
    prefetch = getattr(state.backward_prefetch, "name", "")
    is_ahead = state.forward_prefetch or prefetch == "BACKWARD_PRE"
    return ShardedUnit(
        is_root=is_root,
        model=id(state._exec_order_data),
        runs_forward=handle._training_state.name == "FORWARD",
        shards=parameters[:1],
        gathered=parameters[1:],
        moving=tensors_among(getattr(flat, name, None) for name in _GATHERED),
        gradients=_waiting_of_flat(flat),
        waiting=frozenset(),
        gathered_nbytes=gathered_nbytes,
        buffer_nbytes=gathered_nbytes if is_ahead else 0,
        kept_nbytes=gathered_nbytes if stays else 0,
        staying_nbytes=gathered_nbytes if stays and not state._sync_gradients else 0,
        reduced_nbytes=0,
        gradient_share=owned_nbytes / max(1, whole_nbytes) if state._sync_gradients else 1.0,
    )


def _parameters_of_flat(flat: Any) -> tuple[torch.Tensor, ...]:
    """Its shard, itself, and the parameters that others see."""
    return tensors_among([getattr(flat, "_local_shard", flat), flat, *(flat._params or ())])


def _waiting_of_flat(flat: Any) -> tuple[torch.Tensor, ...]:
    """Its reduced gradient, while another is made that is added to it."""
    return tensors_among([getattr(flat, "_saved_grad_shard", None)])


def tensors_of_units(units: Iterable[ShardedUnit]) -> list[torch.Tensor]:
    """What exists of the units but gradients: shards, what is gathered, what moves between them."""
    return [t for u in units for t in (*u.shards, *u.gathered, *u.moving)]


def waiting_gradients(units: Iterable[ShardedUnit]) -> list[torch.Tensor]:
    """Their gradients that are no parameter's yet."""
    return [gradient for unit in units for gradient in unit.gradients]


def _groups(state: Any) -> list[Any]:
    """In torch 2.11, a state has one group or none."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return [g for g in [state._fsdp_param_group] if g] if groups is None else list(groups)


def _unit(state: Any, group: Any, numbers: dict[int, int], gathering: Gathering) -> ShardedUnit:
    world = getattr(group.mesh_info, "shard_mesh_size", 1)
    sizes = [param.padded_sharded_param_size.numel() * world for param in group.fsdp_params]
    gathered_nbytes = _nbytes(group, sizes, "param_dtype")
    kept_nbytes = gathered_nbytes // _shards_between(group)
    reduced_nbytes = _nbytes(group, sizes, "reduce_dtype", "param_dtype")
    ahead, forward_ahead = (
        tuple(numbers[id(g)] for s in states for g in _groups(s) if id(g) in numbers)
        for states in (state._states_to_backward_prefetch, state._states_to_forward_prefetch)
    )
    buffers = getattr(group, "reduce_scatter_max_input_buffers", 1)
    order: list[Any] = getattr(
        group.comm_ctx, "post_forward_order", []
    )  # there once a forward has begun
    shards = tuple(param.sharded_param for param in group.fsdp_params)
    reduces = bool(group.reduce_grads)
    left_nbytes = _left_nbytes(group, sizes, world) if reduces else reduced_nbytes
    gathered = map(gathered_of, group.fsdp_params)
    return ShardedUnit(
        is_root=bool(state._is_root),
        model=id(state._state_ctx),
        runs_forward=group._training_state.name == "FORWARD",
        shards=shards,
        gathered=tensors_among(gathered),
        moving=(*moving_in(group), *moving_between(group.comm_ctx)),
        gradients=_waiting(group),
        waiting=frozenset(id(gathered_of(p)) for p in group.fsdp_params if _waits(group, p)),
        gathered_nbytes=gathered_nbytes,
        buffer_nbytes=gathered_nbytes if world > 1 else 0,
        kept_nbytes=kept_nbytes,
        staying_nbytes=0 if group.reshard_after_backward else gathered_nbytes,
        reduced_nbytes=buffers * reduced_nbytes if reduces else 0,
        gradient_share=left_nbytes / max(1, gathered_nbytes),
        gathered_ahead=ahead,
        forward_ahead=forward_ahead,
        gathering=gathering,
        is_latest=bool(order) and order[-1] is group,
    )


def _waits(group: Any, param: Any) -> bool:
    """Whether a gradient of a parameter exists that is no tensor's own."""
    return group._partial_reduce_output is not None or (
        param.unsharded_accumulated_grad is not None
    )


def _left_nbytes(group: Any, sizes: list[int], world: int) -> int:
    """Bytes of a unit's gradients that stay once its backward has reduced them.

    Replicas reduce what shards have reduced; they hold that, in its own type, until the whole
    backward ends, or until they are told to reduce it.
    """
    owned_nbytes = _nbytes(group, sizes, "orig_dtype") // world
    shared_nbytes = _nbytes(group, sizes, "reduce_dtype", "param_dtype") // world
    has_replicas = hasattr(group.mesh_info, "replicate_mesh_size")
    if has_replicas and not group.all_reduce_grads:
        return shared_nbytes
    return owned_nbytes + (shared_nbytes if has_replicas and shared_nbytes != owned_nbytes else 0)


def _nbytes(group: Any, sizes: list[int], *kinds: str) -> int:
    """Of so many elements each, in the first type that the policy gives, else their own."""
    total = 0
    for param, size in zip(group.fsdp_params, sizes, strict=True):
        asked = (getattr(param, k, getattr(group.mp_policy, k, None)) for k in kinds)
        dtype = next((dtype for dtype in asked if dtype is not None), param.sharded_param.dtype)
        total += size * dtype.itemsize
    return total


def _shards_between(group: Any) -> int:
    """Among how many processes a unit is split between forward and backward; beyond all, none."""
    after = group.post_forward_mesh_info
    if after is None:
        return 1
    return sys.maxsize if after == group.mesh_info else int(after.shard_mesh_size)


def is_collective(target: Any) -> bool:
    """Whether an operator communicates, so that all processes of a group have to run it."""
    return isinstance(target, OpOverload) and target.namespace in _COLLECTIVES


def is_wait(target: Any) -> bool:
    """Whether an operator waits for communication, whose result it returns."""
    return is_collective(target) and target.overloadpacket.__name__ == "wait_tensor"


def active_replica() -> nn.Module | None:
    """The DistributedDataParallel whose forward is running."""
    return nn.parallel.DistributedDataParallel._get_active_ddp_module()


def replica_among(modules: Iterable[nn.Module]) -> nn.Module | None:
    """The first DistributedDataParallel of these, which needs processes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    kind = nn.parallel.DistributedDataParallel
    return next((module for module in modules if isinstance(module, kind)), None)
