"""What a model that several processes share holds on this one beside its own parameters.

Enters: a module, sharded by FSDP or in a replica of DistributedDataParallel, or neither. Leaves: a
`Spread`. Guarantees: of a module that one process has to itself, all of it is 0.

FSDP2 holds shards always, and gathers a unit (most often a block) while it runs. While a unit goes
backward, there are:

    its parameters, a buffer into which those of the next to go backward are gathered, and
    the buffer from which the gradients of the one before are reduced.

FSDP1 gathers without a buffer: what is gathered ahead are parameters. Where units stay gathered
from forward to backward, a run keeps its parameters as it keeps what it saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from autoremat import _torch
from autoremat.memory.storage_sizes import storage_sizes


@dataclass(frozen=True)
class Traffic:
    """What processes that share a model move while a unit, or a graph in it, runs.

    Attributes:
        window_nbytes: gathered or communicated while it goes backward, before all others; where
            no unit runs, while code beside the units goes backward.
        forward_nbytes: more while it goes forward: what it is gathered into.
        reduced_nbytes: more once a unit has gone backward: what its gradients are reduced from.
        run_nbytes: what it keeps gathered from its forward to its backward; in no window.
        gradient_share: of the gradients that it returns, what stays.
        entering_nbytes: more than the window as its forward begins: what it and the one before it
            are gathered into, which FSDP2 lets go of only then; 0 where this is of one run.
        staying_nbytes: gathered as well from its backward on, where a unit is not let go of.
        unit: number of it, where this is of one run; less than 0 where it is of all runs of a
            graph, whichever of them takes the most.
    """

    window_nbytes: int = 0
    forward_nbytes: int = 0
    reduced_nbytes: int = 0
    run_nbytes: int = 0
    gradient_share: float = 1.0
    entering_nbytes: int = 0
    staying_nbytes: int = 0
    unit: int = -1

    def after(self, before: Traffic | None) -> Traffic:
        """The same behind another run: in the same unit, that keeps what is gathered already.

        And their gradients are reduced together, after the backward of the first.
        """
        if before is None or before.unit != self.unit:
            return self
        window_nbytes = self.window_nbytes - self.run_nbytes
        return replace(
            self, window_nbytes=window_nbytes, run_nbytes=0, reduced_nbytes=0, staying_nbytes=0
        )


@dataclass(frozen=True)
class Spread:
    """Bytes of one process, beside shards, their gradients and their optimizer's state.

    Attributes:
        traffic: of the unit that runs.
        now_nbytes: what is gathered or communicated at this moment.
        unseen_nbytes: what no tensor of Python's shows: DistributedDataParallel's buckets.
        kept_nbytes: of what is gathered, what runs of graphs keep from forward to backward.
        gradient_shares: of the gradient of each parameter, by its identity, what stays; 1 where
            there is none. Less than 0 where the parameter goes as well.
    """

    traffic: Traffic = field(default_factory=Traffic)
    now_nbytes: int = 0
    unseen_nbytes: int = 0
    kept_nbytes: int = 0
    gradient_shares: Mapping[int, float] = field(default_factory=dict)


class Sharing:
    """How the processes share one model, as its calls show it."""

    def __init__(self) -> None:
        """No call yet."""
        # Which parameters of each have buckets, by position; the one called last is the last.
        self._replicas = WeakKeyDictionary[nn.Module, frozenset[int]]()

    def note_call(self, modules: Iterable[nn.Module] = ()) -> None:
        """A call begins, of these or of what they are in: it may be that of a replica."""
        found = _torch.active_replica() or _torch.replica_among(modules)
        if found is not None:
            known = self._replicas.get(found, frozenset())
            for before in [r for r in self._replicas if r.module is found.module]:
                del self._replicas[before]  # it is called, or wrapped, again
            self._replicas[found] = known | _trained(found)

    @property
    def has_replica(self) -> bool:
        """Whether there is a DistributedDataParallel."""
        return bool(self._replicas)

    def now(self, units: Sequence[_torch.ShardedUnit], device: torch.device) -> Spread:
        """At this moment; of what FSDP2 has made these units of."""
        replicas = list(self._replicas.items())
        if replicas:
            return _replicated_all(replicas, device)
        return _sharded(units, device) if units else Spread()


def traffic_of_run(units: Sequence[_torch.ShardedUnit], device: torch.device) -> Traffic | None:
    """What a run that begins now moves; None where none of FSDP2's units is running."""
    number = max(
        (n for n, unit in enumerate(units) if unit.runs_forward),
        default=None,
        key=(lambda n: (not units[n].is_root, n)),
    )
    if number is None or any(unit.gathering is None for unit in units):
        return None
    unit, gathers, by_run = units[number], _gathers(units), _by_run(units)
    same = [n for n, other in enumerate(units) if other.model == unit.model]
    latest = [n for n in same if units[n].is_latest]
    moved_nbytes = sum(gathers[n] for n in unit.gathered_ahead or latest)
    kept_nbytes = _kept_nbytes(units, by_run)
    if unit.is_root:
        in_flight_nbytes = _in_flight_nbytes(units, device)
        return Traffic(
            kept_nbytes + moved_nbytes, max(0, in_flight_nbytes - moved_nbytes), unit=number
        )
    if not all(parameter.requires_grad for parameter in unit.gathered):
        # What it is gathered into is gone before its gradients come, which are as large.
        moved_nbytes = max(gathers[number], moved_nbytes)
    return Traffic(
        kept_nbytes + moved_nbytes,
        max(0, _in_forward_nbytes(units, number, unit.forward_ahead) - moved_nbytes),
        unit.reduced_nbytes,
        by_run[number],
        unit.gradient_share,
        staying_nbytes=unit.staying_nbytes,
        unit=number,
    )


def _trained(replica: Any) -> frozenset[int]:
    """Positions of parameters that are trained now."""
    given = enumerate(replica.module.parameters())
    return frozenset(number for number, parameter in given if parameter.requires_grad)


def _replicated_all(
    replicas: Sequence[tuple[nn.Module, frozenset[int]]], device: torch.device
) -> Spread:
    """Each has buckets of its own, which stay; what runs is the last of them."""
    found = [_replicated(replica, positions, device) for replica, positions in replicas]
    return replace(
        found[-1],
        unseen_nbytes=sum(each.unseen_nbytes for each in found),
        gradient_shares={k: share for each in found for k, share in each.gradient_shares.items()},
    )


def _replicated(replica: Any, positions: frozenset[int], device: torch.device) -> Spread:
    """Buckets are as large as all gradients, which may be views of them.

    They stay while a parameter is frozen for some calls, as a GAN's discriminator is.
    """
    trained = [p for n, p in enumerate(replica.module.parameters()) if n in positions]
    buckets_nbytes = sum(storage_sizes(trained, device).values())
    if not replica.gradient_as_bucket_view:
        return Spread(unseen_nbytes=buckets_nbytes)
    views = [p.grad for p in trained if p.grad is not None]
    return Spread(
        unseen_nbytes=max(0, buckets_nbytes - sum(storage_sizes(views, device).values())),
        traffic=Traffic(gradient_share=0.0),
        gradient_shares={id(p): 0.0 for p in trained},
    )


def _sharded(units: Sequence[_torch.ShardedUnit], device: torch.device) -> Spread:
    running = _running(units)
    blocks = [n for n, unit in enumerate(units) if not unit.is_root]
    inner = max(running.intersection(blocks), default=None)
    by_run, gathers, entering_nbytes = _by_run(units), _gathers(units), 0
    if inner is None:
        moved_nbytes, share = max((gathers[n] for n in blocks), default=0), 1.0
        if not any(unit.runs_forward for unit in units):
            # Before a backward, a root that was let go of is laid out beside what it kept of it.
            again = (gathers[n] and gathers[n] + units[n].kept_nbytes for n in running)
            moved_nbytes = max([moved_nbytes, *again])
        # What was gathered last stays in its buffer: for all of the forward, if that is the root.
        forward_nbytes = max(0, _in_flight_nbytes(units, device) - moved_nbytes)
    else:  # of equal ones, the last goes backward while the others hold the most
        last = max(n for n in blocks if _are_alike(units[n], units[inner]))
        before = [n for n in blocks if n < last and units[n].model == units[last].model]
        ahead = units[last].gathered_ahead or before[-1:]
        forward_ahead = max((units[n].forward_ahead for n in blocks), key=len)
        moved_nbytes = max(gathers[inner], sum(gathers[n] for n in ahead))
        in_forward_nbytes = _in_forward_nbytes(units, inner, forward_ahead)
        forward_nbytes = max(0, in_forward_nbytes - moved_nbytes)
        if units[inner].gathering is not None:
            entering_nbytes = max(0, 2 * units[inner].buffer_nbytes - moved_nbytes)
        share = units[inner].gradient_share
    traffic = Traffic(
        window_nbytes=_kept_nbytes(units, by_run) + moved_nbytes,
        forward_nbytes=forward_nbytes,
        reduced_nbytes=max((units[n].reduced_nbytes for n in blocks), default=0),
        run_nbytes=0 if inner is None else by_run[inner],
        gradient_share=share,
        entering_nbytes=entering_nbytes,
        staying_nbytes=0 if inner is None else units[inner].staying_nbytes,
    )
    return Spread(
        traffic,
        now_nbytes=sum(storage_sizes((t for u in units for t in u.moving), device).values()),
        kept_nbytes=sum(nbytes for n, nbytes in enumerate(by_run) if n not in running),
        gradient_shares={id(p): _left_of(units[n], p) for n in blocks for p in units[n].gathered},
    )


def _running(units: Sequence[_torch.ShardedUnit]) -> set[int]:
    """Those that are gathered now; of roots it is taken for granted."""
    return {n for n, unit in enumerate(units) if unit.is_root or unit.runs_forward}


def _by_run(units: Sequence[_torch.ShardedUnit]) -> list[int]:
    """What each keeps from forward to backward as its run does."""
    return [0 if unit.is_root else _kept_by_run(units, n) for n, unit in enumerate(units)]


def _kept_nbytes(units: Sequence[_torch.ShardedUnit], by_run: Sequence[int]) -> int:
    """What is gathered but for what runs keep; all of what is running."""
    running = _running(units)
    return sum(
        unit.gathered_nbytes if n in running else unit.kept_nbytes - by_run[n]
        for n, unit in enumerate(units)
    )


def _gathers(units: Sequence[_torch.ShardedUnit]) -> list[int]:
    """What the backward of each is gathered into, if it is not kept as it is."""
    return [0 if u.kept_nbytes == u.gathered_nbytes else u.buffer_nbytes for u in units]


def _in_forward_nbytes(
    units: Sequence[_torch.ShardedUnit], number: int, ahead: Sequence[int]
) -> int:
    """What is gathered into while one goes forward."""
    return max(units[number].buffer_nbytes, sum(units[n].buffer_nbytes for n in ahead))


def _in_flight_nbytes(units: Sequence[_torch.ShardedUnit], device: torch.device) -> int:
    """Of buffers that no unit has, at this moment."""
    known = dict.fromkeys(unit.gathering for unit in units if unit.gathering is not None)
    tensors = (tensor for gathering in known for tensor in gathering.in_flight())
    return sum(storage_sizes(tensors, device).values())


def _kept_by_run(units: Sequence[_torch.ShardedUnit], number: int) -> int:
    """What a unit keeps until its backward, if all that may run the same graph keep as much."""
    unit = units[number]
    alike = {u.kept_nbytes for u in units if _are_alike(u, unit)}
    return unit.kept_nbytes if len(alike) == 1 else 0


def _are_alike(one: _torch.ShardedUnit, other: _torch.ShardedUnit) -> bool:
    """Whether they may run the same graph, as far as their sizes tell."""
    return one.gathered_nbytes == other.gathered_nbytes


def _left_of(unit: _torch.ShardedUnit, parameter: torch.Tensor) -> float:
    """Of the bytes of a gradient, what there is more after its unit's backward than before.

    One that waits is added to: as where a parameter has a gradient, nothing is more then.
    """
    if id(parameter) in unit.waiting:
        return 0.0
    grown_nbytes = unit.staying_nbytes - unit.kept_nbytes
    return unit.gradient_share + grown_nbytes / max(1, unit.gathered_nbytes)
