"""Private names of `torch.distributed`: the job's key-value store, and who calls in lockstep.

Guarantees: nothing here talks to another rank; where there is no job of several ranks, or torch was
built without `torch.distributed`, there is no store and nobody in lockstep.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import distributed, fx, nn
from torch.nn.parallel import DistributedDataParallel

from autoremat._torch.meta import fake_value
from autoremat._torch.spreading import sharding_ranks

__all__ = [
    "collectives_so_far",
    "communicating_ranks",
    "job_store",
    "lockstep_ranks",
    "part_of_store",
    "wrapping_ranks",
]


def _is_job() -> bool:
    """Whether other processes take part; those of a "fake" group do not exist."""
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
        and distributed.get_backend() != "fake"
    )


def job_store() -> Any | None:
    """The key-value store that the job's ranks have met at (a `Store`); None without a job."""
    return distributed.distributed_c10d._get_default_store() if _is_job() else None


def part_of_store(store: Any, name: str) -> Any:
    """The keys of a store that begin with a name, as a store of their own."""
    return distributed.PrefixStore(name, store)


def collectives_so_far() -> dict[str, int]:
    """How many collectives each process group of this job has begun, by the group's name.

    Raises:
        RuntimeError: if a group does not count them.
    """
    if not _is_job():
        return {}
    groups = distributed.distributed_c10d._world.pg_map
    return {g.group_name: g._get_sequence_number_for_group() for g in groups}


def lockstep_ranks(model: nn.Module) -> tuple[int, ...]:
    """The ranks that all call a model whenever one of them does, in ascending order.

    Those of its data-parallel wrapper, or of the mesh that its parameters are spread over: the
    largest group of them. Empty where none is known: then a rank may call it alone.
    """
    return max(_groups(model), key=len, default=()) if _is_job() else ()


def communicating_ranks(node: fx.Node) -> tuple[int, ...]:
    """The ranks between which a collective of a graph communicates; all of them where unknown.

    Its last argument is the group's name or, under Inductor from torch 2.13 on, the group itself.
    """
    group: Any = node.args[-1]
    try:
        if isinstance(group, fx.Node):
            group = getattr(fake_value(group), "real_obj", None)
        if isinstance(group, str):
            resolve: Any = distributed.distributed_c10d._resolve_process_group
            group = resolve(group)
        return _members(group)
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError):
        return tuple(range(distributed.get_world_size()))


def wrapping_ranks(model: nn.Module) -> tuple[int, ...]:
    """Those of the data-parallel wrapper alone, whose forward may run here: quick to tell."""
    return max(_wrapping(model), key=len, default=()) if _is_job() else ()


def _wrapping(model: nn.Module) -> Iterator[tuple[int, ...]]:
    active = DistributedDataParallel._get_active_ddp_module()
    for wrapper in (model, active):
        if isinstance(wrapper, DistributedDataParallel) and _calls_always(wrapper, model):
            yield _members(wrapper.process_group)


def _groups(model: nn.Module) -> Iterator[tuple[int, ...]]:
    yield from _wrapping(model)
    # Without the module, nobody has wrapped anything by it.
    fully_sharded = getattr(
        sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ()
    )
    for module in model.modules():
        if isinstance(module, fully_sharded):
            yield _members(module.process_group)
    yield from sharding_ranks(model.modules())
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)  # of a DTensor
        if mesh is not None:
            yield tuple(sorted(mesh.mesh.flatten().tolist()))


def _calls_always(wrapper: DistributedDataParallel, model: nn.Module) -> bool:
    """Whether each call of the wrapper calls the model: ranks may skip what may stay unused."""
    return model in (wrapper, wrapper.module) or not wrapper.find_unused_parameters


def _members(group: Any) -> tuple[int, ...]:
    return tuple(sorted(distributed.get_process_group_ranks(group)))
